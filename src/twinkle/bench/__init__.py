"""Measuring: what ``twinkle-kernel bench`` and the programs in ``benchmarks/`` share.

- ``results``: the one layout of all result files.
- ``clocks``: timing on a CPU and on accelerators, interleaved rounds, what the machine can do at best.
- ``cases``: classes and functions of transformers with inputs, and the shapes to try.
- ``ops``: the kernels of each op against what they replace; ``view``: its tables.
- ``aten``: ATen operators by their own kernels and by PyTorch's; ``routes``: from which size they are faster.
- ``step``: a training step as it is timed, its memory and its loss.
- ``model``: what each entry of the default mapping is worth for a model; ``worth``: what its figures decide;
  ``model_view``: its table.

Importing the package or ``results`` imports nothing heavy.
"""
