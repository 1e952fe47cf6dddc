"""``twinkle-kernel plan``: what ``kernelize`` would do to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle.commands.console import answer, count, progress, quiet_logs, write_page
from twinkle.commands.models import find_model
from twinkle.commands.options import check_files, mapping_for, parse_chain, parse_device, parse_dtype
from twinkle.document import GAP, Part, Text
from twinkle.exits import FINE
from twinkle.kernel.report_text import concerning, report_parts
from twinkle.naming import dtype_name
from twinkle.platforms import platform_of


def run(
    model: str,
    *,
    device: str | None,
    dtype: str | None,
    backends: Sequence[str] | None,
    all_rows: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """Prints the plan; the exit code is 0.

    Raises:
        CommandError: there is no such model, device, dtype or backend, or the page can't be written.
    """
    chain = parse_chain(backends)
    source = find_model(model)
    planned_for, how = parse_device(device, present=False)
    check_files({"--html": html})
    with progress(as_json) as bar:
        bar.add_task(f"building {model} on the meta device", total=None)
        built = source.on_meta(parse_dtype(dtype))
        with quiet_logs():  # the tables say the same
            found = _plan(built, chain, planned_for)
    facts = {
        "model": model,
        "class": type(built).__name__,
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "dtype": dtype_name(built.dtype),
        "backends": list(chain) or None,
        **found,
        "device": planned_for,
    }
    said = _parts(facts, how, all_rows)
    answer(facts if all_rows else {**facts, "rows": concerning(facts["rows"])}, said, as_json=as_json)
    write_page(html, f"What kernelize() would do to {model}", said, silent=as_json)
    return FINE


def _parts(facts: dict[str, Any], how: str, all_rows: bool) -> list[Part]:
    asked = f": {', '.join(facts['backends'])} for every entry" if facts["backends"] else ""
    size = f"{count(facts['parameters'])} parameters, {facts['dtype']}"
    return [
        Text(f"{facts['model']}: {facts['class']}, {size}", "bold"),
        Text(f"planned for {facts['device']} ({how}){asked}"),
        GAP,
        *report_parts(facts, all_rows=all_rows, lists_all="--all"),
    ]


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
