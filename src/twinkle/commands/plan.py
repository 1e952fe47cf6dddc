"""``twinkle-kernel plan``: what ``kernelize`` would do to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from twinkle.commands.console import count, print_json, progress, quiet_logs, show, stdout
from twinkle.commands.models import find_model
from twinkle.commands.options import mapping_for, parse_chain, parse_device, parse_dtype
from twinkle.kernel.report_text import concerning, report_blocks
from twinkle.platforms import platform_of


def run(
    model: str,
    *,
    device: str | None,
    dtype: str | None,
    backends: Sequence[str] | None,
    all_rows: bool,
    as_json: bool,
) -> int:
    """Prints the plan; the exit code is 0.

    Raises:
        CommandError: there is no such model, device, dtype or backend.
    """
    chain = parse_chain(backends)
    source = find_model(model)
    planned_for, how = parse_device(device, present=False)
    with progress(as_json) as bar:
        bar.add_task(f"building {model} on the meta device", total=None)
        built = source.on_meta(parse_dtype(dtype))
        with quiet_logs():  # the tables say the same
            found = _plan(built, chain, planned_for)
    facts = {
        "model": model,
        "class": type(built).__name__,
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "dtype": str(built.dtype).removeprefix("torch."),
        "backends": list(chain) or None,
        **found,
        "device": planned_for,
    }
    if as_json:
        print_json(facts if all_rows else {**facts, "rows": concerning(facts["rows"])})
        return 0
    console = stdout()
    parameters = count(facts["parameters"])
    console.print(f"{model}: {facts['class']}, {parameters} parameters, {facts['dtype']}", style="bold")
    console.print(f"planned for {planned_for} ({how}){': ' + ', '.join(chain) + ' for every entry' if chain else ''}\n")
    show(console, report_blocks(facts, console.width, all_rows=all_rows, lists_all="--all"))
    return 0


def _plan(model: Any, chain: tuple[str, ...], device: str) -> dict[str, Any]:
    import torch

    from twinkle.kernel.report import plan

    kind = device.partition(":")[0]
    # PyTorch takes a vendor's device name only after the vendor's plug-in was imported; without it nothing can be
    # there, whatever the index, and the reasons shall call it what the vendor does.
    stand_in = "privateuseone"
    try:
        planned_for = torch.device(device)
    except RuntimeError:
        planned_for = torch.device(stand_in)
    found = json.dumps(plan(model, mapping_for(chain), device=planned_for).to_dict()).replace(stand_in, kind)
    return {**json.loads(found), "device_here": platform_of(kind) is not None}
