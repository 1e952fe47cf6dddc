"""``aten::_local_scalar_dense`` by a kernel of its own: ``from ops._local_scalar_dense import register_a1``."""

from ops._local_scalar_dense.register import SPEC, _local_scalar_dense_aten, register_a1

__all__ = ["SPEC", "_local_scalar_dense_aten", "register_a1"]
