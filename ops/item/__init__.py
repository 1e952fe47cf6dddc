"""``aten::item`` by a kernel of its own: ``from ops.item import register_a1``."""

from ops.item.register import SPEC, item_aten, register_a1

__all__ = ["SPEC", "item_aten", "register_a1"]
