"""All three levels on a device: ``python ops/scaled_dot_product_attention/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
