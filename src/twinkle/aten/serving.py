"""An operator's kernel on one platform: which it is, which calls it takes, and how it takes them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from twinkle.aten.arguments import Arguments, layout
from twinkle.aten.availability import level_missing
from twinkle.aten.routes import Routes
from twinkle.aten.spec import Kernel, OperatorSpec, Semantics, WithPullback
from twinkle.memory import Memory
from twinkle.platforms import Platform

unseen = torch._C.DisableTorchFunction
"""Within it a user's function mode, as ``torch.device(...)`` is one, sees and changes no call of PyTorch's: what Python
code does below an operator isn't the user's, and natively nobody sees it."""


class Flight(threading.local):
    """What this thread is doing in one operator's routers and gradients.

    Attributes:
        busy: a call is being served, or its gradient computed. The operator's own calls of itself until then are parts
            of that, and native's.
        called_itself: the kernel did so.
        arrived: a call has reached the router at the backend key.
    """

    busy = False
    called_itself = False
    arrived = False


class Serving:
    """The kernel that serves an operator on a platform.

    Attributes:
        level: ``"triton"``, ``"torch"``, or the platform's name where it has a kernel of its own.
        function: the kernel.
        arguments: what its arguments are.
        is_detached: autograd has to tie the result to its argument, which Python code can't.
        routes: what was measured about its calls, where they go by that.
        flight: what each thread is doing in it.
    """

    def __init__(
        self,
        spec: OperatorSpec,
        platform: Platform,
        level: str | None = None,
        *,
        routed: bool = True,
        routes: Routes | None = None,
    ) -> None:
        self.level = level or best_level(spec, platform)
        kernel = spec.kernels[self.level]
        self.arguments = Arguments(spec.overload)
        conditions = (*spec.conditions, *kernel.conditions, *(spec.routing if routed else ()))
        self._lasting = [(c.code, c.holds) for c in conditions if not c.each_time]
        self._each_time = [(c.code, c.holds) for c in conditions if c.each_time]
        self._known: Memory[str] = Memory()
        self.routes = routes
        self.flight = Flight()
        self.is_detached = Semantics.DETACHED in spec.semantics
        self._in_place = Semantics.IN_PLACE in spec.semantics and not self.is_detached
        self.function = spec.home.load(kernel.path)
        self._places = spec.differentiable
        self._pullback = None if spec.pullback is None else spec.home.load(spec.pullback)
        self._shape_only = spec.shape_only
        self._differentiable = self._with_pullback(spec, kernel)

    def refusal(self, values: list[Any]) -> str | None:
        """The code of a condition that doesn't hold; None when the kernel takes the call."""
        return self._lasting_refusal(values) or self.refusal_this_time(values)

    def _lasting_refusal(self, values: list[Any]) -> str | None:
        if self.arguments.has_numbers(values):  # conditions ask tensors
            return "number"
        return _first_failing(self._lasting, values) or self._route(values)

    def _route(self, values: list[Any]) -> str | None:
        if self.routes is None:
            return None
        try:
            return self.routes.refusal(values)
        except Exception:  # a call of no kind, as that for a memory format which a tensor can't have
            return "route-raised"

    def lasting_refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Of the conditions that look at nothing but the layout, as the dispatcher hands it over; remembered."""
        key = layout(args, kwargs)
        try:
            code = self._known.get(key)
        except TypeError:
            # Sizes are symbols of a program in the making, whose guards a kernel's questions would become.
            return "symbolic"
        if code is None:
            code = self._lasting_refusal(self.arguments.bind(args, kwargs)) or ""
            if key is not None:
                self._known.add(key, code)
        return code or None

    def refusal_this_time(self, values: list[Any]) -> str | None:
        """Of the other conditions, which may hold at one call and not at the next."""
        return _first_failing(self._each_time, values)

    def run(self, values: list[Any]) -> Any:
        """The kernel's result, without a gradient: for calls from below autograd."""
        with unseen():
            if _is_autocast():
                return without_autocast(self.arguments.call, self.function, values)
            return self.arguments.call(self.function, values)

    def ungradable(self, values: list[Any]) -> str | None:
        """Why autograd can't be served here by an ``autograd.Function``; None when it can or isn't wanted."""
        if not self._in_place:
            return None
        written = values[0]
        if written.is_inference() and not torch.is_inference_mode_enabled():
            return "inference-tensor"  # which native doesn't write then
        if self._needs_gradient(values):
            # It would complain only after the write, and can't tell all kinds of views.
            if written.is_leaf and written.requires_grad:
                return "in-place-on-leaf"
            if written._is_view():
                return "in-place-on-view"
        return None

    def run_with_gradient(self, values: list[Any]) -> Any:
        """The kernel's result with a gradient, as an autograd kernel gives it."""
        with unseen():
            differentiable = self._needs_gradient(values)
        if differentiable:  # not within that, since a user's hooks on what is saved are called there
            return _Differentiable.apply(self, *values)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = self.run(values)
        if self._in_place:
            increment_version(result)
        return result

    def _needs_gradient(self, values: list[Any]) -> bool:
        if (self._differentiable is None and self._pullback is None) or not torch.is_grad_enabled():
            return False
        chosen = values if self._places is None else [values[place] for place in self._places]
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in chosen)

    def _with_pullback(self, spec: OperatorSpec, kernel: Kernel) -> Callable[[list[Any]], WithPullback] | None:
        if kernel.with_pullback is not None:
            return functools.partial(self.arguments.call, spec.home.load(kernel.with_pullback))
        return None if spec.gradient is None else functools.partial(spec.gradient, self.run)


def best_level(spec: OperatorSpec, platform: Platform) -> str:
    """Which of an operator's kernels serves on a platform."""
    levels = (each for each in (platform.name, "triton") if each in spec.kernels)
    return next((each for each in levels if level_missing(each, platform) is None), "torch")


def _first_failing(conditions: list[tuple[str, Callable[..., bool]]], values: list[Any]) -> str | None:
    """The code of the first that doesn't hold. Of what one can't even be asked, native has the right exception."""
    for code, holds in conditions:
        try:
            if not holds(*values):
                return code
        except Exception:
            return f"{code}-raised"
    return None


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, serving: Serving, *values: Any) -> Any:
        with unseen(), torch._C._AutoDispatchBelowADInplaceOrView():
            if serving._differentiable is not None:
                result, ctx.pullback, *kept = without_autocast(serving._differentiable, list(values))
                ctx.others = [None] * len(kept)
                ctx.save_for_backward(*kept)
            else:
                result, ctx.pullback = serving.run(list(values)), serving._pullback
                needed = list(values)
                for place in serving._shape_only:
                    needed[place] = values[place].shape
                ctx.others = [None if isinstance(value, torch.Tensor) else value for value in needed]
                ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in needed))
        if serving._in_place:
            ctx.mark_dirty(values[0])
        ctx.count, ctx.flight = len(values), serving.flight
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        others = getattr(ctx, "others", ())
        saved = ctx.saved_tensors if others else ()
        arguments = [other if tensor is None else tensor for tensor, other in zip(saved, others, strict=True)]
        flight = ctx.flight
        before, flight.busy = flight.busy, True  # a derivative made of the operator itself would come here again
        try:
            with unseen():
                grads = without_autocast(ctx.pullback, grad, *arguments)
        finally:
            flight.busy = before
        return (None, *grads, *[None] * (ctx.count - len(grads)))


_is_autocast = torch._C._is_any_autocast_enabled


def without_autocast(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call of a kernel or its derivative. Autocast chooses the dtypes of what arrives; what is computed inside isn't
    its business, as it isn't in a kernel of PyTorch's own."""
    if not _is_autocast():
        return function(*arguments)
    with torch._C._DisableAutocast():
        return function(*arguments)


_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_are_transforms_active = torch._C._are_functorch_transforms_active


def interference(at_autograd: bool) -> str | None:
    """Why no kernel of ours can serve any call just now.

    At an autograd key a call may come from inside a transform, for which an ``autograd.Function`` has no rules.
    """
    if _dispatch_modes():
        return "dispatch-mode"  # it wants to see what is called, or has tensors without data
    if _is_tracing():
        return "jit-trace"  # sizes and numbers that Python code asks for become nodes of the graph
    if at_autograd:
        if _are_transforms_active():
            return "functorch"
        if forward_ad._current_level >= 0:
            return "forward-mode-ad"
    return None
