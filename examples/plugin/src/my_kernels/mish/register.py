"""What ``aten::mish`` is, and which calls our kernels take."""

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import floating, tensor

SPEC = OperatorSpec(
    schema="mish(Tensor self) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.ROUNDS,
    kernels={"torch": Kernel("kernel.torch_level:mish_torch")},
    conditions=(
        *tensor(0, "self", lambda t: (t,)),
        floating(0, lambda t: (t,)),
    ),
    pullback="kernel.torch_level:mish_pullback",
    reference="reference:mish_reference",
)
mish_aten = SPEC.aten
register_a1 = SPEC.register_a1
