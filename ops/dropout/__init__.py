"""``aten::dropout`` by a kernel of its own: ``from ops.dropout import register_a1``."""

from ops.dropout.register import SPEC, dropout_aten, register_a1

__all__ = ["SPEC", "dropout_aten", "register_a1"]
