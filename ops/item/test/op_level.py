"""The op level of ``item``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("op", __name__, __file__)
