"""``aten::empty_strided`` by a kernel of its own: ``from ops.empty_strided import register_a1``."""

from ops.empty_strided.register import SPEC, empty_strided_aten, register_a1

__all__ = ["SPEC", "empty_strided_aten", "register_a1"]
