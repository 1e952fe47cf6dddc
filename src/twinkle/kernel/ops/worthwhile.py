"""For which inputs a kernel is slower than what it replaces: rules made from measurements.

Such a call goes to the original, counted with the reason. That is no statement about what a kernel can do, so
verification and benchmarks look away from it, see :func:`every_size`. Under a compiler the costs are others, and sizes
may be symbols: no rule holds there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from twinkle.naming import dtype_name


class Least(NamedTuple):
    """How many elements the input needs; with ``in_training``, only where gradients are recorded."""

    elements: int
    in_training: bool = False


# benchmarks/results hold a small and a large size of each; most bounds lie between, where no break-even was measured.
# CPU: the torch backends' autograd functions cost more than they save on small inputs; a sweep on two cores, no file of
# which is kept, had norms and rotary break even between 2**15 and 2**17 elements. H200: of a small call the host's work
# is all there is; at 2**13 elements a product in training takes 7 % longer than PyTorch's own nodes, and the torch
# backend's rotary 20 % longer in a forward. 2**18 and 2**23 are estimates of where the original's memory traffic begins
# to show, and takes as long as the host.
LEAST: dict[tuple[str, str], dict[str, Least]] = {
    ("rms_norm", "torch"): {"cpu": Least(2**17)},
    ("gated_rms_norm", "torch"): {"cpu": Least(2**17)},
    ("rotary", "torch"): {"cpu": Least(2**17), "cuda": Least(2**23)},
    ("swiglu", "triton"): {"cuda": Least(2**18, in_training=True)},
    ("geglu", "triton"): {"cuda": Least(2**18, in_training=True)},
}
"""(op, backend) -> device type -> rule."""

SLOW_DTYPES: dict[tuple[str, str], dict[str, tuple[torch.dtype, ...]]] = {
    # H200: without the matrix units 8192 tokens of 128 experts took 31 ms, by cuBLAS 22.
    ("moe_experts", "triton"): {"cuda": (torch.float32,)},
}
"""(op, backend) -> device type -> dtypes in which the original is always faster."""

_every_size = False


def slower_for(op: str, backend: str) -> Callable[[torch.Tensor], str | None]:
    """A function of a call's first input that says why the original is faster; None where the kernel is."""
    rules, dtypes = LEAST.get((op, backend), {}), SLOW_DTYPES.get((op, backend), {})

    def slower(x: torch.Tensor) -> str | None:
        kind = x.device.type
        if _every_size or is_compiling():
            return None
        if x.dtype in dtypes.get(kind, ()):
            return f"in {dtype_name(x.dtype)}, for which the original is faster"
        least = rules.get(kind)
        if least is None or x.numel() >= least.elements:
            return None
        if least.in_training and not torch.is_grad_enabled():
            return None
        return f"fewer than {least.elements} elements, for which the original is faster"

    return slower


@contextlib.contextmanager
def every_size() -> Iterator[None]:
    """Within it no rule holds, in the whole process: to find out whether kernels work, or how fast."""
    global _every_size
    before, _every_size = _every_size, True
    try:
        yield
    finally:
        _every_size = before
