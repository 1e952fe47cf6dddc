"""Running an implementation on the small inputs that an op's reference makes, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops.worthwhile import every_size
from twinkle.kernel.probe import random_tensor

if TYPE_CHECKING:
    from twinkle.kernel.install import Kernel
    from twinkle.kernel.ops.derived import Example


class Results(dict[str, torch.Tensor]):
    """Outputs and gradients of one forward and backward, by name.

    Attributes:
        structure: what the outputs came in, e.g. ``"a tensor"``.
        read: the arguments and the incoming gradients, as they are afterwards.
    """

    structure: str
    read: list[torch.Tensor]


def run_call(
    function: Callable[..., Any],
    example: Example,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool = True,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Results:
    """Calls an implementation on an example and differentiates the result.

    Args:
        function: takes the example's module first when there is one.
        dtype: of inputs and weights; the caller has rounded the values to the dtype that is judged.
        device: where to run.
        backward: without it, nothing requires a gradient.
        arrange: gives a tensor of the same values in another layout, for the floating-point arguments and the incoming
            gradients.
    """
    module, parameters = _materialise(example, dtype, device, backward)
    arrange = arrange or torch.clone
    fixed = example.fixed
    args = [_as_input(a, dtype, device, arrange, backward and i not in fixed) for i, a in enumerate(example.args)]
    kwargs = {k: _as_input(v, dtype, device, arrange, backward) for k, v in example.kwargs.items()}
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
    seeds: list[torch.Tensor] = []
    if wrt and differentiated:
        seeds = [arrange(random_tensor(*o.shape, seed=90 + i).to(o)) for i, o in enumerate(differentiated)]
        gradients = torch.autograd.grad(differentiated, list(wrt.values()), seeds, allow_unused=True)
        results |= {name: g for name, g in zip(wrt, gradients, strict=True) if g is not None}
    found = Results({name: value.detach().clone() for name, value in results.items()})
    found.read = [value.detach() for value in (*args, *kwargs.values(), *seeds) if isinstance(value, torch.Tensor)]
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


def _as_input(
    value: Any,
    dtype: torch.dtype,
    device: torch.device,
    arrange: Callable[[torch.Tensor], torch.Tensor],
    differentiable: bool = True,
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return arrange(value.to(device, dtype).detach()).requires_grad_(differentiable)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def rounded(example: Example, dtype: torch.dtype) -> Example:
    """The example with every value rounded to ``dtype``, so that all runs start from the same numbers."""

    def narrowed(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype).to(torch.float64) if is_float else value

    twin = copy.deepcopy(example)
    twin.args = tuple(narrowed(a) for a in example.args)
    twin.kwargs = {k: narrowed(v) for k, v in example.kwargs.items()}
    if twin.module is not None:
        for parameter in twin.module.parameters():
            parameter.data = narrowed(parameter.data)
    return twin


class OutOfDomain(Exception):
    """The kernel leaves this very call to the original."""


def within_domain(kernel: Kernel) -> Callable[..., Any]:
    """The kernel as it is called when installed, but raising where the original would serve the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {kernel.renamed.get(name, name): value for name, value in kwargs.items()}
        if kernel.base is not None:
            args[0].__class__ = kernel.base  # the small module is ours, and code with super() needs its own class
        with every_size():
            reason = kernel.accepts_call(*args, **kwargs) if kernel.accepts_call else None
        if reason is not None:
            raise OutOfDomain(reason)
        return kernel.function(*args, **kwargs)

    return call
