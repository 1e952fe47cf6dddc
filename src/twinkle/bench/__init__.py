"""Measuring: what ``twinkle-kernel bench`` and the programs in ``benchmarks/`` share.

Importing the package or ``results`` imports nothing heavy.
"""
