"""The operators of twinkle-kernel: one package each, over the engine in ``twinkle.aten``."""
