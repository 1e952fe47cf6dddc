"""All three levels of ``empty`` on a device: ``python ops/empty/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
