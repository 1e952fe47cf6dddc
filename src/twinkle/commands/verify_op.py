"""``twinkle-kernel verify --op OP --backend BACKEND``: whether a backend keeps an op's contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import CommandError, answer, progress, quiet_logs
from twinkle.commands.options import parse_chain, parse_device
from twinkle.document import GAP, Heading, Part, Points, Table, Text
from twinkle.exits import FAILED, FINE, NOTHING_RUN
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.conformance import Finding


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
        CommandError: neither a MODEL nor an op, both, not one backend, something that nobody knows, or an op of which
            no place is known.
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

    found: list[Finding] = []
    with quiet_logs():
        try:
            registry.get_op(op)
            impl = registry.get_impl(op, backend)
            if isinstance(impl, Reason):
                raise CommandError(str(impl))
            missing = registry.availability(impl)
            if missing is None:
                with progress(as_json) as bar:
                    task = bar.add_task(f"{backend} for {op}", total=None)
                    for finding in findings(op, backend, impl, torch.device(where)):
                        found.append(finding)
                        bar.advance(task)
        except ValueError as error:
            raise CommandError(str(error)) from error
    facts = {
        "op": op,
        "backend": backend,
        "device": where,
        "missing": None if missing is None else str(missing),
        "findings": [_data(finding) for finding in found],
    }
    answer(facts, _parts(op, backend, where, missing, found), as_json=as_json)
    states = {finding.state for finding in found}
    return FAILED if "off" in states else FINE if "ok" in states else NOTHING_RUN


def _data(finding: Finding) -> dict[str, Any]:
    used = [{"way": way, "tensor": name, "used": share} for (way, name), share in finding.used.items()]
    refused = None if finding.refused is None else str(finding.refused)
    return {**asdict(finding), "state": finding.state, "refused": refused, "used": used}


def _parts(op: str, backend: str, device: str, missing: Reason | None, found: Sequence[Finding]) -> Iterator[Part]:
    if missing is not None:
        yield Text(f"not run: {backend} for op {op} is not available here: {missing}", "yellow")
        return
    by_variant: dict[str, list[Finding]] = {}
    for finding in found:
        by_variant.setdefault(finding.variant, []).append(finding)
    names = _names(by_variant)
    dtypes = list(dict.fromkeys(finding.dtype for finding in found))
    rows, styles = [], []
    for variant, of in by_variant.items():
        state = min((finding.state for finding in of), key=SEVERITY.index)
        worst = {finding.dtype: f"{max(finding.used.values()):.0%}" for finding in of if finding.used}
        rows.append((names[variant], state, *(worst.get(dtype, "-") for dtype in dtypes)))
        styles.append({"off": "red", "ok": ""}.get(state, "dim"))
    yield Table(("variant", "state", *dtypes), rows, numbers=dtypes, styles=styles, word="state")
    worst_share = "by dtype, the share of the allowed error that the worst output or gradient uses"
    yield Text(f"{backend} for op {op} on {device}; {worst_share}; a variant is named by a place that has it", "dim")
    notes = {
        "Off": [(of, problem) for of in found for problem in of.problems],
        "Refused, which is a backend's right": [(of, str(of.refused)) for of in found if of.refused],
        "Left to the original": [(of, f"{way}: {why}") for of in found for way, why in of.declined.items()],
        "Not compared": [(of, f"{way}: {why}") for of in found for way, why in of.skipped.items()],
    }
    for heading, said in notes.items():
        if said:
            yield GAP
            yield Heading(heading)
            yield Points([(_where(who, names, dtypes), what) for what, who in _alike(said).items()])
    yield GAP
    yield Heading("Variants")
    yield Points([(name, variant) for variant, name in names.items()])


SEVERITY = ("off", "ok", "not run", "refused")
"""A finding's states; the first that one of a variant's dtypes has is the variant's."""


def _names(by_variant: Mapping[str, Sequence[Finding]]) -> dict[str, str]:
    """A variant's name for people: where it was met, with a number where several were met at one place."""
    names: dict[str, str] = {}
    for variant, (first, *_) in by_variant.items():
        taken = sum(of[0].where == first.where for of in list(by_variant.values())[: len(names)])
        names[variant] = f"{first.where} ({taken + 1})" if taken else first.where
    return names


def _alike(said: Sequence[tuple[Finding, str]]) -> dict[str, list[Finding]]:
    """What is said, once, and of whom."""
    found: dict[str, list[Finding]] = {}
    for finding, what in said:
        found.setdefault(what, []).append(finding)
    return found


def _where(findings: Sequence[Finding], names: Mapping[str, str], dtypes: Sequence[str]) -> str:
    """Variants, with the dtypes where it isn't all of them."""
    by_variant: dict[str, list[str]] = {}
    for finding in findings:
        by_variant.setdefault(names[finding.variant], []).append(finding.dtype)
    return ", ".join(
        name if len(of) == len(dtypes) else f"{name} in {' and '.join(of)}" for name, of in by_variant.items()
    )
