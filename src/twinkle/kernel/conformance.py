"""Whether a backend keeps an op's contract: every variant, dtype, layout and gradient, for those who write backends.

A variant is met where models have it, and one place is taken for each: the tiny presets are built on the meta device
and searched for what the default mapping gives to the op, as are the models that the op's reference names itself, which
is how an op from elsewhere has places at all. The reference makes the inputs and, in fp64, the judge's numbers; the
judgement is that of :mod:`twinkle.kernel.judgement`, of the median over a few inputs.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from twinkle import presets
from twinkle.kernel import registry
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG
from twinkle.kernel.install import Kernel, kernel_for
from twinkle.kernel.judgement import after_second_look, allowed_error_used
from twinkle.kernel.ops.derived import Example
from twinkle.kernel.probe import variant_of
from twinkle.kernel.registry import KernelChoice, KernelImpl
from twinkle.kernel.small_runs import OutOfDomain, Results, gradient_names, rounded, run_call, within_domain
from twinkle.kernel.targets import ModelIndex, Site, Target, resolve_target
from twinkle.naming import dtype_name
from twinkle.reasons import Reason

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = tuple(1 + step / 64 for step in range(3))
"""What an example is multiplied with: other inputs that round otherwise."""
MORE_SCALES = tuple(1 + step / 64 for step in range(3, 12))
"""For a second look."""


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(-1, -2).contiguous().transpose(-1, -2) if value.dim() > 1 else value.clone()


def _gapped(value: torch.Tensor) -> torch.Tensor:
    if value.dim() == 0:
        return value.clone()
    wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), float("nan"), dtype=value.dtype, device=value.device)
    wide[..., ::2] = value
    return wide[..., ::2]


def _shifted(value: torch.Tensor) -> torch.Tensor:
    longer = torch.full((value.numel() + 1,), float("nan"), dtype=value.dtype, device=value.device)
    longer[1:] = value.reshape(-1)
    return longer[1:].view(value.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda value: value.clone(memory_format=torch.contiguous_format),
    "last two dimensions swapped in memory": _transposed,
    "every second element": _gapped,
    "one element into its memory": _shifted,
}
"""How arguments and incoming gradients lie in memory."""


@dataclass(frozen=True)
class Place:
    """A site that stands for all of its variant."""

    target: Target
    site: Site


@dataclass
class Finding:
    """What a backend did in one variant and dtype.

    Attributes:
        variant, dtype: which.
        where: the class or function of transformers that has the variant.
        refused: why the backend doesn't take it at all; its right.
        declined: layout -> why the kernel left the call to the original; its right too.
        skipped: layout -> why the original itself can't have it, so that there is nothing to compare with.
        used: (way, tensor) -> share of the allowed error, the median over the inputs. A way is a layout, or which
            gradients are asked for.
        problems: what is wrong.
    """

    variant: str
    dtype: str
    where: str
    refused: Reason | None = None
    declined: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    used: dict[tuple[str, str], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """``off``, ``ok``; where nothing was compared ``refused``, or ``not run`` for the original's sake."""
        if self.problems or self.used:
            return "off" if self.problems else "ok"
        return "not run" if self.skipped and not self.refused and not self.declined else "refused"


def places(op: str) -> list[Place]:
    """One site for each variant of an op: in the models that its reference names, and in the presets.

    Raises:
        ValueError: nobody knows a place; the message says how an op gets one.
    """
    reference = registry.reference_of(op)
    if isinstance(reference, Reason):
        raise ValueError(str(reference))
    if reference is None:
        raise ValueError(f"op {op} has no reference that says what it computes: register_op({op!r}, reference=…)")
    found: dict[Hashable, Place] = {}
    probed: dict[Any, Any] = {}
    why: dict[str, None] = {}
    for target, site in _sites(op, reference):
        variant = variant_of(reference, site, probed)
        if isinstance(variant, Reason):
            why[str(variant)] = None
        else:
            found.setdefault((variant, target.kind), Place(target, dataclasses.replace(site, variant=variant)))
    if not found:
        text = "neither the default mapping nor places() or original of its reference names one"
        raise ValueError(f"no place of op {op} is known: {'; '.join(why) or text}")
    return list(found.values())


def _sites(op: str, reference: Any) -> Iterator[tuple[Target, Site]]:
    original = getattr(reference, "original", None)
    if original is not None:
        yield Target("logical", op), Site.of_op(op, original, torch.device("cpu"), torch.float32)
    for model, keys in _models(op, reference):
        index = ModelIndex.of(model, None)
        for target in keys:
            if isinstance(target, Target):
                yield from ((target, site) for site in index.sites(target))


def _models(op: str, reference: Any) -> Iterator[tuple[nn.Module, Iterable[Any]]]:
    """Models, and what a mapping's keys mean in them."""
    for model, own in getattr(reference, "places", tuple)():
        yield model, map(resolve_target, own)
    keys = [key for key, of in DEFAULT_KERNEL_CONFIG.items() if isinstance(of, KernelChoice) and of.op == op]
    for preset in presets.PRESETS if keys else ():
        model = presets.build(preset, device="meta")
        # Only those whose Python module is imported by now: a target of another family has no site here.
        yield model, (resolve_target(key, importing=False) for key in keys)


def findings(op: str, backend: str, impl: KernelImpl, device: torch.device) -> Iterator[Finding]:
    """Runs a backend in every variant and dtype; it must be available.

    Raises:
        ValueError: no place of the op is known.
    """
    for place in places(op):
        for dtype in DTYPES:
            site = dataclasses.replace(place.site, device=device, dtype=dtype)
            where = str(place.target).removeprefix("transformers.models.")
            finding = Finding(str(site.variant), dtype_name(dtype), where)
            kernel = _loaded(impl, place.target, site)
            if isinstance(kernel, Reason) and kernel.code in ("accepts-failed", "load-failed"):
                finding.problems.append(str(kernel))
            elif isinstance(kernel, Reason):
                finding.refused = kernel
            else:
                _judge(finding, op, site, kernel)
            yield finding


def _loaded(impl: KernelImpl, target: Target, site: Site) -> Kernel | Reason:
    refused = registry.refusal(impl, site)
    if refused is not None:
        return refused
    loaded = registry.load_impl(impl, target, site)
    return loaded if isinstance(loaded, Reason) else kernel_for(target, site.original, loaded)


def _judge(finding: Finding, op: str, site: Site, kernel: Kernel) -> None:
    reference = registry.reference_of(op)
    exact = reference.build(site.variant, torch.float64)
    exact = exact.forward if isinstance(exact, type) else exact  # type: ignore[attr-defined]
    example = reference.example(site, site.variant)
    trial = _Trial(finding, site, exact, within_domain(kernel), example)
    for way in _ways(example):
        medians = after_second_look(trial.medians(way, SCALES), partial(trial.medians, way, MORE_SCALES))
        for name, median in medians.items():
            finding.used[way.name, name] = median
            if median > 1:
                finding.problems.append(f"{way.name}: {name} is off: {median:.4g} times the allowed error")
    finding.problems[:] = dict.fromkeys(finding.problems)


@dataclass(frozen=True)
class _Way:
    """How a kernel is called: a layout, or contiguously with some of the gradients asked for."""

    name: str
    arrange: Callable[[torch.Tensor], torch.Tensor]
    gradients: Sequence[str] | None = None


def _ways(example: Example) -> Iterator[_Way]:
    """A backward that makes more than is asked for fails nowhere; one that makes less, or something else, does here."""
    for name, arrange in LAYOUTS.items():
        yield _Way(name, arrange)
    contiguous = LAYOUTS["contiguous"]
    names = gradient_names(example)
    yield _Way("without gradients", contiguous, ())
    yield from (_Way(f"{name} alone", contiguous, (name,)) for name in names if len(names) > 1)


@dataclass(frozen=True)
class _Trial:
    """A kernel, and all that it is compared with."""

    finding: Finding
    site: Site
    exact: Callable[..., Any]
    kernel: Callable[..., Any]
    example: Example

    def medians(self, way: _Way, scales: Sequence[float]) -> dict[str, float]:
        """Share of the allowed error by tensor; empty where nothing could be compared."""
        shares: dict[str, list[float]] = {}
        dtype, device = self.site.dtype or torch.float32, self.site.device
        for scale in scales:
            scaled = rounded(_scaled(self.example, scale), dtype)
            try:
                original = run_call(self.site.original, scaled, dtype, device, way.gradients, way.arrange)
            except Exception as error:  # no model gives it that layout, or it has no kernel for that dtype here
                self.finding.skipped[way.name] = str(Reason.of_error(error, "raised", "the original"))
                return {}
            judge = run_call(self.exact, scaled, torch.float64, torch.device("cpu"), way.gradients)
            try:
                ours = run_call(self.kernel, scaled, dtype, device, way.gradients, way.arrange)
            except OutOfDomain as domain:
                self.finding.declined[way.name] = str(domain)
                return {}
            except Exception as error:
                self.finding.problems.append(f"{way.name}: {Reason.of_error(error, 'raised', 'it')}")
                return {}
            self.finding.problems += [f"{way.name}: {problem}" for problem in _broken(ours, original)]
            for name in original.keys() & judge.keys() & ours.keys():
                shares.setdefault(name, []).append(allowed_error_used(ours[name], original[name], judge[name]))
        return {name: statistics.median(shares[name]) for name in original if name in shares}


def _broken(ours: Results, original: Results) -> Iterator[str]:
    """What no rounding explains."""
    if ours.structure != original.structure:
        yield f"it returns {ours.structure} where the original returns {original.structure}"
    missing = sorted(original.keys() - ours.keys())
    if missing:
        yield f"it gives no {', '.join(missing)}"
    for name in ours.read.keys() & original.read.keys():
        if not torch.equal(ours.read[name], original.read[name]):
            yield f"it writes into {name}, or into the memory around"


def _scaled(example: Example, scale: float) -> Example:
    def scaled(value: Any) -> Any:
        return value * scale if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    twin = copy.deepcopy(example)
    twin.args = tuple(map(scaled, example.args))
    twin.kwargs = {name: scaled(value) for name, value in example.kwargs.items()}
    return twin
