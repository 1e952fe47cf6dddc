"""Running an implementation on the small inputs that an op's reference makes, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twinkle.kernel.ops.worthwhile import every_size
from twinkle.kernel.probe import call_plainly, random_tensor

if TYPE_CHECKING:
    from twinkle.kernel.install import Kernel
    from twinkle.kernel.ops.derived import Example


class Results(dict[str, torch.Tensor]):
    """Outputs and gradients of one forward and backward, by name.

    Attributes:
        structure: what the outputs came in, e.g. ``"a tensor"``.
        read: by name the arguments, the weights and the incoming gradients, as they are afterwards: the bytes of all
            the memory that they lie in, gaps included.
    """

    structure: str
    read: dict[str, torch.Tensor]


def run_call(
    function: Callable[..., Any],
    example: Example,
    dtype: torch.dtype,
    device: torch.device,
    gradients: Collection[str] | None = None,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Results:
    """Calls an implementation on an example and differentiates the result.

    Args:
        function: takes the example's module first when there is one.
        dtype: of inputs and weights; the caller has rounded the values to the dtype that is judged.
        device: where to run.
        gradients: names of those that are asked for, see :func:`gradient_names`; all of them when None. Nothing else
            requires one; with none, autograd is off.
        arrange: gives a tensor of the same values in another layout, for the floating-point arguments and the incoming
            gradients.
    """
    arrange = arrange or torch.clone
    module = None if example.module is None else copy.deepcopy(example.module).to(device)
    if module is not None:
        call_plainly(module)
    args = [_as_input(value, dtype, device, arrange) for value in example.args]
    kwargs = {name: _as_input(value, dtype, device, arrange) for name, value in example.kwargs.items()}
    parameters = {} if module is None else dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    wrt = {
        name: tensor
        for name, tensor in _differentiable(example, args, kwargs, parameters).items()
        if gradients is None or name in gradients
    }
    for tensor in wrt.values():
        tensor.requires_grad_()
    # There is no autocast for meta.
    autocast = torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)
    with torch.set_grad_enabled(bool(wrt)), autocast:
        outputs = function(*([] if module is None else [module]), *args, **kwargs)
    flat = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not isinstance(flat, (tuple, list)):
        raise TypeError(f"it returns {outputs!r:.60}, not a tensor or a tuple")
    flat = [output for output in flat if isinstance(output, torch.Tensor)]
    results = {f"output {i}": o for i, o in enumerate(flat)}
    # By its place among all outputs: an implementation may say of more outputs than the original that they have one.
    seeds = {
        place: arrange(random_tensor(*output.shape, seed=90 + place).to(output))
        for place, output in enumerate(flat)
        if output.requires_grad
    }
    if wrt and seeds:
        differentiated = [flat[place] for place in seeds]
        found = torch.autograd.grad(differentiated, list(wrt.values()), list(seeds.values()), allow_unused=True)
        results |= {name: g for name, g in zip(wrt, found, strict=True) if g is not None}
    buffers = {} if module is None else dict(module.named_buffers())
    read = {
        **{f"argument {place}": value for place, value in enumerate(args)},
        **{f"argument {name}": value for name, value in kwargs.items()},
        **{f"the module's {name}": value for name, value in [*parameters.items(), *buffers.items()]},
        **{f"the incoming gradient of output {place}": value for place, value in seeds.items()},
    }
    told = Results({name: value.detach().clone() for name, value in results.items()})
    told.read = {name: _memory(value) for name, value in read.items() if isinstance(value, torch.Tensor)}
    one = isinstance(outputs, torch.Tensor)
    told.structure = "a tensor" if one else f"a {type(outputs).__name__} of {len(outputs)}"
    return told


def gradient_names(example: Example) -> list[str]:
    """The gradients that an example has, by the names that :func:`run_call` gives them."""
    parameters = {} if example.module is None else dict(example.module.named_parameters())
    return list(_differentiable(example, example.args, example.kwargs, parameters))


def _differentiable(
    example: Example, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """What has a gradient, by its name."""
    found = {f"gradient of input {place}": value for place, value in enumerate(args) if place not in example.fixed}
    found |= {f"gradient of argument {name}": value for name, value in kwargs.items()}
    found |= {f"gradient of {name}": value for name, value in parameters.items()}
    return {name: value for name, value in found.items() if _is_floating(value)}


def _as_input(
    value: Any, dtype: torch.dtype, device: torch.device, arrange: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return arrange(value.detach().to(device, dtype)) if _is_floating(value) else value.to(device).clone()


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _memory(value: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor lies in; shared, not copied."""
    if value.device.type == "meta":
        return value.detach()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.detach().untyped_storage())


def rounded(example: Example, dtype: torch.dtype) -> Example:
    """The example with every value rounded to ``dtype``, so that all runs start from the same numbers."""

    def narrowed(value: Any) -> Any:
        return value.to(dtype).to(torch.float64) if _is_floating(value) else value

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
