"""Conditions that several operators share. Each also gives a call for which it doesn't hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from twinkle.aten.arguments import PLAIN
from twinkle.aten.layouts import is_dense
from twinkle.aten.spec import Condition
from twinkle.aten.strided import CASTS
from twinkle.naming import dtype_name
from twinkle.triton_programs import interpreted

_is_functional = torch._is_functional_tensor
"""Whether a tensor stands for another one, as code that functionalizes a program makes them: it has no memory."""

_FEW_BITS = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8))
"""Dtypes that are names for people's own formats: PyTorch's kernels don't so much as copy them."""

Call = Callable[[torch.Tensor], tuple[Any, ...]]
"""Makes all arguments of a call from one tensor."""


class _Subclass(torch.Tensor):
    pass


def tensor(
    index: int, name: str, call: Call, *, without: Sequence[str] = (), optional: bool = False
) -> tuple[Condition, ...]:
    """That an argument is a tensor whose elements lie in memory as they are.

    Args:
        index: the argument's position in the schema.
        name: its name there.
        call: makes a call with a given tensor as that argument.
        without: the codes of those that needn't hold.
        optional: it may be left out.
    """

    def ordinary(*values: Any) -> bool:
        return type(values[index]) in PLAIN

    def strided(*values: Any) -> bool:
        t = values[index]
        return t.layout is torch.strided and not (t.is_quantized or t.is_nested or t.dtype in _FEW_BITS)

    def as_stored(*values: Any) -> bool:
        t = values[index]
        return not (t.is_conj() or t.is_neg() or t._is_zerotensor() or _is_functional(t))

    def some(*values: Any) -> bool:
        return bool(values[index].numel() > 0)

    def on(device: torch.device, *shape: int, **options: Any) -> torch.Tensor:
        return torch.ones(*shape, device=device, **options)

    conditions = (
        Condition(
            "subclass", f"{name} is no tensor subclass", ordinary, lambda d: call(on(d, 3, 4).as_subclass(_Subclass))
        ),
        Condition("layout", f"{name} is strided, of whole bytes", strided, lambda d: call(on(d, 3, 4).to_sparse())),
        Condition(
            "lazy-bits",
            f"{name} carries no pending conjugation, negation or functionalization",
            as_stored,
            lambda d: call(on(d, 3, 4, dtype=torch.complex64).conj()),
            each_time=True,
        ),
        Condition("empty", f"{name} has elements", some, lambda d: call(on(d, 3, 0))),
    )
    chosen = tuple(condition for condition in conditions if condition.code not in without)
    if "lazy-bits" in without:
        text = f"{name} stands for no other tensor, whose memory it hasn't"
        own = functools.partial(_wraps_nothing, index)
        chosen += (Condition("functional", text, own, _never_by_itself, each_time=True),)
    return tuple(replace(c, holds=_or_left_out(index, c.holds)) for c in chosen) if optional else chosen


def _wraps_nothing(index: int, *values: Any) -> bool:
    return not _is_functional(values[index])


def _never_by_itself(device: torch.device) -> Any:
    raise NotImplementedError("such a tensor lives inside of functionalization alone")


def _or_left_out(index: int, holds: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *values: values[index] is None or holds(*values)


def dense(index: int, name: str, call: Call) -> Condition:
    """That a tensor's elements fill a stretch of memory, so that a kernel may take them in the order of memory."""
    return Condition(
        "dense",
        f"the elements of {name} lie side by side, in any order",
        lambda *values: is_dense(values[index].shape, values[index].stride()),
        lambda device: call(torch.ones(6, device=device)[::2]),
    )


INDEX_DTYPES = frozenset({torch.int64, torch.int32})
"""What PyTorch takes as indices into a table."""

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def floating(index: int, call: Call) -> Condition:
    """That a tensor argument, by its position in the schema, holds real numbers of a usual dtype."""
    return Condition(
        "dtype",
        f"the dtype is one of {', '.join(sorted(map(dtype_name, FLOATING)))}",
        lambda *values: values[index].dtype in FLOATING,
        lambda device: call(torch.ones(3, 4, dtype=torch.complex64, device=device)),
    )


def beside(t: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ones for a call with ``t``: of its shape and dtype where nothing else is said, on its device."""
    return torch.ones(shape or t.shape, dtype=dtype or t.dtype, device=t.device)


def _another_device(device: torch.device) -> torch.device:
    """One beside it, for a call with tensors of two; NotImplementedError where there is none."""
    if device.type == "cpu":
        raise NotImplementedError("the CPU is the only device that is always there")
    return torch.device("cpu")


def one_device(places: Sequence[int], call: Call) -> Condition:
    """That the tensors among some arguments, of which the first is always given, are on one device.

    Args:
        places: their positions in the schema.
        call: makes a call with a given tensor as the first of them, and others on its device.
    """

    text = "all its tensors are on one device"
    return _alike("device", text, places, call, lambda t: t.device, lambda t: t.to(_another_device(t.device)))


def one_dtype(places: Sequence[int], call: Call) -> Condition:
    """That the tensors among some arguments, of which the first two are always given, have one dtype.

    Args:
        places: their positions in the schema.
        call: makes a call with a given tensor as the first of them, and others of its dtype.
    """

    return _alike("dtypes", "its tensors have one dtype", places, call, lambda t: t.dtype, lambda t: t.bfloat16())


def _alike(
    code: str,
    text: str,
    places: Sequence[int],
    call: Call,
    what: Callable[[torch.Tensor], Any],
    changed: Callable[[torch.Tensor], torch.Tensor],
) -> Condition:
    """That the tensors at some places have one thing in common; ``changed`` gives one that hasn't."""

    def holds(*values: Any) -> bool:
        first = what(values[places[0]])
        return all(values[place] is None or what(values[place]) == first for place in places[1:])

    def beyond(device: torch.device) -> tuple[Any, ...]:
        values = list(call(torch.ones(3, 4, device=device)))
        values[places[1]] = changed(values[places[1]])
        return tuple(values)

    return Condition(code, text, holds, beyond)


def dimensions(index: int, name: str, count: int, call: Call) -> Condition:
    """That a tensor argument has so many dimensions.

    Args:
        index: the argument's position in the schema.
        name: its name there.
        call: makes a call with a given tensor as that argument.
    """

    def beyond(device: torch.device) -> tuple[Any, ...]:
        values = list(call(torch.ones(3, 4, device=device)))
        values[index] = values[index][None]
        return tuple(values)

    return Condition("rank", f"{name} has {count} dimensions", lambda *values: values[index].dim() == count, beyond)


def _same_or_cast(to: Any, source: Any, *_: Any) -> bool:
    return to.dtype == source.dtype or (to.dtype in CASTS and source.dtype in CASTS)


def _pair(device: torch.device, to: torch.dtype, source: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, bool]:
    return torch.zeros(3, 4, dtype=to, device=device), torch.ones(3, 4, dtype=source, device=device), False


CASTABLE = Condition(
    "cast",
    f"the dtypes are equal, or both of {', '.join(sorted(map(dtype_name, CASTS)))}",
    _same_or_cast,
    lambda device: _pair(device, torch.int32, torch.float32),
)
"""Of a copy's two leading arguments."""

SAME_DTYPE = Condition(
    "cast",
    "the dtypes are equal",
    lambda to, source, *_: to.dtype == source.dtype,
    lambda device: _pair(device, torch.float16, torch.float32),
)
"""Of a copy's two leading arguments."""


def rounded(index: int, call: Call) -> Condition:
    """That where Triton's programs are interpreted, numbers of a tensor argument's dtype are rounded to the nearest.

    Args:
        index: the argument's position in the schema; the kernel makes numbers of its dtype.
        call: makes a call with a given tensor as that argument.
    """
    return _interpreted("rounds", _rounds, lambda *values: values[index].dtype, _bfloat16(call))


def multiplied(index: int, call: Call) -> Condition:
    """Likewise, that products of matrices are right; see :func:`rounded`."""
    return _interpreted("multiplies", _multiplies, lambda *values: values[index].dtype, _bfloat16(call))


def _interpreted(
    verb: str,
    does: Callable[[torch.dtype | None], bool],
    made: Callable[..., torch.dtype | None],
    beyond: Callable[[torch.device], tuple[Any, ...]],
) -> Condition:
    """That Triton does something with numbers of a dtype, as it may not where it interprets programs.

    Args:
        made: of a call's arguments, the dtype; None where there is nothing to do.
        beyond: makes a call whose numbers are bfloat16.
    """

    def bfloat16(device: torch.device) -> tuple[Any, ...]:
        if does(torch.bfloat16):
            raise NotImplementedError("it does that here, in every dtype")
        return beyond(device)

    text = f"where Triton interprets it, it {verb} numbers of the dtype"
    return Condition("interpreter", text, lambda *values: does(made(*values)), bfloat16)


def _bfloat16(call: Call) -> Callable[[torch.device], tuple[Any, ...]]:
    return lambda device: call(torch.ones(3, 4, dtype=torch.bfloat16, device=device))


def _rounds(dtype: torch.dtype | None) -> bool:
    if dtype is not torch.bfloat16 or not interpreted():
        return True
    from twinkle.triton_dot import rounds

    return rounds()


def _multiplies(dtype: torch.dtype | None) -> bool:
    if dtype is None or not interpreted():
        return True
    from twinkle.triton_dot import multiplies

    return multiplies(dtype)


ROUNDED_CAST = _interpreted(
    "rounds",
    _rounds,
    lambda to, source, *_: None if to.dtype == source.dtype else to.dtype,
    lambda device: _pair(device, torch.bfloat16, torch.float32),
)
"""Of a copy's two leading arguments: where their dtypes are equal, numbers are moved as they are."""

_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32})


def ordinary_memory(first: int, call: Callable[..., tuple[Any, ...]]) -> tuple[Condition, ...]:
    """That an operator with the arguments ``dtype``, ``layout``, ``device`` and ``pin_memory`` needs nothing special.

    Args:
        first: the position of ``dtype`` in the schema; the others follow.
        call: ``call(device, layout=…)`` makes a call with one of them.
    """
    return (
        Condition(
            "layout",
            "layout is strided or left out",
            lambda *values: values[first + 1] in (None, torch.strided),
            lambda device: call(device, layout=torch.sparse_coo),
        ),
        Condition(
            "pinned",
            "the memory isn't to be pinned",
            lambda *values: not values[first + 3],
            lambda device: call(device, pin_memory=True),
        ),
        Condition(
            "dtype",
            "dtype is no quantized one",
            lambda *values: values[first] not in _QUANTIZED,
            lambda device: call(device, dtype=torch.qint8),
        ),
    )


READABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""What is read on the host as a Python number."""

ONE_NUMBER = (
    *tensor(0, "self", lambda t: (t,), without=("lazy-bits", "empty")),
    Condition(
        "elements",
        "self has one element",
        lambda self: self.numel() == 1,
        lambda device: (torch.ones(2, device=device),),
    ),
    Condition(
        "dtype",
        f"the dtype is one of {', '.join(sorted(map(dtype_name, READABLE)))}",
        lambda self: self.dtype in READABLE,
        lambda device: (torch.ones(1, dtype=torch.uint16, device=device),),
    ),
)
"""Of an operator that reads its only argument on the host."""
