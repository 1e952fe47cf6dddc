"""The op level of ``_local_scalar_dense``: ``run(profile)``."""

from twinkle.aten.harness.levels import level

run = level("op", __name__, __file__)
