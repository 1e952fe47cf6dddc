"""Comparing a kernel with what it replaces, numerically.

The judgement: with the reference in fp64 and ``e`` the distance to it, for the output and for every gradient,
``e_kernel <= 2 * e_original + ulp(dtype) * |reference|``, in the Euclidean and in the maximum norm. So a kernel may
round differently than the original, but not be a worse approximation of the maths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel import registry
from twinkle.kernel.exact import KeepFloat64, exact_copy, exact_inputs
from twinkle.kernel.journal import process_originals
from twinkle.kernel.ops.worthwhile import every_size
from twinkle.kernel.probe import random_tensor, variant_of
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.install import Kernel
    from twinkle.kernel.ops.derived import Example
    from twinkle.kernel.targets import Site


def allowed_error_used(kernel: torch.Tensor, original: torch.Tensor, reference: torch.Tensor) -> float:
    """How much of the allowed error a kernel's result has used up: at most 1 is within the judgement.

    Args:
        kernel, original: results in the dtype that is judged, same shape. Those that are no floating-point numbers
            must be equal.
        reference: the same computed in fp64.

    Returns:
        the larger of the two norms' ratios; inf for another shape, another dtype, or a non-finite value that the
        original doesn't have.
    """
    if kernel.shape != original.shape or kernel.dtype != original.dtype:
        return float("inf")
    if not original.is_floating_point():
        return 0.0 if torch.equal(kernel, original) else float("inf")
    ulp = torch.finfo(original.dtype).eps
    k, o, r = (t.detach().to("cpu", torch.float64).flatten() for t in (kernel, original, reference))
    finite = torch.isfinite(o)
    same_gaps = torch.allclose(k[~finite], o[~finite], equal_nan=True)  # inf where it has inf, NaN where it has NaN
    if not same_gaps or not torch.isfinite(k[finite]).all():
        return float("inf")
    finite &= torch.isfinite(r)
    k, o, r = k[finite], o[finite], r[finite]
    if k.numel() == 0:
        return 0.0
    used = 0.0
    for norm in (2, float("inf")):
        error, size = torch.linalg.vector_norm(k - r, norm), torch.linalg.vector_norm(r, norm)
        allowed = 2 * torch.linalg.vector_norm(o - r, norm) + ulp * size
        used = max(used, float(error / allowed) if error > 0 else 0.0)
    return used


NOT_VERIFIED = "not verified"
"""What the notes say of a kernel that couldn't be compared."""


class Results(dict[str, torch.Tensor]):
    """Outputs and gradients of one forward and backward, by name.

    Attributes:
        structure: what the outputs came in, e.g. ``"a tensor"``.
    """

    structure: str


def run_call(
    function: Callable[..., Any], example: Example, dtype: torch.dtype, device: torch.device, backward: bool = True
) -> Results:
    """Calls an implementation on an example and differentiates the result.

    Args:
        function: takes the example's module first when there is one.
        dtype: of inputs and weights; the caller has rounded the values to the dtype that is judged.
        device: where to run.
        backward: without it, nothing requires a gradient.
    """
    module, parameters = _materialise(example, dtype, device, backward)
    args = [_as_input(a, dtype, device, backward and i not in example.fixed) for i, a in enumerate(example.args)]
    kwargs = {k: _as_input(v, dtype, device, backward) for k, v in example.kwargs.items()}
    call_args = args if module is None else [module, *args]
    # There is no autocast for meta.
    autocast = torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)
    with torch.set_grad_enabled(backward), autocast:
        outputs = function(*call_args, **kwargs)
    flat = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not isinstance(flat, (tuple, list)):
        raise TypeError(f"it returns {outputs!r:.60}, not a tensor or a tuple")
    flat = [output for output in flat if isinstance(output, torch.Tensor)]
    results = {f"output {i}": o for i, o in enumerate(flat)}
    wrt = {f"gradient of input {i}": a for i, a in enumerate(args) if _differentiable(a)} | {
        f"gradient of {name}": p for name, p in parameters.items()
    }
    differentiated = [o for o in flat if o.requires_grad]
    if wrt and differentiated:
        seeds = [random_tensor(*o.shape, seed=90 + i).to(o) for i, o in enumerate(differentiated)]
        gradients = torch.autograd.grad(differentiated, list(wrt.values()), seeds, allow_unused=True)
        results |= {name: g for name, g in zip(wrt, gradients, strict=True) if g is not None}
    found = Results({name: value.detach().clone() for name, value in results.items()})
    one = isinstance(outputs, torch.Tensor)
    found.structure = "a tensor" if one else f"a {type(outputs).__name__} of {len(outputs)}"
    return found


def _materialise(
    example: Example, dtype: torch.dtype, device: torch.device, differentiable: bool
) -> tuple[Any, dict[str, nn.Parameter]]:
    if example.module is None:
        return None, {}
    module = copy.deepcopy(example.module).to(device)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(differentiable)
    return module, parameters


def _as_input(value: Any, dtype: torch.dtype, device: torch.device, differentiable: bool = True) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return value.to(device, dtype).detach().clone().requires_grad_(differentiable)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _rounded(example: Example, dtype: torch.dtype) -> Example:
    """The example with every value rounded to ``dtype``, so that all runs start from the same numbers."""

    def rounded(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype).to(torch.float64) if is_float else value

    twin = copy.deepcopy(example)
    twin.args = tuple(rounded(a) for a in example.args)
    twin.kwargs = {k: rounded(v) for k, v in example.kwargs.items()}
    if twin.module is not None:
        for parameter in twin.module.parameters():
            parameter.data = rounded(parameter.data)
    return twin


class _OutOfDomain(Exception):
    """The kernel leaves this very call to the original."""


def _within_domain(kernel: Kernel) -> Callable[..., Any]:
    """The kernel as it is called when installed, but raising where the original would serve the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {kernel.renamed.get(name, name): value for name, value in kwargs.items()}
        if kernel.base is not None:
            args[0].__class__ = kernel.base  # the small module is ours, and code with super() needs its own class
        with every_size():
            reason = kernel.accepts_call(*args, **kwargs) if kernel.accepts_call else None
        if reason is not None:
            raise _OutOfDomain(reason)
        return kernel.function(*args, **kwargs)

    return call


def _unverified(why: str) -> Reason:
    return Reason("unverified", f"{NOT_VERIFIED}: {why}")


@torch.inference_mode(False)
def check_site(site: Site, kernel: Kernel, op: str | None) -> Reason | None:
    """Compares a kernel with the original at a site, forward and backward, on small inputs of the site's dtype.

    It does so in any context of the caller's: autocast, without gradients, inference mode.

    Returns:
        None when it is within the judgement, a Reason with code ``unverified`` when it can't be judged, else the Reason
        why it is off.
    """
    if site.device.type == "meta":
        return _unverified("on the meta device there are no values")
    known = _example(site, op)
    if isinstance(known, Reason):
        return known
    reference, variant, example = known
    dtype = site.dtype or torch.float32
    cpu = torch.device("cpu")
    try:
        example = _rounded(example, dtype)
        exact = reference.build(variant, torch.float64)
        exact = exact.forward if isinstance(exact, type) else exact  # type: ignore[attr-defined]
        judge = run_call(exact, example, torch.float64, cpu)
        original = run_call(site.original, example, dtype, site.device)
    except Exception as error:
        return _unverified(str(Reason.of_error(error, "unverified", "running the original on a small input")))
    call = _within_domain(kernel)
    try:
        ours = run_call(call, example, dtype, site.device)
    except _OutOfDomain:
        # Perhaps it has no backward.
        try:
            ours = run_call(call, example, dtype, site.device, backward=False)
        except _OutOfDomain as domain:
            return _unverified(f"it leaves small inputs to the original: {domain}")
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
    return None if judged else _unverified("the op's reference gives none of its results")


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
            return _unverified(str(Reason.of_error(error, "unverified", f"making small inputs for op {name}")))
    return _unverified("nothing knows small inputs for it")


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
        original = run_call(site.original, known[2], dtype, site.device, backward=False)
    except Exception:  # the example isn't one for this site after all
        return None
    try:
        ours = run_call(_within_domain(kernel), known[2], dtype, site.device, backward=False)
    except _OutOfDomain:
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
        with KeepFloat64():
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
