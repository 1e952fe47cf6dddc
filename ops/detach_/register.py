"""What ``aten::detach_`` is, why it is never registered, and which calls our kernel takes."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import tensor

SPEC = OperatorSpec(
    schema="detach_(Tensor(a!) self) -> Tensor(a!)",
    home=Home.of(__name__, __file__),
    semantics=Semantics.IN_PLACE | Semantics.DETACHED,
    kernels={"torch": Kernel("kernel.torch_level:detach__torch")},
    conditions=(
        *tensor(0, "self", lambda t: (t,), without=("lazy-bits", "empty")),
        Condition(
            "history",
            "self requires no gradient and is no view: there is nothing to cut",
            lambda self: not (self.requires_grad or self._is_view()),
            lambda device: (torch.ones(3, device=device, requires_grad=True) * 2,),
            each_time=True,
        ),
    ),
    reference="reference:detach__reference",
    by_design=(
        "cutting a tensor's history in place is done by autograd itself, which never calls a backend's kernel for it"
    ),
)
detach__aten = SPEC.aten
register_a1 = SPEC.register_a1
