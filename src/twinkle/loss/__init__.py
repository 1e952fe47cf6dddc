"""Losses that never hold all logits at once.

from twinkle.loss import linear_cross_entropy

loss = linear_cross_entropy(hidden_states, lm_head.weight, labels)
"""

from twinkle.loss.linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
