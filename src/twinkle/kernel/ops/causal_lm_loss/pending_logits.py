"""Logits that nobody has computed yet: what a head returns while its model computes a loss.

Most models do little with their logits before the loss: cast, scale, cap, shift and flatten them. Those steps are
written down, and cross-entropy of the result is computed from the head's input. Whatever else is asked of the logits is
answered by computing them, in just the steps that the model took.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Step = Callable[[torch.Tensor], torch.Tensor]
Number = float


class Head:
    """A head's call that was put off.

    Attributes:
        x: ``[..., H]``, the head's input.
        weight, bias: ``[V, H]`` and ``[V]`` or None.
        loss: computes cross-entropy from them (see the op's reference).
        fused: whether it has.
        why: the first reason for which the logits were computed after all.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, loss: Any) -> None:
        self.x, self.weight, self.bias, self.loss = x, weight, bias, loss
        self.fused = False
        self.why: str | None = None
        self._logits: torch.Tensor | None = None

    def logits(self) -> torch.Tensor:
        """``[..., V]``, computed once."""
        if self._logits is None:
            self._logits = F.linear(self.x, self.weight, self.bias)
        return self._logits

    def pending(self) -> PendingLogits:
        """What stands for the logits."""
        device = self.x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.x.dtype
        return PendingLogits(self, self.x, Cap(), dtype, ())


class Cap(NamedTuple):
    """What was done to the numbers: ``inner * z``, or ``outer * tanh(inner * z)``."""

    inner: float = 1.0
    outer: float | None = None

    def times(self, factor: float) -> Cap:
        """That, multiplied."""
        return Cap(self.inner * factor) if self.outer is None else Cap(self.inner, self.outer * factor)


class PendingLogits:
    """In the place of a tensor ``[..., V]``.

    Args:
        head: where it comes from.
        rows: ``[..., H]``, what the head would be applied to: the rows of its input that are left.
        cap: what was done to the numbers.
        dtype: of the logits.
        steps: the same once more, as it was done to the logits.
    """

    def __init__(self, head: Head, rows: torch.Tensor, cap: Cap, dtype: torch.dtype, steps: tuple[Step, ...]) -> None:
        self.head, self.rows, self.cap, self.dtype, self._steps = head, rows, cap, dtype, steps
        self._value: torch.Tensor | None = None

    def value(self, why: str) -> torch.Tensor:
        """The logits themselves; they are computed now, if nobody has needed them before."""
        if self._value is None:
            self.head.why = self.head.why or f"the model needs its logits: {why}"
            value = self.head.logits()
            for step in self._steps:
                value = step(value)
            self._value = value
        return self._value

    @property
    def has_value(self) -> bool:
        """Whether somebody has needed them."""
        return self._value is not None

    # --- what they look like

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.rows.shape[:-1], self.head.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return self.rows.dim()

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def requires_grad(self) -> bool:
        return True

    def dim(self) -> int:
        return self.rows.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    # --- what can be written down

    def _then(
        self, step: Step, rows: torch.Tensor | None = None, cap: Cap | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        if self._value is not None:
            return step(self._value)
        return PendingLogits(
            self.head,
            self.rows if rows is None else rows,
            self.cap if cap is None else cap,
            self.dtype if dtype is None else dtype,
            (*self._steps, step),
        )

    def contiguous(self) -> Any:
        return self._then(lambda logits: logits.contiguous())

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **options: Any) -> Any:
        wanted = args[0] if len(args) == 1 and not options else None
        if isinstance(wanted, torch.dtype) and torch.promote_types(self.dtype, wanted) == wanted:
            return self._then(lambda logits: logits.to(wanted), dtype=wanted)
        if isinstance(wanted, torch.device) and wanted == self.device:
            return self
        return self.value("to").to(*args, **options)

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, (int, float)):
            return self._then(lambda logits: logits * factor, cap=self.cap.times(factor))
        return self.value("mul") * _value_of(factor, "mul")

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, (int, float)) and divisor:
            return self._then(lambda logits: logits / divisor, cap=self.cap.times(1 / divisor))
        return self.value("div") / _value_of(divisor, "div")

    def tanh(self) -> Any:
        if self.cap.outer is None:
            return self._then(torch.tanh, cap=Cap(self.cap.inner, 1.0))
        return self.value("tanh").tanh()

    def view(self, *shape: Any) -> Any:
        return self._shaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._shaped("reshape", shape)

    def _shaped(self, how: str, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) < 2 or sizes[-1] != self.shape[-1]:
            return getattr(self.value(how), how)(*shape)
        rows = self.rows.reshape(*sizes[:-1], self.rows.shape[-1])
        return self._then(lambda logits: logits.reshape(sizes), rows)

    def __getitem__(self, index: Any) -> Any:
        if not _leaves_last_dimension(index, self.ndim):
            return self.value("getitem")[index]
        return self._then(lambda logits: logits[index], self.rows[index])

    # --- the rest

    def cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Number = 0.0,
    ) -> torch.Tensor:
        """``F.cross_entropy`` of them, by the head's loss where it can."""
        options: dict[str, Any] = {
            "bias": self.head.bias,
            "class_weight": weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "scale": self.cap.inner * (1.0 if self.cap.outer is None else self.cap.outer),
            "softcap": self.cap.outer,
        }
        why = None
        if size_average is not None or reduce is not None or self.ndim != 2 or target.dtype != torch.int64:
            why = "a cross-entropy other than of one class for each token"
        elif self.has_value:
            why = "they are there"
        elif hasattr(self.head.loss, "accepts_call"):
            why = self.head.loss.accepts_call(self.rows, self.head.weight, target, **options)
            self.head.why = self.head.why or why
        if why is None:
            loss = self.head.loss(self.rows, self.head.weight, target, **options)
            self.head.fused = True
            return loss.to(self.dtype)
        logits = self.value(why)
        return F.cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, PendingLogits):
            rest = {name: value for name, value in kwargs.items() if name != "input"}
            if function is F.cross_entropy:
                return first.cross_entropy(*args[1:], **rest)
            if function is torch.tanh and len(args) + len(kwargs) == 1:
                return first.tanh()
        why = getattr(function, "__name__", "a function")
        return function(*_value_of(args, why), **_value_of(kwargs, why))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling ask an object for
            raise AttributeError(name)
        return getattr(self.value(name), name)

    def __repr__(self) -> str:
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: PendingLogits, *args: Any) -> Any:
        return getattr(self.value(name.strip("_")), name)(*_value_of(args, name.strip("_")))

    return operate


for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "neg", "pow", "rpow", "matmul", "rmatmul", "abs", "mod", "floordiv"),
    *("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "invert"),
    *("len", "iter", "bool", "float", "int", "setitem", "array", "contains"),
):
    setattr(PendingLogits, f"__{_name}__", _operator(f"__{_name}__"))
PendingLogits.__hash__ = object.__hash__  # type: ignore[assignment, method-assign]


def _value_of(value: Any, why: str) -> Any:
    """The same with computed logits in the place of pending ones."""
    if isinstance(value, PendingLogits):
        return value.value(why)
    if isinstance(value, (tuple, list)):
        return type(value)([_value_of(item, why) for item in value])
    if isinstance(value, dict):
        return {key: _value_of(item, why) for key, item in value.items()}
    return value


def _leaves_last_dimension(index: Any, dimensions: int) -> bool:
    """Whether an index takes rows as a whole, so that it means the same for what the head is applied to."""
    items = index if isinstance(index, tuple) else (index,)
    if not items or not all(map(_plain, items)):
        return False
    last = items[-1]
    taken = sum(map(_dimensions_of, items))
    closed = last is Ellipsis or not any(item is Ellipsis for item in items)
    if closed and taken < dimensions:
        return True
    return isinstance(last, slice) and last == slice(None)


def _plain(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, (int, slice, torch.Tensor)) and not isinstance(item, bool))


def _dimensions_of(item: Any) -> int:
    """How many dimensions a part of an index stands for; a mask for several."""
    if item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1
