"""``aten::result_type`` by a kernel of its own: ``from ops.result_type import register_a1``."""

from ops.result_type.register import SPEC, register_a1, result_type_aten

__all__ = ["SPEC", "result_type_aten", "register_a1"]
