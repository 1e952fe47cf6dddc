"""``twinkle-kernel verify --op OP --backend BACKEND``: whether a backend keeps an op's contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import CommandError, print_json, progress, quiet_logs, show_parts, stdout
from twinkle.commands.options import parse_chain, parse_device
from twinkle.document import GAP, Heading, Part, Points, Table, Text
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.conformance import Finding

NOTHING_RUN = 3


def run(
    op: str | None,
    *,
    backends: Sequence[str] | None,
    device: str | None,
    others: Mapping[str, object],
    as_json: bool,
) -> int:
    """Prints what the backend did in each variant and dtype.

    Args:
        others: the arguments of the command that have no meaning here.

    Returns:
        1 when something is off; 3 when nothing was run: the backend isn't available here, or takes no variant; else 0.

    Raises:
        CommandError: neither a MODEL nor an op, both, not one backend, or something that nobody knows.
    """
    if op is None:
        raise CommandError("verify what? A MODEL, or --op OP --backend BACKEND")
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise CommandError(f"--op has no use for {', '.join(given)}: it runs every variant and dtype, without a model")
    chain = parse_chain(backends)
    if len(chain) != 1:
        raise CommandError("--op needs one --backend, the one to verify")
    (backend,) = chain
    where, _ = parse_device(device, present=True)
    import torch

    from twinkle.kernel import registry
    from twinkle.kernel.conformance import findings

    with quiet_logs():
        try:
            registry.get_op(op)
        except ValueError as error:
            raise CommandError(str(error)) from error
        impl = registry.get_impl(op, backend)
        missing = impl if isinstance(impl, Reason) else registry.availability(impl)
        found: list[Finding] = []
        if missing is None and not isinstance(impl, Reason):
            with progress(as_json) as bar:
                task = bar.add_task(f"{backend} for {op}", total=None)
                for finding in findings(op, backend, impl, torch.device(where)):
                    found.append(finding)
                    bar.advance(task)
    if as_json:
        facts = {"op": op, "backend": backend, "device": where, "missing": None if missing is None else str(missing)}
        print_json({**facts, "findings": [_data(finding) for finding in found]})
    else:
        show_parts(stdout(), _parts(op, backend, where, missing, found))
    states = {finding.state for finding in found}
    return 1 if "off" in states else 0 if "ok" in states else NOTHING_RUN


def _data(finding: Finding) -> dict[str, Any]:
    used = [{"layout": layout, "tensor": name, "used": share} for (layout, name), share in finding.used.items()]
    refused = None if finding.refused is None else str(finding.refused)
    return {**asdict(finding), "state": finding.state, "refused": refused, "used": used}


def _parts(op: str, backend: str, device: str, missing: Reason | None, found: Sequence[Finding]) -> Iterator[Part]:
    if missing is not None:
        yield Text(f"not run: {backend} for op {op} is not available here: {missing}", "yellow")
        return
    if not found:
        yield Text(f"not run: no target of the default mapping has op {op}; verify a MODEL instead", "yellow")
        return
    columns = ("variant", "dtype", "seen in", "state", "worst", "layouts left to the original")
    rows = [
        (
            finding.variant,
            finding.dtype,
            finding.where,
            finding.state,
            f"{max(finding.used.values()):.0%}" if finding.used else "-",
            str(len(finding.declined)),
        )
        for finding in found
    ]
    styles = [{"off": "red", "refused": "dim"}.get(finding.state, "") for finding in found]
    yield Table(columns, rows, numbers=("worst",), styles=styles, word="state")
    worst = "worst: the share of the allowed error that is used, of outputs and gradients"
    yield Text(f"{backend} for op {op} on {device}; {worst}", "dim")
    named = [(f"{finding.variant}, {finding.dtype}", finding) for finding in found]
    notes = {
        "Off": [(name, problem) for name, of in named for problem in of.problems],
        "Refused, which is a backend's right": [(name, str(of.refused)) for name, of in named if of.refused],
        "Left to the original": [
            (name, f"{layout}: {why}") for name, of in named for layout, why in of.declined.items()
        ],
    }
    for heading, items in notes.items():
        if items:
            yield GAP
            yield Heading(heading)
            yield Points(items)
