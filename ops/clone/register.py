"""What ``aten::clone`` is, and which calls our kernel takes."""

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import tensor
from twinkle.aten.gradients import identity
from twinkle.aten.movements import MOVEMENTS, results_in_order

SPEC = OperatorSpec(
    schema="clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.PURE,
    kernels={
        "triton": Kernel("kernel.triton_level:clone_triton"),
        "torch": Kernel("kernel.torch_level:clone_torch"),
    },
    conditions=tensor(0, "self", lambda t: (t, None)),
    work=results_in_order(MOVEMENTS),
    gradient=identity,
    reference="reference:clone_reference",
)
clone_aten = SPEC.aten
register_a1 = SPEC.register_a1
