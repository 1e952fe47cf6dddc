"""All three levels of ``copy_`` on a device: ``python ops/copy_/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
