"""All three levels of ``contiguous`` on a device: ``python ops/contiguous/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
