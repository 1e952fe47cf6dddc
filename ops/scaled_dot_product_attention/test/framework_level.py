"""The framework level of ``scaled_dot_product_attention``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("framework", __name__, __file__)
