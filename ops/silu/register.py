"""What ``aten::silu`` is, and which calls our kernels take."""

import torch

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import dense, floating, rounded, tensor


def _bfloat16(device):
    return (torch.ones(3, 4, dtype=torch.bfloat16, device=device),)


SPEC = OperatorSpec(
    schema="silu(Tensor self) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.ROUNDS,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:silu_triton",
            (dense(0, "self", lambda t: (t,)), rounded(lambda self: self.dtype, _bfloat16)),
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
