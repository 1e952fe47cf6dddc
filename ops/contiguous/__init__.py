"""``aten::contiguous`` by a kernel of its own: ``from ops.contiguous import register_a1``."""

from ops.contiguous.register import SPEC, contiguous_aten, register_a1

__all__ = ["SPEC", "contiguous_aten", "register_a1"]
