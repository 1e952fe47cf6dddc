"""``twinkle-kernel demo``: a small training, with and without kernels, side by side.

``command`` leads two processes through it (``processes``, ``worker``), so that neither's memory or caches are the
other's: one trains the original, one the kernelized model, step by step in turn. ``training`` is the model, the batches
and the step, ``text`` where the bytes come from. ``outcome`` is what came out and whether it is as it must be; it is
printed by ``terminal`` and written as one HTML file by ``page`` and ``plot``.
"""
