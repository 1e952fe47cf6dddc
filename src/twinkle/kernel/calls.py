"""The callables that are installed: they count, decide call by call, and otherwise stay out of the way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import assume_constant_result, is_compiling

from twinkle.reasons import Counts, Reason


def signature_of(function: Any) -> inspect.Signature:
    """A callable's real signature; a function that HF kernels made a module of has it on its class's ``forward``."""
    if isinstance(function, nn.Module):
        signature = inspect.signature(type(function).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return inspect.signature(function)


def renamed_parameters(original: Any, replacement: Any) -> dict[str, str] | Reason:
    """How to call a replacement as the original is called.

    Returns:
        the original's parameter name -> the replacement's, where they differ; or the Reason why some call wouldn't fit:
        a parameter that the replacement lacks, has at another position, needs besides, takes in another way, or has
        another default for.
    """
    try:
        theirs = list(signature_of(original).parameters.values())
        ours = list(signature_of(replacement).parameters.values())
    except (TypeError, ValueError) as error:
        return Reason.of_error(error, "signature", "reading the signature")
    takes_args = any(p.kind is p.VAR_POSITIONAL for p in ours)
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in ours)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed = [p for p in ours if p.kind not in variadic]
    names = [p.name for p in fixed]
    renamed: dict[str, str] = {}
    wanted = [p for p in theirs if p.kind not in variadic]
    for position, parameter in enumerate(wanted):
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.name not in names and not takes_kwargs:
                return Reason("signature", f"the kernel has no parameter {parameter.name!r}")
        elif position < len(names) and names[position] != parameter.name:
            if parameter.name in names:
                return Reason("signature", f"the kernel has {parameter.name!r} at another position")
            renamed[parameter.name] = names[position]
        elif position >= len(names) and not takes_args:
            return Reason("signature", f"the kernel has no parameter {parameter.name!r}")
        elif position >= len(names) and not takes_kwargs and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            return Reason("signature", f"the kernel takes {parameter.name!r} only by position")
        by_name = [p for p in fixed if p.name == parameter.name]
        partner = by_name if parameter.kind is parameter.KEYWORD_ONLY else fixed[position : position + 1]
        differs = _differs(parameter, partner[0]) if partner else None
        if differs is not None:
            return Reason("signature", differs)
    # Decorated classes take (*args, **kwargs); what they pass on is the wrapped forward's business.
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in theirs)
    needed = [p.name for p in fixed[len(wanted) :] if p.default is p.empty and not open_ended]
    if needed:
        return Reason("signature", f"the kernel needs {', '.join(needed)}, which the original is not called with")
    if any(p.kind is p.VAR_KEYWORD for p in theirs) and not takes_kwargs and not open_ended:
        return Reason("signature", "the original takes **kwargs, which the kernel would ignore")
    return renamed


def _differs(theirs: inspect.Parameter, ours: inspect.Parameter) -> str | None:
    """Why a call that fits the original's parameter may not fit the kernel's, or mean something else."""
    for kind, how in ((ours.POSITIONAL_ONLY, "by position"), (ours.KEYWORD_ONLY, "by name")):
        if ours.kind is kind and theirs.kind is not kind:
            return f"the kernel takes {ours.name!r} only {how}"
    if theirs.default is theirs.empty:
        return None
    if ours.default is ours.empty:
        return f"the kernel needs {ours.name!r}, which the original has a default for"
    try:
        same = theirs.default is ours.default or bool(theirs.default == ours.default)
    except Exception:  # e.g. two tensors
        same = False
    return None if same else f"{ours.name!r} is {ours.default!r} by default, {theirs.default!r} in the original"


def counted(
    kernel: Callable[..., Any],
    original: Callable[..., Any],
    counts: Counts,
    *,
    accepts_call: Callable[..., str | None] | None = None,
    renamed: dict[str, str] | None = None,
    place: str | None = None,
    blames: bool = True,
) -> Callable[..., Any]:
    """``kernel`` with the original's name and signature; counts its calls, and lets the original run where it must.

    What the kernel raises goes up, counted and with a note that says whose error it is; without ``blames``, for one
    that runs the model's own code, as it is. A call costs one function call
    and one integer add more (0.2 us), and with ``accepts_call`` what that costs. While a compiler traces, nothing is
    counted but that it did.
    """
    mark_compiled = assume_constant_result(functools.partial(setattr, counts, "compiled", True))
    where = place or str(getattr(original, "__qualname__", type(original).__qualname__))
    blame = functools.partial(_blame, kernel, where, counts) if blames else functools.partial(_not_served, counts)
    kernel = _taking(kernel, renamed)
    accepts_call = _taking(accepts_call, renamed) if accepts_call else None

    if accepts_call is None:

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                mark_compiled()
                return kernel(*args, **kwargs)
            counts.kernel += 1
            try:
                return kernel(*args, **kwargs)
            except Exception as error:
                blame(error)
                raise

    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                mark_compiled()
                return (kernel if accepts_call(*args, **kwargs) is None else original)(*args, **kwargs)
            try:
                reason = accepts_call(*args, **kwargs)
            except Exception as error:  # of a call that it doesn't understand, the original knows best what to say
                reason = str(Reason.of_error(error, "refused", "accepts_call()"))
            if reason is not None:
                counts.fall_back(str(reason))
                return original(*args, **kwargs)
            counts.kernel += 1
            try:
                return kernel(*args, **kwargs)
            except Exception as error:
                blame(error)
                raise

    return as_original(call, original)


_BLAME = "twinkle.kernel: raised in the kernel"


def _blame(kernel: Any, place: str, counts: Counts, error: Exception) -> None:
    """Notes on an error which kernel it came from, and how to do without."""
    if type(error).__module__ == "torch.utils.checkpoint":  # how recomputation stops early
        return
    counts.kernel -= 1
    counts.errors += 1
    if any(note.startswith(_BLAME) for note in getattr(error, "__notes__", ())):  # by a kernel that this one called
        return
    name = getattr(kernel, "__qualname__", type(kernel).__qualname__)
    remedy = "unkernelize(model) brings the original back"
    if isinstance(error, RecursionError):
        remedy += "; does it call the original by name? That calls the kernel again: keep the original first"
    error.add_note(f"{_BLAME} {kernel.__module__}.{name}, installed in the place of {place}; {remedy}")


def _not_served(counts: Counts, error: Exception) -> None:
    """A call that ended with an error of somebody else's was none that the kernel served."""
    counts.kernel -= 1


def _taking(function: Callable[..., Any], renamed: dict[str, str] | None) -> Callable[..., Any]:
    if not renamed:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{renamed.get(name, name): value for name, value in kwargs.items()})

    return call


def as_original(call: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Gives ``call`` the original's name, docstring and signature."""
    source = type(original).forward if isinstance(original, nn.Module) else original
    functools.update_wrapper(call, source)
    call.__signature__ = signature_of(original)  # type: ignore[attr-defined]
    return call


class Router:
    """What stands in the place of a process-wide function while models claim it.

    Attributes:
        name: the function's name.
        original: the function that was there.
        served_by: what was installed: op, backend and variant.
        active: False after the undo: whoever still holds the router gets the original through it.
        counts: the calls of all models of the process.
    """

    def __init__(self, name: str, original: Any, served_by: tuple[Any, ...], counts: Counts) -> None:
        self.name = name
        self.original = original
        self.served_by = served_by
        self.active = True
        self.counts = counts

    def around(
        self, kernel: Callable[..., Any], accepts_call: Callable[..., str | None] | None, renamed: dict[str, str] | None
    ) -> Callable[..., Any]:
        """The function to put in the original's place."""
        serve = counted(kernel, self.original, self.counts, accepts_call=accepts_call, renamed=renamed, place=self.name)

        def route(*args: Any, **kwargs: Any) -> Any:
            return serve(*args, **kwargs) if self.active else self.original(*args, **kwargs)

        routed = as_original(route, self.original)
        # A module that HF kernels made of a function has lost the function's name.
        routed.__name__ = routed.__qualname__ = self.name
        routed.twinkle_router = self  # type: ignore[attr-defined]
        return routed


def router_of(value: Any) -> Router | None:
    """The router behind what stands in a function's place; None where no router does."""
    return getattr(value, "twinkle_router", None)
