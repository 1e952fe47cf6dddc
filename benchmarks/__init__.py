"""Programs that measure, and in ``results/`` what they measured: one folder per device type, JSON only.

- ``python -m benchmarks.ops``: the kernels of each op against what they replace.
- ``python -m benchmarks.kernelize``: the cost of ``import twinkle.kernel``, of ``kernelize`` and of a counted call.

Each takes ``--json FILE`` and prints a table. From a source tree without an installation: ``PYTHONPATH=src``.
"""
