"""What ``aten::result_type`` is, why it is never registered, and which calls our kernel takes."""

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import READABLE, tensor

_WITHOUT = ("subclass", "lazy-bits", "empty")

SPEC = OperatorSpec(
    schema="result_type.Tensor(Tensor tensor, Tensor other) -> ScalarType",
    home=Home.of(__name__, __file__),
    semantics=Semantics.METADATA,
    kernels={"torch": Kernel("kernel.torch_level:result_type_torch")},
    conditions=(
        *tensor(0, "tensor", lambda t: (t, torch.ones(2, device=t.device)), without=_WITHOUT),
        *tensor(1, "other", lambda t: (torch.ones(2, device=t.device), t), without=_WITHOUT),
        Condition(
            "dtype",
            "both dtypes are among those that PyTorch computes with",
            lambda tensor, other: {tensor.dtype, other.dtype} <= READABLE,
            lambda device: (torch.ones(2, device=device), torch.ones(2, dtype=torch.uint16, device=device)),
        ),
    ),
    reference="reference:result_type_reference",
    by_design=(
        "PyTorch's own operators promote their dtypes in C++ without calling it, so an override would change no result"
    ),
)
result_type_aten = SPEC.aten
register_a1 = SPEC.register_a1
