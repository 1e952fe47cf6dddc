"""``aten::copy_`` by a kernel of its own: ``from ops.copy_ import register_a1``."""

from ops.copy_.register import SPEC, copy__aten, register_a1

__all__ = ["SPEC", "copy__aten", "register_a1"]
