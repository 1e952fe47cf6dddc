"""``aten::silu`` by a kernel of its own: ``from ops.silu import register_a1``."""

from ops.silu.register import SPEC, register_a1, silu_aten

__all__ = ["SPEC", "silu_aten", "register_a1"]
