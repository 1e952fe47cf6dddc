"""``aten::empty_like`` by a kernel of its own: ``from ops.empty_like import register_a1``."""

from ops.empty_like.register import SPEC, empty_like_aten, register_a1

__all__ = ["SPEC", "empty_like_aten", "register_a1"]
