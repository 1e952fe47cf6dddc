"""All three levels of ``empty_like`` on a device: ``python ops/empty_like/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
