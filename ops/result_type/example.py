"""All three levels of ``result_type`` on a device: ``python ops/result_type/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
