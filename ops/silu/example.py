"""All three levels of ``silu`` on a device: ``python ops/silu/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
