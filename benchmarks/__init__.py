"""Programs that measure, and in ``results/`` what they measured: one folder per device type, JSON only.

Of models and of parts of them:

- ``python -m benchmarks.ops``: the kernels of each op against what they replace; ``twinkle-kernel bench`` is the same.
- ``python -m benchmarks.host``: what a call costs on the host.
- ``python -m benchmarks.moe``, ``.loss``, ``.attention``: a block of experts, head and cross-entropy, attention under
  masks.
- ``python -m benchmarks.step``: a whole training step, each candidate in a process of its own.
- ``python -m benchmarks.distributed``: the cookbook's step on several devices.
- ``python -m benchmarks.training``: whether a kernelized model trains as the original does.
- ``python -m benchmarks.kernelize``: the cost of ``import twinkle.kernel``, of ``kernelize`` and of a counted call.

Of ATen operators:

- ``python -m benchmarks.aten``: by their own kernels, by PyTorch's and by FlagGems.
- ``python -m benchmarks.sweep``: what installing them costs, over dtypes, sizes and layouts.
- ``python -m benchmarks.aten_model``: under a whole model.

What the kernels' own tables say of a machine is found by ``tune`` (launch configurations), ``tune_copies`` (tiles of
copies) and ``routes`` (the sizes from which on ATen operators' kernels serve).

Each takes ``--json FILE`` and prints a table. From a source tree without an installation: ``PYTHONPATH=src``. All files
have the layout of :mod:`twinkle.bench.results`. From the files:

- ``python -m benchmarks.verdict FILE``: on which devices the ``torch`` backends are worth their row.
- ``python -m benchmarks.render``: the figures of the documentation.
"""
