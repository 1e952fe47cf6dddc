"""Comparing a kernel with what it replaces, numerically, at one site or in a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel import registry
from twinkle.kernel.exact import exact_copy, exact_inputs, exactly
from twinkle.kernel.journal import process_originals
from twinkle.kernel.judgement import allowed_error_used
from twinkle.kernel.ops.worthwhile import every_size
from twinkle.kernel.probe import variant_of
from twinkle.kernel.small_runs import OutOfDomain, Results, rounded, run_call, within_domain
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.install import Kernel
    from twinkle.kernel.ops.derived import Example
    from twinkle.kernel.targets import Site


def unverified(why: str) -> Reason:
    """Why a kernel couldn't be compared with the original."""
    return Reason("unverified", f"not verified: {why}")


@torch.inference_mode(False)
def check_site(site: Site, kernel: Kernel, op: str | None) -> Reason | None:
    """Compares a kernel with the original at a site, forward and backward, on small inputs of the site's dtype.

    It does so in any context of the caller's: autocast, without gradients, inference mode.

    Returns:
        None when it is within the judgement, a Reason with code ``unverified`` when it can't be judged, else the Reason
        why it is off.
    """
    if site.device.type == "meta":
        return unverified("on the meta device there are no values")
    known = _example(site, op)
    if isinstance(known, Reason):
        return known
    reference, variant, example = known
    dtype = site.dtype or torch.float32
    cpu = torch.device("cpu")
    try:
        example = rounded(example, dtype)
        exact = reference.build(variant, torch.float64)
        exact = exact.forward if isinstance(exact, type) else exact  # type: ignore[attr-defined]
        judge = run_call(exact, example, torch.float64, cpu)
        original = run_call(site.original, example, dtype, site.device)
    except Exception as error:
        return unverified(str(Reason.of_error(error, "unverified", "running the original on a small input")))
    call = within_domain(kernel)
    try:
        ours = run_call(call, example, dtype, site.device)
    except OutOfDomain:
        # Perhaps it has no backward.
        try:
            ours = run_call(call, example, dtype, site.device, gradients=())
        except OutOfDomain as domain:
            return unverified(f"it leaves small inputs to the original: {domain}")
        except Exception as error:
            return Reason.of_error(error, "verify", "verifying it on a small input")
        for name in [name for name in original if not name.startswith("output")]:
            del original[name]
    except Exception as error:
        return Reason.of_error(error, "verify", "verifying it on a small input")
    return _judged(ours, original, judge)


def _judged(ours: Results, original: Results, judge: Results) -> Reason | None:
    if ours.structure != original.structure:
        return Reason("verify", f"it returns {ours.structure} where the original returns {original.structure}")
    missing = original.keys() - ours.keys()
    if missing:
        return Reason("verify", f"it gives no {', '.join(sorted(missing))}")
    judged = [name for name in original if name in judge]
    for name in judged:
        used = allowed_error_used(ours[name], original[name], judge[name])
        if used > 1:
            return Reason("verify", f"{name} is off: {used:.3g} times the allowed error")
    return None if judged else unverified("the op's reference gives none of its results")


def _example(site: Site, op: str | None) -> tuple[Any, Any, Example] | Reason:
    """A reference, the site's variant in its terms, and inputs: the op's, or without one of any that knows the site."""
    for name in registry.ops() if op is None else (op,):
        reference = registry.reference_of(name)
        if reference is None or isinstance(reference, Reason):
            continue
        variant = variant_of(reference, site, {}) if op is None else site.variant
        if variant is None or isinstance(variant, Reason):
            continue
        try:
            return reference, variant, reference.example(site, variant)
        except Exception as error:
            return unverified(str(Reason.of_error(error, "unverified", f"making small inputs for op {name}")))
    return unverified("nothing knows small inputs for it")


def fits_in_place(site: Site, kernel: Kernel) -> Reason | None:
    """Whether what the mapping names itself returns what the original returns: same shapes and dtypes.

    Checked on a small input, forward only, so that a layer with another contract is refused before it breaks the model.
    The values may differ: that may be the point of the replacement. What can't be run on the meta device passes there.
    """
    known = _example(site, None)
    if isinstance(known, Reason):
        return None
    dtype = site.dtype or torch.float32
    try:
        original = run_call(site.original, known[2], dtype, site.device, gradients=())
    except Exception:  # the example isn't one for this site after all
        return None
    try:
        ours = run_call(within_domain(kernel), known[2], dtype, site.device, gradients=())
    except OutOfDomain:
        return None
    except Exception as error:
        on_meta = site.device.type == "meta"
        return None if on_meta else Reason.of_error(error, "unfit", "running it on a small input")
    if ours.structure != original.structure:
        text = f"on a small input it returns {ours.structure} where the original returns {original.structure}"
        return Reason("unfit", text)
    for name, expected in original.items():
        result = ours.get(name)
        if result is None or result.shape != expected.shape or result.dtype != expected.dtype:
            got = "nothing" if result is None else f"{tuple(result.shape)} {result.dtype}"
            want = f"{tuple(expected.shape)} {expected.dtype}"
            return Reason("unfit", f"on a small input it returns {got} where the original returns {want}")
    return None


@dataclass(frozen=True)
class Comparison:
    """One tensor of two models compared.

    Attributes:
        name: ``logits``, or the parameter whose gradient it is.
        used: share of the allowed error that is used up; at most 1 is within the judgement.
    """

    name: str
    used: float


def compare_models(
    original: nn.Module,
    kernelized: nn.Module,
    inputs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
    outputs: Callable[[Any], Iterable[tuple[str, torch.Tensor]]] | None = None,
) -> list[Comparison]:
    """Judges a kernelized model against the original: its outputs and the gradient of every parameter.

    Args:
        original, kernelized: same weights, same device.
        inputs: keyword arguments of ``forward``.
        loss: from what ``forward`` returns to the scalar to differentiate.
        outputs: names and tensors of what ``forward`` returns; its ``logits`` or ``last_hidden_state`` when None.
    """
    outputs = outputs or _named_outputs
    with every_size():
        ours = _train_step(kernelized, inputs, loss, outputs)
    # A replaced function serves every model of the process; the original must be judged without it.
    with process_originals():
        theirs = _train_step(original, inputs, loss, outputs)
        exact = exact_copy(original)
        with exactly(original):
            judge = _train_step(exact, exact_inputs(inputs), loss, outputs)
    return [
        Comparison(name, allowed_error_used(ours[name], theirs[name], judge[name]) if name in ours else float("inf"))
        for name in theirs
    ]


def _named_outputs(returned: Any) -> Iterable[tuple[str, torch.Tensor]]:
    for name in ("logits", "last_hidden_state"):
        value = getattr(returned, name, None)
        if isinstance(value, torch.Tensor):
            yield name, value


def _train_step(
    model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any], torch.Tensor], outputs: Any
) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    returned = model(**inputs)
    results = {name: value.detach().clone() for name, value in outputs(returned)}
    loss(returned).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient of {name}"] = parameter.grad.detach().clone()
    model.zero_grad(set_to_none=True)
    return results
