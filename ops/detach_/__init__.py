"""``aten::detach_`` by a kernel of its own: ``from ops.detach_ import register_a1``."""

from ops.detach_.register import SPEC, detach__aten, register_a1

__all__ = ["SPEC", "detach__aten", "register_a1"]
