"""The kernel level of ``result_type``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("kernel", __name__, __file__)
