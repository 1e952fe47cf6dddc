"""All three levels of ``type_as`` on a device: ``python ops/type_as/example.py cpu``."""

from twinkle.aten.harness.levels import example

main = example(__name__, __file__)
