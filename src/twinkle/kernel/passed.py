"""Modules whose work a kernel does without calling them: whether a call may go past one.

That is right only as long as the module, called, would do what it did when the kernel was installed, and nobody has
asked to see its inputs, outputs or gradients. So it is asked anew at each call, since hooks and adapters come and go;
one that may not be passed is called, by the original.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling

from twinkle.kernel.ops.hooks import hooks_for_all, hooks_on
from twinkle.kernel.probe import OF_TORCH_AND_HOOKS
from twinkle.kernel.reclass import installed_on, is_own_forward, peel

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_PLAIN = (bool, int, float, str, type(None), *_FUNCTIONS)
"""Values that say what a module computes and that are the same object, or equal, in a copy of it."""

CHANGED = "is not, or does not run, what was there when the kernel was installed"


@dataclass(frozen=True)
class Passed:
    """A module as it was when a kernel that goes past it was installed; equal for modules that are alike.

    Attributes:
        original: its class's forward.
        attributes: its plain attributes and functions, by name.
        children: the same of its children, None for a place that is empty.
        op: whose kernels may have taken the place of the forward; None for none.
        known: ways to call such a module that were met -> whether they run the original or a kernel of that op.
    """

    original: Callable[..., Any]
    attributes: tuple[tuple[str, Any], ...] = ()
    children: tuple[tuple[str, Passed | None], ...] = ()
    op: str | None = None
    known: dict[Any, bool] = field(default_factory=dict, compare=False)

    def why_call(self, module: Any) -> str | None:
        """Why the module has to be called after all, as what is to be said of it; None for the ordinary one."""
        cls: Any = type(module)
        # Seldom more than this: what an installed forward is doesn't change.
        runs = None if is_compiling() else self.known.get((cls.__call__, cls.forward))
        if not (self.runs_in(cls) if runs is None else runs) or (self.attributes and differs(module, self.attributes)):
            return CHANGED
        if "forward" in module.__dict__ and not is_own_forward(module.__dict__["forward"], module, cls):
            return "has a forward of its own"
        if hooks_on(module):
            return "has hooks"
        return _why_call_children(module, self.children) if self.children else None

    def runs_in(self, cls: Any) -> bool:
        """Whether instances of a class run it when they are called."""
        runs = _runs(cls, self.original, self.op)
        if not is_compiling():
            self.known[cls.__call__, cls.forward] = runs
        return runs


def differs(module: Any, attributes: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a module's attributes have other values by now."""
    for name, value in attributes:
        now = getattr(module, name, _PLAIN)  # which none of them is
        if now is not value and now != value:
            return True
    return False


def _why_call_children(module: Any, children: tuple[tuple[str, Passed | None], ...]) -> str | None:
    if len(module._modules) != len(children):
        return CHANGED
    for name, as_it_was in children:
        child = module._modules.get(name)
        if child is None or as_it_was is None:
            reason = None if child is as_it_was else CHANGED
        else:
            reason = as_it_was.why_call(child)
        if reason is not None:
            return reason
    return None


def _runs(cls: Any, original: Callable[..., Any], op: str | None) -> bool:
    """Whether instances of a class, when called, run that forward, or what an op's kernel has put in its place."""
    if cls.__call__ is not nn.Module.__call__:
        return False
    forward = cls.forward
    if forward is original:
        return True
    installed = installed_on(cls) if op is not None else None
    method = installed.methods.get("forward") if installed else None
    if method is None or method.function is not forward:
        return False
    return method.original is original and method.row.op == op


# What torch.compiler.assume_constant_result does, which would import the compiler, and Triton with it.
_runs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def passed(module: nn.Module) -> Passed:
    """What a module is now."""
    cls: Any = peel(type(module))
    children = [(name, None if child is None else passed(child)) for name, child in module._modules.items()]
    return Passed(cls.forward, _attributes(module, _PLAIN), tuple(children))


def _attributes(module: nn.Module, kinds: tuple[type, ...]) -> tuple[tuple[str, Any], ...]:
    own = sorted(set(module.__dict__) - OF_TORCH_AND_HOOKS)
    return tuple((name, module.__dict__[name]) for name in own if type(module.__dict__[name]) in kinds)


@dataclass(frozen=True)
class Watched:
    """What kernels of an op go past at a module: children and functions that it has in the place of such.

    Attributes:
        children: by name.
        functions: those among its attributes, by name.
    """

    children: tuple[tuple[str, Passed], ...] = ()
    functions: tuple[tuple[str, Any], ...] = ()

    def guard(self, accepts_call: Callable[..., str | None] | None) -> Callable[..., str | None] | None:
        """``accepts_call`` with the question whether a call may go past them before it."""
        children, functions = self.children, self.functions
        if not children and not functions:
            return accepts_call

        def may_pass(module: Any, *args: Any, **kwargs: Any) -> str | None:
            modules = module._modules
            for name, as_it_was in children:
                child = modules.get(name)
                reason = CHANGED if child is None else as_it_was.why_call(child)
                if reason is not None:
                    return f"its {name} {reason}"
            if functions and differs(module, functions):
                return f"a function of it {CHANGED}"
            reason = hooks_for_all() if children else None
            if reason is not None or accepts_call is None:
                return reason
            return accepts_call(module, *args, **kwargs)

        return may_pass


def watched_at(site: Site, reference: Any) -> Watched:
    """What the kernels of an op go past at a site: all children but those that its reference says are called.

    Of an op without a reference nobody knows what it does, so nothing.
    """
    module = site.module
    if module is None or reference is None:
        return Watched()
    says = getattr(reference, "called_children", None)
    called: Collection[str] = says(site.variant) if says else ()
    past = {name: child for name, child in module._modules.items() if child is not None and name not in called}
    return Watched(tuple((name, passed(child)) for name, child in past.items()), _attributes(module, _FUNCTIONS))
