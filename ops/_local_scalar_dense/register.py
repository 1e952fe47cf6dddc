"""What ``aten::_local_scalar_dense`` is, and which calls our kernel takes."""

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import ONE_NUMBER

SPEC = OperatorSpec(
    schema="_local_scalar_dense(Tensor self) -> Scalar",
    home=Home.of(__name__, __file__),
    semantics=Semantics.HOST_READ,
    kernels={"torch": Kernel("kernel.torch_level:_local_scalar_dense_torch")},
    conditions=ONE_NUMBER,
    reference="reference:_local_scalar_dense_reference",
)
_local_scalar_dense_aten = SPEC.aten
register_a1 = SPEC.register_a1
