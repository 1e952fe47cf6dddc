"""What ``aten::silu`` is, and which calls our kernels take."""

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import dense, floating, rounded, tensor

SPEC = OperatorSpec(
    schema="silu(Tensor self) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.ROUNDS,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:silu_triton",
            (dense(0, "self", lambda t: (t,)), rounded(0, lambda t: (t,))),
        ),
        "torch": Kernel("kernel.torch_level:silu_torch"),
    },
    conditions=(
        *tensor(0, "self", lambda t: (t,)),
        floating(0, lambda t: (t,)),
    ),
    pullback="kernel.torch_level:silu_pullback",
    reference="reference:silu_reference",
    model={"preset": "qwen3"},
)
silu_aten = SPEC.aten
register_a1 = SPEC.register_a1
