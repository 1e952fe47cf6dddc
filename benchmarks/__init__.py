"""Programs that measure, and in ``results/`` what they measured: one folder per device type, JSON only.

- ``python -m benchmarks.ops``: the kernels of each op against what they replace; ``twinkle-kernel bench`` is the same.
- ``python -m benchmarks.host``: what a call costs on the host.
- ``python -m benchmarks.step``: a whole training step, each candidate in a process of its own.
- ``python -m benchmarks.aten``: ATen operators by their own kernels, by PyTorch's and by FlagGems.
- ``python -m benchmarks.kernelize``: the cost of ``import twinkle.kernel``, of ``kernelize`` and of a counted call.
- ``python -m benchmarks.tune``: the launch configurations of the Triton kernels.

Each takes ``--json FILE`` and prints a table. From a source tree without an installation: ``PYTHONPATH=src``. All files
but the tuner's have the layout of :mod:`twinkle.bench.results`. From the files:

- ``python -m benchmarks.verdict FILE``: on which devices the ``torch`` backends are worth their row.
- ``python -m benchmarks.render``: the figures of the documentation.
"""
