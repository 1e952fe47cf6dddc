"""What ``aten::empty`` is, why it is never registered, and which calls our kernel takes."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.layouts import takes_format

_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)


def _of(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return size, dtype, layout, device, pin_memory, memory_format


SPEC = OperatorSpec(
    schema=(
        "empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None,"
        " bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.ALLOCATES,
    kernels={"torch": Kernel("kernel.torch_level:empty_torch")},
    conditions=(
        Condition(
            "layout",
            "layout is strided or left out",
            lambda size, dtype, layout, *_: layout in (None, torch.strided),
            lambda device: _of([2], layout=torch.sparse_coo, device=device),
        ),
        Condition(
            "pinned",
            "the memory isn't to be pinned",
            lambda size, dtype, layout, device, pin_memory, _: not pin_memory,
            lambda device: _of([2], device=device, pin_memory=True),
        ),
        Condition(
            "dtype",
            "dtype is no quantized one",
            lambda size, dtype, *_: dtype not in _QUANTIZED,
            lambda device: _of([2], torch.qint8, device=device),
        ),
        Condition(
            "size",
            "no size is negative",
            lambda size, *_: all(n >= 0 for n in size),
            lambda device: _of([3, -1], device=device),
        ),
        Condition(
            "format",
            "memory_format is one that a tensor of that rank can have",
            lambda size, *rest: (
                rest[-1] is not torch.preserve_format and takes_format(len(size), rest[-1] or torch.contiguous_format)
            ),
            lambda device: _of([2, 3], device=device, memory_format=torch.channels_last),
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
