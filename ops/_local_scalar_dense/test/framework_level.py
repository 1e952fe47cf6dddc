"""The framework level of ``_local_scalar_dense``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("framework", __name__, __file__)
