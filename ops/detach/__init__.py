"""``aten::detach`` by a kernel of its own: ``from ops.detach import register_a1``."""

from ops.detach.register import SPEC, detach_aten, register_a1

__all__ = ["SPEC", "detach_aten", "register_a1"]
