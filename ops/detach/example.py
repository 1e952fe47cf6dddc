"""All three levels of ``detach`` on a device: ``python ops/detach/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
