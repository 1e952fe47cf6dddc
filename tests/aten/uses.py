"""What calls each operator, as a program would: a differentiable function of a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _attend(x: torch.Tensor) -> torch.Tensor:
    x = x[None, None]
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "_local_scalar_dense": lambda x: x * torch.ops.aten._local_scalar_dense(x.new_full((), 3.0)),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(-1, -2).contiguous(),
    "copy_": lambda x: (x.new_zeros(x.shape) * 1).copy_(x),
    "detach": lambda x: x * x.detach(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.3),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([[0, 2], [1, 2]], device=x.device), x),
    "empty_like": lambda x: x + torch.empty_like(x).zero_(),
    "empty_strided": lambda x: x + torch.empty_strided(x.shape, (1, x.shape[0]), device=x.device).zero_(),
    "item": lambda x: x * x.new_full((), 3.0).item(),
    "scaled_dot_product_attention": _attend,
    "silu": lambda x: torch.nn.functional.silu(x),
    "type_as": lambda x: x.bfloat16().type_as(x),
}

CALLS: dict[str, dict[str, int | None]] = {
    "_local_scalar_dense": {"eager": 1, "aot_eager": 1, "inductor": 1},
    "clone": {"eager": 1, "aot_eager": 1, "inductor": 0},
    "contiguous": {"eager": 1, "aot_eager": 0, "inductor": 0},
    "copy_": {"eager": 1, "aot_eager": 2, "inductor": 0},
    "detach": {"eager": None, "aot_eager": None, "inductor": None},
    "dropout": {"eager": 1, "aot_eager": 0, "inductor": 0},
    "embedding": {"eager": 1, "aot_eager": 1, "inductor": 0},
    "empty_like": {"eager": 1, "aot_eager": 1, "inductor": 0},
    "empty_strided": {"eager": 1, "aot_eager": 2, "inductor": 0},
    "item": {"eager": 1, "aot_eager": 1, "inductor": 1},
    "scaled_dot_product_attention": {"eager": 1, "aot_eager": 0, "inductor": 0},
    "silu": {"eager": 1, "aot_eager": 1, "inductor": 0},
    "type_as": {"eager": 1, "aot_eager": 0, "inductor": 0},
}
"""Of a compiled call of an operator's use, how many reach the kernel; None where compiling fails, as it does, with fake
tensors that are new to PyTorch, while ``detach`` is registered. Code of the backend ``eager`` calls what the program
calls; AOTAutograd takes composite operators apart, and copies to where it can't write in place; inductor writes code of
its own. What is read on the host is read between two graphs. The documentation has this table."""
