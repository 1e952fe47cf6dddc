"""What ``aten::detach`` is, and which calls our kernel takes."""

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import tensor

SPEC = OperatorSpec(
    schema="detach(Tensor(a) self) -> Tensor(a)",
    home=Home.of(__name__, __file__),
    semantics=Semantics.DETACHED,
    kernels={"torch": Kernel("kernel.torch_level:detach_torch")},
    conditions=tensor(0, "self", lambda t: (t,), without=("empty",)),
    reference="reference:detach_reference",
    caution=(
        "until it is closed, no torch.nn.Parameter can be made, so no module be built, copied or moved: build models"
        " first"
    ),
)
detach_aten = SPEC.aten
register_a1 = SPEC.register_a1
