"""What ``aten::empty_strided`` is, and which calls our kernel takes."""

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import ordinary_memory
from twinkle.aten.layouts import span


def _of(device, size=(2,), stride=(1,), dtype=None, layout=None, pin_memory=None):
    return list(size), list(stride), dtype, layout, device, pin_memory


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
        *ordinary_memory(2, _of),
        Condition(
            "size",
            "sizes and strides are as many, none is negative, and the memory can be counted",
            _fits,
            lambda device: _of(device, (3,), (-1,)),
        ),
    ),
    reference="reference:empty_strided_reference",
)
empty_strided_aten = SPEC.aten
register_a1 = SPEC.register_a1
