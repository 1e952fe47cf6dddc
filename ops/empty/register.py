"""What ``aten::empty`` is, why it is never registered, and which calls our kernel takes."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import ordinary_memory
from twinkle.aten.layouts import takes_format


def _of(device, size=(2,), dtype=None, layout=None, pin_memory=None, memory_format=None):
    return list(size), dtype, layout, device, pin_memory, memory_format


SPEC = OperatorSpec(
    schema=(
        "empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,"
        " bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.ALLOCATES,
    kernels={"torch": Kernel("kernel.torch_level:empty_torch")},
    conditions=(
        *ordinary_memory(1, _of),
        Condition(
            "size",
            "no size is negative",
            lambda size, *_: all(n >= 0 for n in size),
            lambda device: _of(device, (3, -1)),
        ),
        Condition(
            "format",
            "memory_format is one that a tensor of that rank can have",
            lambda size, *rest: (
                rest[-1] is not torch.preserve_format and takes_format(len(size), rest[-1] or torch.contiguous_format)
            ),
            lambda device: _of(device, (2, 3), memory_format=torch.channels_last),
        ),
    ),
    reference="reference:empty_reference",
    by_design=(
        "it is what every allocation ends in: an empty made by empty_strided would be called by empty_strided itself,"
        " and many operators allocate without calling either"
    ),
)
empty_aten = SPEC.aten
register_a1 = SPEC.register_a1
