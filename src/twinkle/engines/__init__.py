"""Operators of the ATen level inside engines whose processes nobody of ours starts, and what they did there.

Importing this package imports nothing.
"""
