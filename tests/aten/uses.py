"""What calls each operator, as a program would: a differentiable function of a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch

USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "copy_": lambda x: (x.new_zeros(x.shape) * 1).copy_(x),
    "contiguous": lambda x: x.transpose(-1, -2).contiguous(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.3),
    "empty_strided": lambda x: x + torch.empty_strided(x.shape, (1, x.shape[0]), device=x.device).zero_(),
}

CALLS = {
    "clone": {"eager": 1, "aot_eager": 1, "inductor": 0},
    "copy_": {"eager": 1, "aot_eager": 2, "inductor": 0},
    "contiguous": {"eager": 1, "aot_eager": 0, "inductor": 0},
    "dropout": {"eager": 1, "aot_eager": 0, "inductor": 0},
    "empty_strided": {"eager": 1, "aot_eager": 2, "inductor": 0},
}
"""Of a compiled call of an operator's use, how many reach the kernel. The code of the backend ``eager`` calls what the
program calls; AOTAutograd takes composite operators apart, and copies to where it can't write in place; inductor writes
code of its own. The documentation has this table."""
