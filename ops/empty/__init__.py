"""``aten::empty`` by a kernel of its own: ``from ops.empty import register_a1``."""

from ops.empty.register import SPEC, empty_aten, register_a1

__all__ = ["SPEC", "empty_aten", "register_a1"]
