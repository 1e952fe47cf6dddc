"""Which class is whose: its author's, torch's wrappers around it, and ours, which answers for the one beneath."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from twinkle.naming import top_package

MARK = "_twinkle_installed"
"""The attribute of a generated class, and of no other, that says what is installed on it."""


def is_torch_wrapper(cls: type) -> bool:
    """Whether torch made this class at run time around somebody's class, as ``fully_shard`` and ``parametrize`` do."""
    inner = cls.__bases__[-1]
    return _from_torch(cls) and not _from_torch(inner) and hasattr(inner, "forward")


def _from_torch(cls: type) -> bool:
    return top_package(cls.__module__) == "torch"


def peel(cls: type) -> type:
    """The class as its author wrote it: without torch's run-time wrappers and without ours."""
    while True:
        if MARK in cls.__dict__:
            cls = cls.__dict__[MARK].origin
        elif is_torch_wrapper(cls):
            cls = cls.__bases__[-1]
        else:
            return cls


class Generated(type):
    """The metaclass of generated classes: where somebody asks for a module's class, they answer for the original.

    Classes that torch or others derive from a generated one have it too; those that are somebody's own, as they are.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        original = peel(cls)
        return super().__call__(*args, **kwargs) if original is cls else original(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        # The plain question: an abstract class would ask its subclasses in turn, ours among them.
        ours = MARK in cls.__dict__
        return type.__instancecheck__(peel(cls), instance) if ours else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        ours = MARK in cls.__dict__
        return type.__subclasscheck__(peel(cls), subclass) if ours else super().__subclasscheck__(subclass)

    @property
    def __signature__(cls) -> inspect.Signature:
        """How to call it; ``inspect`` would read the metaclass's own."""
        original = peel(cls)
        if original is not cls:
            return inspect.signature(original)
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@functools.cache
def metaclass_for(of: type) -> type:
    """The same for a class that has a metaclass already."""
    if issubclass(of, Generated):
        return of
    return Generated if of is type else type(Generated.__name__, (Generated, of), {})
