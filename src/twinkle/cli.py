"""The command ``twinkle-kernel``: arguments and help; the work is in :mod:`twinkle.commands`, one module per command.

Nothing heavy is imported before a command needs it: ``--help`` and ``--version`` load neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import twinkle
from twinkle.cli_ops import ops_app
from twinkle.commands.invocation import Json, run_command

app = typer.Typer(
    name="twinkle-kernel",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(ops_app, name="ops")

MODEL_HELP = "tiny:<preset>, a folder with config.json, a config.json file, or a Hub id."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write it there as one HTML page.", show_default=False),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16.", show_default=False)
]
Backend = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="CHAIN",
        help="Try these backends instead of every entry's own chain, best first: repeat the option or use commas.",
        show_default=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twinkle-kernel {twinkle.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The best kernels at hand for a PyTorch program: shown, proved and undone.

    [bold]Examples[/]
      twinkle-kernel info                what this machine has
      twinkle-kernel plan tiny:qwen3     what would be replaced, why not more
      twinkle-kernel verify tiny:qwen3   the same numbers, gradients included?
      twinkle-kernel bench               how fast every kernel is on this machine
      twinkle-kernel bench tiny:qwen3    what the kernels gain in a training step
      twinkle-kernel demo                a training with and without kernels

    [bold]Exit codes[/]
      0  fine
      1  a check failed
      2  wrong use; one line on stderr says what to do
      3  nothing could be checked on this machine
    """


@app.command()
def info(json: Json = False) -> None:
    """Shows platforms, versions, every op and backend, and third-party plug-ins.

    Each with the reason why it can't be used here, if it can't. The output is
    what to paste into a bug report.

    [bold]Examples[/]
      twinkle-kernel info
      twinkle-kernel info --json | jq .ops.rms_norm
    """
    from twinkle.commands.info import run

    run_command(run, as_json=json)


@app.command()
def plan(
    model: Model,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Plan for this device; default: the accelerator of this machine, else cpu."),
    ] = None,
    dtype: Dtype = None,
    backend: Backend = None,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Also list entries that name nothing of this model, with --json too.")
    ] = False,
    html: Html = None,
    json: Json = False,
) -> None:
    """Shows what kernelize() would do to a model, and what no entry covers.

    Nothing is changed. The model is built on the meta device, without weights:
    its size doesn't matter, and of a Hub id only the config is fetched.

    [bold]Examples[/]
      twinkle-kernel plan tiny:qwen3_moe
      twinkle-kernel plan Qwen/Qwen3-8B --dtype bfloat16
      twinkle-kernel plan ./my-checkpoint --device cuda --all
      twinkle-kernel plan ./config.json --backend inductor --json
    """
    from twinkle.commands.plan import run

    run_command(run, model, device=device, dtype=dtype, backends=backend, all_rows=all_rows, html=html, as_json=json)


@app.command()
def verify(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or --op.", show_default=False)
    ] = None,
    op: Annotated[
        str | None,
        typer.Option("--op", metavar="OP", help="Verify a backend of this op, without a MODEL.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Run here; default: this machine's accelerator, else cpu.")
    ] = None,
    dtype: Dtype = None,
    backend: Backend = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            help="Layers to build (of the text part); of a config at most as many as it has, of a preset any number.",
            show_default=False,
        ),
    ] = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Compares a kernelized model with the original: outputs and all gradients.

    Each entry alone, then all together. The weights are random, so nothing but
    the config is needed. A tensor is off when its distance to the result in fp64
    is more than twice the original's own distance plus one unit in the last
    place; printed is the share of that which the worst tensor uses, the median
    of three inputs. Of hundreds of tensors one may be slightly over by chance:
    such a one is judged again, by nine other inputs.

    With --op and one --backend instead: whether a backend, of a plug-in say,
    keeps an op's contract, in every variant that models have of it, fp32, bf16
    and fp16, four layouts in memory, outputs and all gradients, together and
    alone.

    The exit code is 1 when something is off and 3 when no kernel was installed.

    [bold]Examples[/]
      twinkle-kernel verify tiny:llama
      twinkle-kernel verify tiny:qwen3 --backend inductor   (any CPU; compiles)
      twinkle-kernel verify Qwen/Qwen3-0.6B --layers 2 --dtype bfloat16
      twinkle-kernel verify --op rms_norm --backend mine
    """
    if op is not None or model is None:
        from twinkle.commands.verify_op import run as run_op

        others = {"MODEL": model, "--dtype": dtype, "--layers": layers, "--html": html}
        run_command(run_op, op, backends=backend, device=device, others=others, as_json=json)
    from twinkle.commands.verify import run

    run_command(run, model, device=device, dtype=dtype, backends=backend, layers=layers, html=html, as_json=json)


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Without it: ops.", show_default=False)
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="OP", help="Only this op: repeat the option or use commas.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Measure here; default: this machine's accelerator, else cpu.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SECONDS",
            min=1,
            help="Start nothing new after so long; default: 120. With a MODEL: as many rounds as that gives; "
            "default: 20 rounds, or 60.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ops: toy sizes and nothing compiled: does everything run?")
    ] = False,
    inductor: Annotated[
        bool | None,
        typer.Option(
            "--inductor/--no-inductor",
            help="Ops: measure torch.compile too (the default), which takes most of the time.",
            show_default=False,
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="NAMES",
            help="MODEL: measure these too: a backend, e.g. inductor, or an opt-in entry, e.g. fused_ce or fused_qk.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="MODEL: rows.", show_default=False)] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="MODEL: tokens in a row.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="MODEL: float32, bfloat16 or float16; default: bfloat16, on a CPU float32.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="MODEL: layers to build, as for verify.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the JSON there.", show_default=False)
    ] = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Times kernels on this machine: op by op, or what they gain in a MODEL.

    Ops: who takes part are the classes and functions of transformers (hf),
    PyTorch's own F.rms_norm, and every backend that can run here, plug-ins
    included. All are timed in turns, forward and backward; a star marks what the
    default mapping takes. A kernel whose result is wrong isn't timed.

    MODEL: a training step (forward, loss, backward) of the model with random
    weights: the original in turns with each entry of the default mapping switched
    on alone, each backend of its chain alone, and all together. Shown are calls,
    time saved with its spread, memory, what is not worth it here, and a mapping
    to copy where another one is faster by more than the noise.

    Ctrl-C shows what was measured so far. The exit code is 1 when a kernel's
    result is wrong and 3 when nothing could be measured.

    [bold]Examples[/]
      twinkle-kernel bench --quick
      twinkle-kernel bench --op rms_norm --op rotary --no-inductor
      twinkle-kernel bench --device cuda:1 --budget 300 --output bench.json
      twinkle-kernel bench tiny:qwen3
      twinkle-kernel bench Qwen/Qwen3-0.6B --batch 4 --also inductor
    """
    from twinkle.commands.bench import run

    run_command(
        run,
        model,
        for_ops={"quick": quick or None, "inductor": inductor},
        for_models={"also": also, "batch": batch, "length": length, "dtype": dtype, "layers": layers},
        ops=op,
        device=device,
        budget=budget,
        output=output,
        html=html,
        as_json=json,
    )


@app.command()
def demo(
    steps: Annotated[int, typer.Option("--steps", min=2, help="Training steps of each run.")] = 40,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Stop earlier when the steps of both runs have taken this long.")
    ] = 40.0,
    html: Annotated[
        Path, typer.Option("--html", metavar="FILE", help="Where the report is written, in a folder that is there.")
    ] = Path("out/demo.html"),
    device: Annotated[
        str | None, typer.Option("--device", help="Train here; default: this machine's accelerator, else cpu.")
    ] = None,
    backend: Backend = None,
) -> None:
    """Trains a small Qwen3 with and without kernels, and compares.

    Its tokens are bytes, its text is this project's own documents. Same seed,
    same batches: the losses must agree within the numerical judgement, and after
    the undo the model must be the original again, bit for bit. Speed and memory
    are shown side by side; the report is one HTML file.

    Where the default mapping installs nothing, a backend that has to be asked
    for serves, and the report says so.

    The exit code is 1 when a check fails.

    [bold]Examples[/]
      twinkle-kernel demo
      twinkle-kernel demo --steps 200 --seconds 600 --html qwen3.html
      twinkle-kernel demo --backend torch
    """
    from twinkle.commands.demo.command import run

    run_command(run, steps=steps, seconds=seconds, html=html, device=device, backends=backend)


if __name__ == "__main__":
    app()
