"""Logits that nobody has computed yet: what a head returns while its model computes a loss.

Most models do little with their logits before the loss: cast, scale, cap, shift and flatten them. Those steps are
written down, and cross-entropy of the result is computed from the head's input. Whatever else is asked of the logits is
answered by computing them, in just the steps that the model took. From then on there is nothing to put off: everything
that was made of them is a tensor, and what is views of one another stays so.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from twinkle.kernel.ops.causal_lm_loss.lost_gradients import GRADIENTS, LEAVE_OUT, check_no_function
from twinkle.kernel.ops.causal_lm_loss.written_down import Cap, leaves_last_dimension

Step = Callable[[torch.Tensor], torch.Tensor]
Number = float  # where float is a method


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
        device = x.device.type
        self._autocast: dict[str, Any] = {"device_type": device, "enabled": torch.is_autocast_enabled(device)}
        if self._autocast["enabled"]:
            self._autocast["dtype"] = torch.get_autocast_dtype(device)
        self._made: list[Callable[[], PendingLogits | None]] = []
        self._versions = None if is_compiling() or x.is_inference() else (x._version, weight._version)

    def pending(self) -> PendingLogits:
        """What stands for the logits."""
        dtype = self._autocast.get("dtype", self.x.dtype)
        return PendingLogits(self, self.x, Cap(), dtype, lambda x: F.linear(x, self.weight, self.bias))

    def made(self, pending: PendingLogits) -> None:
        """Takes note of what was made of the logits. A compiler throws away by itself what nobody uses any more."""
        self._made.append((lambda: pending) if is_compiling() else weakref.ref(pending))

    def compute(self, why: str) -> None:
        """Computes the logits and all that was made of them and still exists, before anybody can write to them.

        It is done as the head was called: somebody may only want to look at them, without gradients.
        """
        self.why = self.why or f"the model needs its logits: {why}"
        self._check_unchanged()
        made, self._made = self._made, []
        gradients = torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad()
        with gradients, torch.autocast(**self._autocast):
            for reference in made:
                pending = reference()
                if pending is not None:
                    pending.settle()

    def compute_loss(self, rows: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        """Cross-entropy, without logits.

        Raises:
            ValueError, IndexError: for options and targets that cross-entropy itself has something to say about.
        """
        self._check_unchanged()
        with torch.autocast(**self._autocast):
            loss: torch.Tensor = self.loss(rows, self.weight, target, **options)
        self.fused = True
        return loss

    def why_not(self, rows: torch.Tensor, target: torch.Tensor, **options: Any) -> str | None:
        """Why the loss can't be computed so."""
        if not hasattr(self.loss, "accepts_call"):
            return None
        with torch.autocast(**self._autocast):
            why: str | None = self.loss.accepts_call(rows, self.weight, target, **options)
        return why

    def check_has_gradient(self, why: str) -> None:
        """The loss went past the logits: of its gradient nothing would be seen there, and nothing done to it count."""
        text = f"the logits' gradient is asked for ({why}) after their loss was computed without them"
        if self.fused:
            raise RuntimeError(f"{text}; {LEAVE_OUT}")

    def _check_unchanged(self) -> None:
        if self._versions is not None and self._versions != (self.x._version, self.weight._version):
            raise RuntimeError(
                f"the head's input or weight was changed in place before its logits were needed; {LEAVE_OUT}"
            )


class PendingLogits:
    """In the place of a tensor ``[..., V]``, which it isn't an instance of.

    Args:
        head: where it comes from.
        rows: ``[..., H]``, what the head would be applied to: the rows of its input that are left.
        cap: what was done to the numbers.
        dtype: of the logits.
        step, before: what makes the logits from those that it was made of, or from the rows.
    """

    def __init__(
        self,
        head: Head,
        rows: torch.Tensor,
        cap: Cap,
        dtype: torch.dtype,
        step: Step,
        before: PendingLogits | None = None,
    ) -> None:
        self.head, self.rows, self.cap, self.dtype, self._step, self._before = head, rows, cap, dtype, step, before
        self._value: torch.Tensor | None = None
        head.made(self)

    def value(self, why: str) -> torch.Tensor:
        """The logits themselves; they are computed now, if nobody has needed them before.

        Raises:
            RuntimeError: in an ``autograd.Function``, which doesn't know that it was handed tensors with a history.
        """
        if not torch.is_grad_enabled() and not is_compiling():
            check_no_function()
        if self._value is None:
            self.head.compute(why)
        return self.settle()

    def settle(self) -> torch.Tensor:
        """Computes them, and what they are made of."""
        if self._value is None:
            self._value = self._step(self.rows if self._before is None else self._before.settle())
            self._before = None
        return self._value

    @property
    def has_value(self) -> bool:
        """Whether somebody has needed them."""
        return self._value is not None

    # --- what they look like

    __array_priority__ = 1000  # as tensors have it: numpy's numbers leave it to them what to compute

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
        parts = (self.rows, self.head.weight, self.head.bias)
        return any(part is not None and part.requires_grad for part in parts)

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
        if self.has_value or not torch.is_grad_enabled():
            return step(self.value("without gradients"))
        return PendingLogits(
            self.head,
            self.rows if rows is None else rows,
            self.cap if cap is None else cap,
            self.dtype if dtype is None else dtype,
            step,
            self,
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
        if not leaves_last_dimension(index, self.ndim):
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
        outer = self.cap.outer
        options: dict[str, Any] = {
            "bias": self.head.bias,
            "class_weight": weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "scale": self.cap.inner * (1.0 if outer is None else outer),
            "softcap": outer,
        }
        if size_average is not None or reduce is not None or self.ndim != 2 or target.dtype != torch.int64:
            why: str | None = "a cross-entropy other than of one class for each token"
        elif outer is not None and not outer > 0:
            why = "a cap that isn't positive"
        elif self.has_value:
            why = "they are there"
        else:
            why = self.head.why_not(self.rows, target, **options)
            self.head.why = self.head.why or why
        if why is None:
            try:
                loss = self.head.compute_loss(self.rows, target, **options)
                return loss if torch.is_autocast_enabled(self.device.type) else loss.to(self.dtype)
            except (ValueError, IndexError) as error:  # the original knows best what to say of it
                why = str(error)
        logits = self.value(why)
        return F.cross_entropy(logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = getattr(function, "__name__", "a function")
        for pending in args[1] if function is torch.autograd.grad else ():
            if isinstance(pending, PendingLogits):
                pending.head.check_has_gradient("autograd.grad")
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, PendingLogits):
            rest = {name: value for name, value in kwargs.items() if name != "input"}
            if function is F.cross_entropy:
                return first.cross_entropy(*args[1:], **rest)
            if function is torch.tanh and len(args) + len(kwargs) == 1:
                return first.tanh()
            if why in GRADIENTS:
                first.head.check_has_gradient(why)
        return function(*_value_of(args, why), **_value_of(kwargs, why))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling ask an object for
            raise AttributeError(name)
        if name in GRADIENTS:
            self.head.check_has_gradient(name)
        return getattr(self.value(name), name)

    def __repr__(self) -> str:
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: PendingLogits, *args: Any) -> Any:
        return getattr(self.value(name.strip("_")), name)(*_value_of(args, name.strip("_")))

    return operate


for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "neg", "pos", "pow", "rpow", "matmul", "rmatmul", "abs"),
    *("mod", "rmod", "floordiv", "rfloordiv", "and", "rand", "or", "ror", "xor", "rxor", "invert"),
    # Of these there are other names, or views, which must see what is written.
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem"),
    *("lt", "le", "gt", "ge", "eq", "ne", "contains", "len", "iter", "reversed"),
    *("bool", "float", "int", "index", "complex", "array", "deepcopy", "reduce_ex"),
):
    setattr(PendingLogits, f"__{_name}__", _operator(f"__{_name}__"))
PendingLogits.__hash__ = object.__hash__  # type: ignore[assignment, method-assign]


def _value_of(value: Any, why: str) -> Any:
    """The same with computed logits in the place of pending ones."""
    if isinstance(value, PendingLogits):
        return value.value(why)
    if isinstance(value, (tuple, list)):
        items = [_value_of(item, why) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _value_of(item, why) for key, item in value.items()}
    return value
