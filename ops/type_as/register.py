"""What ``aten::type_as`` is, and which calls our kernels take."""

import functools

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import CASTABLE, beside, one_device, rounded, tensor
from twinkle.aten.gradients import conversion
from twinkle.aten.layouts import filled
from twinkle.aten.movements import CAST, MOVEMENTS, STILL, converted_to, movement_of_result
from twinkle.aten.routes import Work


def _size(self, other):
    return self.numel() * other.itemsize


def _kind(self, other):
    found = movement_of_result(self, None)
    return CAST if found in STILL else found


def _sample(movement, elements, device, dtype):
    """To a tensor of that dtype."""
    sizes, _, strides = MOVEMENTS[movement](elements)
    return filled(1, sizes, strides, converted_to(dtype), device), torch.ones(1, dtype=dtype, device=device)


SPEC = OperatorSpec(
    schema="type_as(Tensor self, Tensor other) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.MAY_ALIAS,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:type_as_triton", (CASTABLE, rounded(1, lambda t: (beside(t, dtype=torch.float32), t)))
        ),
        "torch": Kernel("kernel.torch_level:type_as_torch"),
    },
    conditions=(
        *tensor(0, "self", lambda t: (t, torch.ones(3, dtype=torch.float64, device=t.device))),
        *tensor(1, "other", lambda t: (torch.ones(3, dtype=torch.int16, device=t.device), t), without=("empty",)),
        one_device((0, 1), lambda t: (t, beside(t, dtype=torch.bfloat16))),
        Condition(
            "nothing-to-do",
            "the dtypes differ; a tensor that has it already is returned itself",
            lambda self, other: self.dtype != other.dtype,
            lambda device: (torch.ones(3, device=device), torch.ones(2, device=device)),
        ),
    ),
    work=Work(
        _size,
        _kind,
        samples={
            CAST: functools.partial(_sample, "contiguous"),
            # A transposed tensor keeps its order; what has gaps or is read more than once gets another one.
            **{name: functools.partial(_sample, name) for name in ("gaps", "broadcast")},
        },
    ),
    gradient=conversion,
    differentiable=(0,),
    reference="reference:type_as_reference",
    model={"preset": "gemma3", "dtype": "bfloat16"},
)
type_as_aten = SPEC.aten
register_a1 = SPEC.register_a1
