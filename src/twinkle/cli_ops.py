"""The commands ``twinkle-kernel ops ...``: arguments and help; see :mod:`twinkle.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twinkle.commands.invocation import Json, run_command

ops_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Shows and checks the operators of the ATen level."
)


@ops_app.command("list")
def ops_list(json: Json = False) -> None:
    """Shows the operators, and by which kernels this machine would serve them.

    For each platform that is here: what the kernel is written in, and the
    dispatch keys at which it would be installed.

    [bold]Examples[/]
      twinkle-kernel ops list
      twinkle-kernel ops list --json | jq .operators.clone
    """
    from twinkle.commands.ops import list_operators

    run_command(list_operators, as_json=json)


@ops_app.command("new")
def ops_new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operator's, without aten::.", show_default=False)],
    schema: Annotated[
        str | None,
        typer.Option("--schema", help="As PyTorch prints it; needed where there are several.", show_default=False),
    ] = None,
    folder: Annotated[str, typer.Option("--folder", help="That of the operators.")] = "ops",
) -> None:
    """Makes the package of a new operator, which can be run and checked at once.

    Its kernel is PyTorch's own decomposition of the operator, until you write
    another. The operator is added to the pyproject.toml beside the folder, whose
    name the package has: --folder chip_ops makes chip_ops.silu.

    [bold]Examples[/]
      twinkle-kernel ops new silu
      twinkle-kernel ops new mish --schema "mish(Tensor self) -> Tensor"
      twinkle-kernel ops new mish --folder chip_ops
    """
    from twinkle.commands.ops import new

    run_command(new, name, schema=schema, folder=folder)


@ops_app.command("run")
def ops_run(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="Default: all of them.", show_default=False)
    ] = None,
    level: Annotated[str, typer.Option("--level", help="kernel, op, framework or all.")] = "all",
    engine: Annotated[
        str, typer.Option("--engine", help="What the framework level runs: transformers or vllm.")
    ] = "transformers",
    device: Annotated[str, typer.Option("--device", metavar="PROFILE", help="A profile, alias or file.")] = "cpu",
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="For one operator at one level.")
    ] = 1200.0,
    report: Annotated[
        bool, typer.Option("--report", help="Also write the operators' reports/PROFILE.json and REPORT.md.")
    ] = False,
    json: Json = False,
) -> None:
    """Checks operators: the kernel alone, in PyTorch, and in a model.

    The kernel level compares each kernel with the operator's reference. The op
    level registers it and compares everything that a caller could notice with
    PyTorch's own. The framework level trains and runs a small Qwen3 with and
    without it, in processes of their own; with --engine vllm a real vLLM
    generates with and without all of the operators, where vLLM is installed.
    What isn't done within the time limit is a failed check.

    The exit code is 1 when a check failed and 3 when nothing could be run.

    [bold]Examples[/]
      twinkle-kernel ops run clone
      twinkle-kernel ops run clone copy_ --level op --device ascend910
      twinkle-kernel ops run --level kernel --json
      twinkle-kernel ops run --level framework --engine vllm
    """
    from twinkle.commands.ops import run

    chosen = {"level": level, "engine": engine, "device": device, "time_limit": time_limit}
    run_command(run, operators or (), **chosen, report=report, as_json=json)


@ops_app.command("report")
def ops_report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What TWINKLE_A1_REPORT_DIR named.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Shows what operators did in the processes of an engine, running or gone.

    Each process that was started with TWINKLE_A1_OPS and TWINKLE_A1_REPORT_DIR
    set left a record and its counts there, also one that was killed.

    The exit code is 1 when operators weren't activated, a kernel raised or a file
    can't be read, and 3 when there is no record.

    [bold]Examples[/]
      TWINKLE_A1_OPS=all TWINKLE_A1_PLATFORM=cpu TWINKLE_A1_REPORT_DIR=out/a1 \\
        vllm serve ./my-model
      twinkle-kernel ops report out/a1
    """
    from twinkle.commands.ops_report import run

    run_command(run, folder, as_json=json)
