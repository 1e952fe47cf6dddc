"""All three levels of ``detach_`` on a device: ``python ops/detach_/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
