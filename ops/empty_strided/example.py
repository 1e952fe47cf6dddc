"""All three levels of ``empty_strided`` on a device: ``python ops/empty_strided/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
