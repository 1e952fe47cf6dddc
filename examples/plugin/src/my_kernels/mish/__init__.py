"""``aten::mish`` by a kernel of its own: ``from my_kernels.mish import register_a1``."""

from my_kernels.mish.register import SPEC, mish_aten, register_a1

__all__ = ["SPEC", "mish_aten", "register_a1"]
