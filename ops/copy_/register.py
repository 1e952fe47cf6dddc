"""What ``aten::copy_`` is, and which calls our kernels take."""

import functools

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import CASTABLE, ROUNDED_CAST, SAME_DTYPE, beside, one_device, tensor
from twinkle.aten.gradients import overwrite
from twinkle.aten.layouts import broadcasts, filled, may_overlap, shares_memory
from twinkle.aten.movements import CAST, MOVEMENTS, STILL, converted_to, movement
from twinkle.aten.routes import Work


def _overlapping(device):
    return torch.zeros(4, device=device).as_strided((3, 2), (1, 1)), torch.ones(3, 2, device=device), False


def _within_itself(device):
    memory = torch.arange(8.0, device=device)
    return memory[:4], memory[4:], False


def _kind(self, src, _):
    found = movement(self.shape, self.stride(), src.expand(self.shape).stride(), self.itemsize)
    return CAST if found in STILL and self.dtype != src.dtype else found


def _sample(movement, elements, device, dtype, cast=False):
    sizes, to_strides, strides = MOVEMENTS[movement](elements)
    return (
        filled(1, sizes, to_strides, dtype, device),
        filled(1, sizes, strides, converted_to(dtype) if cast else dtype, device),
        False,
    )


SPEC = OperatorSpec(
    schema="copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)",
    home=Home.of(__name__, __file__),
    semantics=Semantics.IN_PLACE,
    kernels={
        "triton": Kernel("kernel.triton_level:copy__triton", (CASTABLE, ROUNDED_CAST)),
        "torch": Kernel("kernel.torch_level:copy__torch", (SAME_DTYPE,)),
    },
    conditions=(
        *tensor(0, "self", lambda t: (t, beside(t), False)),
        *tensor(1, "src", lambda t: (torch.zeros(t.shape, dtype=t.dtype, device=t.device), t, False)),
        one_device((0, 1), lambda t: (t, beside(t), False)),
        Condition(
            "shape",
            "src can be broadcast to self",
            lambda self, src, _: self.shape == src.shape or broadcasts(src.shape, self.shape),
            lambda device: (torch.zeros(3, device=device), torch.ones(2, device=device), False),
        ),
        Condition(
            "overlap",
            "no two elements of self share memory, for sure",
            lambda self, src, _: not may_overlap(self.shape, self.stride()),
            _overlapping,
        ),
        Condition(
            "same-memory",
            "self and src have memory of their own",
            lambda self, src, _: not shares_memory(self, src),
            _within_itself,
            each_time=True,
        ),
    ),
    work=Work(
        kind=_kind,
        samples={
            **{name: functools.partial(_sample, name) for name in MOVEMENTS},
            CAST: functools.partial(_sample, "contiguous", cast=True),
        },
    ),
    gradient=overwrite,
    called_within="to, in every conversion, and others that copy on the way",
    reference="reference:copy__reference",
)
copy__aten = SPEC.aten
register_a1 = SPEC.register_a1
