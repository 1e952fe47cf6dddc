"""The framework level of ``detach``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("framework", __name__, __file__)
