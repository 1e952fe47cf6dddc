"""All three levels of ``item`` on a device: ``python ops/item/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
