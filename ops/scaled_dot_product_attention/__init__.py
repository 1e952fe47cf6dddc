"""``aten::scaled_dot_product_attention`` by a kernel of its own; ``register_a1`` puts it in PyTorch's place."""

from ops.scaled_dot_product_attention.register import SPEC, register_a1, scaled_dot_product_attention_aten

__all__ = ["SPEC", "scaled_dot_product_attention_aten", "register_a1"]
