"""One call of an operator and everything about it that a caller could notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from twinkle.aten.harness.compare import difference, exact, memory_of, same_bits, shares_memory, too_far
from twinkle.aten.harness.fills import normal
from twinkle.aten.spec import OperatorSpec, Semantics


@dataclass
class Seen:
    """What a call did.

    Attributes:
        arguments: what it was called with, after the call.
        result: None when the call raised.
        error: the type of the exception that the call raised, or going backward from it.
        aliases: which tensor arguments the result is, or shares memory with.
        written: by how much each tensor argument's version grew.
        process: what of the process's own the call changed: settings, and where its generators stand.
        gradients: of each tensor argument but one that is written; empty when the call isn't differentiated.
    """

    arguments: list[Any]
    result: Any = None
    error: type[BaseException] | None = None
    aliases: list[str] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    process: list[str] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """One call to observe, its arguments made before anything is registered.

    Attributes:
        name: what reports call it.
        arguments: in the schema's order, used once.
        leaves: those that are given gradients, for the call to be differentiated.
        rounded: the dtype that the gradient to start from is rounded to; that of the result when left out.
    """

    name: str
    arguments: list[Any]
    leaves: tuple[torch.Tensor, ...] = ()
    rounded: torch.dtype | None = None

    @classmethod
    def of(cls, name: str, arguments: list[Any], spec: OperatorSpec, *, differentiate: bool) -> Call:
        """A call of an operator. A tensor that is written gets no gradient, since a leaf can't be written."""
        leaves = _tensors(arguments)[Semantics.IN_PLACE in spec.semantics :] if differentiate else []
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        return cls(name, arguments, tuple(leaves))

    def in_fp64(self, spec: OperatorSpec, rounded: torch.dtype | None) -> Call:
        """The same call with exact numbers: of the same arguments, and of the same gradient to start from."""
        arguments = exact([v.detach() if isinstance(v, torch.Tensor) else v for v in self.arguments])
        made = Call.of(self.name, arguments, spec, differentiate=bool(self.leaves))
        return dataclasses.replace(made, rounded=rounded)

    def observe(self, function: Callable[[list[Any]], Any]) -> Seen:
        """Calls a function with the arguments, as one list, and goes backward if there are gradients."""
        seen = Seen(self.arguments)
        tensors = _tensors(self.arguments)
        before = [_version(tensor) for tensor in tensors]
        state = _state_of_the_process(tensors)
        try:
            seen.result = function(self.arguments)
            seen.process = [what for what, now in _state_of_the_process(tensors).items() if now != state[what]]
            seen.written = [_version(tensor) - version for tensor, version in zip(tensors, before, strict=True)]
        except Exception as error:
            seen.error = type(error)
            return seen
        seen.aliases = [_alias(seen.result, tensor) for tensor in tensors]
        if self.leaves and _requires_grad(seen.result):
            cotangent = _cotangent(self.name, seen.result, self.rounded)
            try:
                seen.result.backward(cotangent)
                seen.gradients = [leaf.grad for leaf in self.leaves]
            except Exception as error:
                seen.error = type(error)
        return seen


def differences(spec: OperatorSpec, seen: Seen, native: Seen, truth: Seen | None = None) -> list[str]:
    """What differs between two observations of one call; empty when nothing does.

    Args:
        truth: that of the call in fp64, where the operator or its derivative rounds in an order of its own.
    """
    if seen.error is not native.error:
        return [f"{_raised(seen)}, natively {_raised(native)}"]
    tensors = list(zip(_tensors(seen.arguments), _tensors(native.arguments), strict=True))
    if seen.error is not None:
        same = all(_same_memory(*pair) for pair in tensors)
        return [] if same else ["an argument was written before the exception"]
    own_order = Semantics.ROUNDS in spec.semantics
    rounds = own_order and truth is not None
    found = [difference(spec, seen.result, native.result, seen.arguments, truth.result if rounds and truth else None)]
    # What is written on purpose may be rounded otherwise; all else, and what lies beside it, is as it is natively.
    if not all(_same_memory(*pair) for pair in tensors[rounds and Semantics.IN_PLACE in spec.semantics :]):
        found.append("the memory of an argument was written")
    # Natively it may be the visible part of a larger tensor: of which kernel that is so, another order needn't know.
    is_view = _is_view(native.result) and (_is_view(seen.result) or not own_order)
    found += [
        f"{what}: {ours}, natively {theirs}"
        for what, ours, theirs in (
            ("type", type(seen.result).__name__, type(native.result).__name__),
            ("changes in the process", seen.process, native.process),
            ("aliases", seen.aliases, native.aliases),
            ("versions grew by", seen.written, native.written),
            ("requires_grad", _requires_grad(seen.result), _requires_grad(native.result)),
            ("is a view", _is_view(seen.result), is_view),
            ("gradients", len(seen.gradients), len(native.gradients)),
        )
        if ours != theirs
    ]
    if spec.judge is None:
        pairs = (
            zip(seen.gradients, native.gradients, strict=True) if len(seen.gradients) == len(native.gradients) else ()
        )
        exact_ones = truth.gradients if truth is not None and truth.gradients else [None] * len(seen.gradients)
        problems = [_gradient_problem(*pair, exact_one) for pair, exact_one in zip(pairs, exact_ones, strict=False)]
        found += [f"gradient: {problem}" for problem in problems if problem]
    return [problem for problem in found if problem]


def _raised(seen: Seen) -> str:
    return "no exception" if seen.error is None else seen.error.__name__


def _tensors(arguments: list[Any]) -> list[torch.Tensor]:
    return [value for value in arguments if isinstance(value, torch.Tensor)]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout is not torch.strided or torch.equal(memory_of(one), memory_of(other))


def _state_of_the_process(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """What other code depends on: settings, and the next random number, which is another after one was drawn."""
    devices = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    modules = {kind: torch.get_device_module(kind) for kind in devices}
    generators = {"cpu": torch, **{kind: of for kind, of in modules.items() if hasattr(of, "get_rng_state")}}
    return {
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "determinism": torch.get_deterministic_debug_mode(),
        "threads": torch.get_num_threads(),
        **{f"random numbers of {kind}": bytes(of.get_rng_state().numpy()) for kind, of in generators.items()},
    }


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _requires_grad(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.requires_grad


def _is_view(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result._is_view()


def _alias(result: Any, tensor: torch.Tensor) -> str:
    if result is tensor:
        return "the same"
    if not shares_memory(result, tensor):
        return "apart"
    return "shares memory and version" if _share_version(result, tensor) else "shares memory"


def _share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to one is seen as one to the other by autograd."""
    if one.is_inference() or other.is_inference():
        return False
    before = other._version
    increment_version(other)
    shared = one._version == other._version
    torch._C._autograd._unsafe_set_version_counter((other,), (before,))
    return shared


def _cotangent(name: str, result: torch.Tensor, rounded: torch.dtype | None) -> torch.Tensor:
    """The gradient to start from, with its dimensions in memory the other way round than usual."""
    made = normal(f"{name}/cotangent", result.numel(), torch.float64).view(result.shape[::-1])
    made = made.permute(tuple(range(made.dim()))[::-1]).to(rounded or result.dtype)
    return made.to(device=result.device, dtype=result.dtype)


def _gradient_problem(ours: torch.Tensor | None, theirs: torch.Tensor | None, truth: torch.Tensor | None) -> str | None:
    if ours is None or theirs is None:
        return None if ours is theirs else "there is one, or natively there is one"
    if ours.layout is not theirs.layout:
        return f"its layout is {ours.layout}, natively {theirs.layout}"
    if same_bits(ours, theirs):
        return None
    return "wrong" if truth is None else too_far(ours.to_dense(), theirs.to_dense(), truth.to_dense())
