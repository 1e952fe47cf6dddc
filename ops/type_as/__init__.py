"""``aten::type_as`` by a kernel of its own: ``from ops.type_as import register_a1``."""

from ops.type_as.register import SPEC, register_a1, type_as_aten

__all__ = ["SPEC", "type_as_aten", "register_a1"]
