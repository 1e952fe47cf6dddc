"""What ``aten::empty_strided`` is, and which calls our kernel takes."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.layouts import span


def _fits(size, stride, *_):
    if len(size) != len(stride) or any(n < 0 for n in (*size, *stride)):
        return False
    return span(size, stride) <= 2**48


SPEC = OperatorSpec(
    schema=(
        "empty_strided(SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, Layout? layout=None,"
        " Device? device=None, bool? pin_memory=None) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.ALLOCATES,
    kernels={"torch": Kernel("kernel.torch_level:empty_strided_torch")},
    conditions=(
        Condition(
            "layout",
            "layout is strided or left out",
            lambda size, stride, dtype, layout, *_: layout in (None, torch.strided),
            lambda device: ([2], [1], None, torch.sparse_coo, device, None),
        ),
        Condition(
            "pinned",
            "the memory isn't to be pinned",
            lambda *arguments: not arguments[-1],
            lambda device: ([2], [1], None, None, device, True),
        ),
        Condition(
            "dtype",
            "dtype is no quantized one",
            lambda size, stride, dtype, *_: dtype not in (torch.qint8, torch.quint8, torch.qint32),
            lambda device: ([2], [1], torch.qint8, None, device, None),
        ),
        Condition(
            "size",
            "sizes and strides are as many, none is negative, and the memory can be counted",
            _fits,
            lambda device: ([3], [-1], None, None, device, None),
        ),
    ),
    reference="reference:empty_strided_reference",
)
empty_strided_aten = SPEC.aten
register_a1 = SPEC.register_a1
