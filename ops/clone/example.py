"""All three levels of ``clone`` on a device: ``python ops/clone/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
