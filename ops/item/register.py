"""What ``aten::item`` is, and which calls our kernel takes."""

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import ONE_NUMBER

SPEC = OperatorSpec(
    schema="item(Tensor self) -> Scalar",
    home=Home.of(__name__, __file__),
    semantics=Semantics.HOST_READ,
    kernels={"torch": Kernel("kernel.torch_level:item_torch")},
    conditions=ONE_NUMBER,
    reference="reference:item_reference",
)
item_aten = SPEC.aten
register_a1 = SPEC.register_a1
