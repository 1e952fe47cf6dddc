"""All three levels of ``_local_scalar_dense`` on a device: ``python ops/_local_scalar_dense/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
