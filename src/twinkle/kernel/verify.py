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
from twinkle.kernel.probe import random_tensor, variant_of
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.install import Kernel
    from twinkle.kernel.ops.derived import Example
    from twinkle.kernel.targets import ModelIndex, Site


def allowed_error_used(kernel: torch.Tensor, original: torch.Tensor, reference: torch.Tensor) -> float:
    """How much of the allowed error a kernel's result has used up: at most 1 is within the judgement.

    Args:
        kernel, original: results in the dtype that is judged, same shape.
        reference: the same computed in fp64.

    Returns:
        the larger of the two norms' ratios; inf for another shape, another dtype, or a non-finite value that the
        original doesn't have.
    """
    if kernel.shape != original.shape or kernel.dtype != original.dtype:
        return float("inf")
    if kernel.numel() == 0:
        return 0.0
    ulp = torch.finfo(original.dtype).eps
    k, o, r = (t.detach().to("cpu", torch.float64).flatten() for t in (kernel, original, reference))
    finite = torch.isfinite(o) & torch.isfinite(r)
    if not torch.equal(torch.isfinite(k), torch.isfinite(o)):
        return float("inf")
    k, o, r = k[finite], o[finite], r[finite]
    if k.numel() == 0:
        return 0.0
    used = 0.0
    for norm in (2, float("inf")):
        error, size = torch.linalg.vector_norm(k - r, norm), torch.linalg.vector_norm(r, norm)
        allowed = 2 * torch.linalg.vector_norm(o - r, norm) + ulp * size
        used = max(used, float(error / allowed) if error > 0 else 0.0)
    return used


@dataclass
class Run:
    """Results of one forward and backward: outputs and gradients, by name."""

    results: dict[str, torch.Tensor]


def run_call(function: Callable[..., Any], example: Example, dtype: torch.dtype, device: torch.device) -> Run:
    """Calls an implementation on an example and differentiates the result.

    Args:
        function: takes the example's module first when there is one.
        dtype: of inputs and weights; values are rounded to the example's ``round_to`` first by the caller.
        device: where to run.
    """
    module, parameters = _materialise(example, dtype, device)
    args = [_as_input(a, dtype, device) for a in example.args]
    kwargs = {k: _as_input(v, dtype, device) for k, v in example.kwargs.items()}
    call_args = args if module is None else [module, *args]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        outputs = function(*call_args, **kwargs)
    flat = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if isinstance(o, torch.Tensor)]
    results = {f"output {i}": o for i, o in enumerate(flat)}
    wrt = {f"gradient of input {i}": a for i, a in enumerate(args) if _differentiable(a)} | {
        f"gradient of {name}": p for name, p in parameters.items()
    }
    differentiated = [o for o in flat if o.requires_grad]
    if wrt and differentiated:
        seeds = [random_tensor(*o.shape, seed=90 + i).to(o) for i, o in enumerate(differentiated)]
        gradients = torch.autograd.grad(differentiated, list(wrt.values()), seeds, allow_unused=True)
        results |= {name: g for name, g in zip(wrt, gradients, strict=True) if g is not None}
    return Run({name: value.detach().clone() for name, value in results.items()})


def _materialise(
    example: Example, dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, nn.Parameter]]:
    if example.module is None:
        return None, {}
    module = copy.deepcopy(example.module).to(device)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(True)
    return module, parameters


def _as_input(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return value.to(device, dtype).detach().clone().requires_grad_(True)


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


def check_site(site: Site, kernel: Kernel, op: str | None, index: ModelIndex) -> Reason | None:
    """Compares a kernel with the original at a site, forward and backward, on small inputs of the site's dtype.

    Returns:
        None when it is within the judgement (or nothing knows inputs for the site, or it is on meta), else the reason.
    """
    if site.device.type == "meta":
        return None
    known = _example(site, op)
    if known is None:
        return None
    reference, variant, example = known
    dtype = site.dtype or torch.float32
    example = _rounded(example, dtype)
    exact = reference.build(variant, torch.float64)
    exact = exact.forward if isinstance(exact, type) else exact
    try:
        judge = run_call(exact, example, torch.float64, torch.device("cpu"))
        original = run_call(site.original, example, dtype, site.device)
        ours = run_call(kernel.function, example, dtype, site.device)
    except Exception as error:
        return Reason.of_error(error, "verify", "verifying it on a small input")
    return _judged(ours, original, judge)


def _judged(ours: Run, original: Run, judge: Run) -> Reason | None:
    missing = original.results.keys() - ours.results.keys()
    if missing:
        return Reason("verify", f"it gives no {', '.join(sorted(missing))}")
    for name, expected in original.results.items():
        used = allowed_error_used(ours.results[name], expected, judge.results[name])
        if used > 1:
            return Reason("verify", f"{name} is off: {used:.3g} times the allowed error")
    return None


def _example(site: Site, op: str | None) -> tuple[Any, Any, Example] | None:
    """An op's reference, the site's variant in its terms, and inputs; without an op, any op that recognises the site."""
    if op is not None:
        reference = registry.get_op(op).load_reference()
        if reference is None or site.variant is None:
            return None
        return reference, site.variant, reference.example(site, site.variant)
    for definition in registry.ops().values():
        reference = definition.load_reference()
        if reference is None or (site.module is None) != definition.name.endswith("rotary"):
            continue
        variant = variant_of(reference, site, {})
        if not isinstance(variant, Reason):
            return reference, variant, reference.example(site, variant)
    return None


def fits_in_place(site: Site, kernel: Kernel, index: ModelIndex) -> Reason | None:
    """Whether what the mapping names itself returns what the original returns: same shapes and dtypes.

    Checked on a small input, so that a layer with another contract is refused before it breaks the model. The values may
    differ: that may be the point of the replacement.
    """
    if site.device.type == "meta":
        return None
    known = _example(site, None)
    if known is None:
        return None
    dtype = site.dtype or torch.float32
    try:
        original = run_call(site.original, known[2], dtype, site.device)
    except Exception:  # the example isn't one for this site after all
        return None
    try:
        ours = run_call(kernel.function, known[2], dtype, site.device)
    except Exception as error:
        return Reason.of_error(error, "unfit", "running it on a small input")
    for name, expected in original.results.items():
        if not name.startswith("output"):
            continue
        result = ours.results.get(name)
        if result is None or result.shape != expected.shape or result.dtype != expected.dtype:
            got = "nothing" if result is None else f"{tuple(result.shape)} {result.dtype}"
            return Reason("unfit", f"it returns {got} where the original returns {tuple(expected.shape)} {expected.dtype}")
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
    exact = copy.deepcopy(original).double()
    config = getattr(exact, "config", None)
    if hasattr(config, "_experts_implementation"):  # grouped matmul has no fp64
        exact.set_experts_implementation("eager")
    double = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    runs = [
        _train_step(model, given, loss, outputs)
        for model, given in ((kernelized, inputs), (original, inputs), (exact, double))
    ]
    ours, theirs, judge = runs
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
