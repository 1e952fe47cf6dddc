"""The op level of ``detach``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("op", __name__, __file__)
