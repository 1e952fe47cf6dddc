"""What ``aten::contiguous`` is, and which calls our kernels take."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import tensor
from twinkle.aten.gradients import identity
from twinkle.aten.movements import MOVEMENTS, STILL, results_in_order

SPEC = OperatorSpec(
    schema="contiguous(Tensor(a) self, *, MemoryFormat memory_format=0) -> Tensor(a)",
    home=Home.of(__name__, __file__),
    semantics=Semantics.MAY_ALIAS,
    kernels={
        "triton": Kernel("kernel.triton_level:contiguous_triton"),
        "torch": Kernel("kernel.torch_level:contiguous_torch"),
    },
    conditions=(
        *tensor(0, "self", lambda t: (t, torch.contiguous_format)),
        Condition(
            "format",
            "memory_format is contiguous_format",
            lambda self, memory_format: memory_format is torch.contiguous_format,
            lambda device: (torch.ones(2, 3, 4, 5, device=device), torch.channels_last),
        ),
        Condition(
            "nothing-to-do",
            "self isn't contiguous; one that is is returned itself",
            lambda self, _: not self.is_contiguous(),
            lambda device: (torch.ones(3, 4, device=device), torch.contiguous_format),
        ),
    ),
    work=results_in_order([kind for kind in MOVEMENTS if kind not in STILL]),  # of which it returns self
    gradient=identity,
    reference="reference:contiguous_reference",
)
contiguous_aten = SPEC.aten
register_a1 = SPEC.register_a1
