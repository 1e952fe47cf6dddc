"""``aten::clone`` by a kernel of its own: ``from ops.clone import register_a1``."""

from ops.clone.register import SPEC, clone_aten, register_a1

__all__ = ["SPEC", "clone_aten", "register_a1"]
