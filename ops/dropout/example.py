"""All three levels of ``dropout`` on a device: ``python ops/dropout/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
