"""``aten::embedding`` by a kernel of its own: ``from ops.embedding import register_a1``."""

from ops.embedding.register import SPEC, embedding_aten, register_a1

__all__ = ["SPEC", "embedding_aten", "register_a1"]
