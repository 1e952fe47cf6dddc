"""The kernel level of ``_local_scalar_dense``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("kernel", __name__, __file__)
