"""All three levels of ``embedding`` on a device: ``python ops/embedding/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
