"""twinkle: the best kernels that the accelerator at hand really has, in place of the slow parts of a PyTorch program.

The model level is `twinkle.kernel`: `kernelize(model)` replaces classes, methods and functions of a transformers model.
The ATen level is `twinkle.aten`: it replaces operators of PyTorch itself. Importing this package imports neither of
them, nor torch.
"""


def __getattr__(name: str) -> str:
    if name == "__version__":
        from twinkle.naming import version_of

        return version_of("twinkle-kernel") or "0+unknown"  # a source tree on sys.path that was never installed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
