"""The op level of ``clone``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("op", __name__, __file__)
