"""What the functions of ``torch_npu`` compute, on the CPU, and what the chip refuses as far as that is published.

Statistics, activations and sums are in fp32 and the result is rounded once; where the chip rounds otherwise is not
published. What the chip leaves undefined is NaN here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Refused(RuntimeError):
    """The chip doesn't take the call."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Refused(text)


def one_dtype(*tensors: torch.Tensor) -> None:
    require(tensors[0].dtype in DTYPES, f"dtype {tensors[0].dtype}")
    require(len({tensor.dtype for tensor in tensors}) == 1, f"dtypes {[str(tensor.dtype) for tensor in tensors]}")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().float()


# --- norms ------------------------------------------------------------------------------------------------------------


def rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm(self, gamma, epsilon, 0.0)


def gemma_rms_norm(self: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    require(self.is_contiguous(), "npu_gemma_rms_norm of an input that isn't contiguous")
    return _norm(self, gamma, epsilon, 1.0)


def _norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    one_dtype(x, gamma)
    require(2 <= x.dim() <= 8, f"{x.dim()} dimensions")
    require(x.shape[x.dim() - gamma.dim() :] == gamma.shape, "gamma's shape isn't that of the input's last dimensions")
    rstd = torch.rsqrt(wide(x).square().mean(_last(gamma), keepdim=True) + epsilon)
    return (wide(x) * rstd * (wide(gamma) + offset)).to(x.dtype), rstd


def _last(gamma: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


def rms_norm_backward(
    dy: torch.Tensor, self: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    one_dtype(dy, self, gamma)
    require(rstd.dtype == torch.float32, f"rstd of {rstd.dtype}")
    h, scaled = wide(self) * wide(rstd), wide(dy) * wide(gamma)
    mean = (h * scaled).mean(_last(gamma), keepdim=True)
    dgamma = (wide(dy) * h).sum(tuple(range(self.dim() - gamma.dim())))
    return ((scaled - h * mean) * wide(rstd)).to(self.dtype), dgamma


# --- gated products ---------------------------------------------------------------------------------------------------


def swiglu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    a, b = _halves(self, dim)
    return (F.silu(a) * b).to(self.dtype)


def swiglu_backward(grad_output: torch.Tensor, self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    one_dtype(grad_output, self)
    a, b = _halves(self, dim)
    grad = wide(grad_output)
    return torch.cat((torch.ops.aten.silu_backward(grad * b, a), grad * F.silu(a)), dim).to(self.dtype)


def _halves(x: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    one_dtype(x)
    require(1 <= x.dim() <= 8 and x.shape[dim] % 2 == 0, f"shape {tuple(x.shape)}")
    return wide(x).chunk(2, dim)


APPROXIMATE = ("none", "tanh")


def geglu(
    self: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _halves(self, dim)
    gate, up = (a, b) if activate_left else (b, a)
    gelu = F.gelu(gate, approximate=APPROXIMATE[approximate])
    return (gelu * up).to(self.dtype), gelu.to(self.dtype)


def geglu_grad(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    gelu: torch.Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> torch.Tensor:
    one_dtype(grad_output, self, gelu)
    a, b = _halves(self, dim)
    gate, up = (a, b) if activate_left else (b, a)
    dgate = torch.ops.aten.gelu_backward(wide(grad_output) * up, gate, approximate=APPROXIMATE[approximate])
    dup = wide(grad_output) * wide(gelu)
    return torch.cat((dgate, dup) if activate_left else (dup, dgate), dim).to(self.dtype)


# --- rotation ---------------------------------------------------------------------------------------------------------


def rotary_mul(
    self: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    one_dtype(self, r1, r2)
    require(rotary_mode in ("half", "interleave") and rotate is None, f"rotary_mode {rotary_mode}")
    require(self.dim() == r1.dim() == 4 and r1.shape == r2.shape, "4 dimensions, and two tables of one shape")
    d = self.shape[-1]
    require(d % 2 == 0 and d < 896 and r1.shape[-1] == d, f"head of {d} channels, tables of {r1.shape[-1]}")
    require(_is_layout(self.shape, r1.shape, rotary_mode), f"{tuple(self.shape)} with tables {tuple(r1.shape)}")
    x = wide(self)
    if rotary_mode == "half":
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x * wide(r1) + turned * wide(r2)).to(self.dtype)


def _is_layout(x: Sequence[int], table: Sequence[int], mode: str) -> bool:
    """BNSD, BSND or SBND, by where the tables' heads' dimension of size 1 is."""
    for batch, heads, length in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        if table[length] != x[length]:
            continue
        whole = table[batch] == x[batch] and table[heads] == x[heads]
        spread = table[batch] in (1, x[batch]) and table[heads] == 1
        if mode == "interleave":
            if table[batch] == table[heads] == 1 and x[batch] * x[heads] < 1000:
                return True
        elif (whole or spread) and x[batch] < 1000 and x[heads] < 1000:
            return True
    return False


# --- experts ----------------------------------------------------------------------------------------------------------


def moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    require(
        tokens.dtype == torch.bfloat16 and tokens.dim() == 2, f"tokens of {tokens.dtype}, {tokens.dim()} dimensions"
    )
    require(indices.dtype in (torch.int64, torch.int32), f"indices of {indices.dtype}")
    require(indices.numel() < 16777215 and indices.dim() == 2 and indices.shape[1] <= 512, f"{tuple(indices.shape)}")
    require(num_out_tokens is None and not padded_mode, "dropping and padding aren't simulated")
    order = indices.cpu().flatten().argsort(stable=True)
    return tokens.cpu()[order // indices.shape[1]], order.argsort().int()


def moe_token_permute_grad(
    tokens: torch.Tensor,
    grad_permuted_tokens: torch.Tensor,
    indices: torch.Tensor,
    sorted_indices: torch.Tensor,
    padded_mode: bool = False,
) -> torch.Tensor:
    one_dtype(tokens, grad_permuted_tokens)
    chosen = wide(grad_permuted_tokens)[sorted_indices.cpu().long()]
    return chosen.view(*indices.shape, -1).sum(1).to(tokens.dtype)


def moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    assert probs is not None and not padded_mode and restore_shape is None, "isn't simulated"
    one_dtype(permuted_tokens, probs)
    require(sorted_indices.dtype == torch.int32, f"sorted_indices of {sorted_indices.dtype}")
    chosen = wide(permuted_tokens)[sorted_indices.cpu().long()].view(*probs.shape, -1)
    return (chosen * wide(probs)[..., None]).sum(1).to(permuted_tokens.dtype)


def moe_token_unpermute_grad(
    permuted_tokens: torch.Tensor,
    grad_unpermuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert probs is not None and not padded_mode and restore_shape is None, "isn't simulated"
    one_dtype(permuted_tokens, grad_unpermuted_tokens, probs)
    places, grad = sorted_indices.cpu().long(), wide(grad_unpermuted_tokens)
    drows = torch.empty(permuted_tokens.shape)
    drows[places] = (grad[:, None] * wide(probs)[..., None]).flatten(0, 1)
    chosen = wide(permuted_tokens)[places].view(*probs.shape, -1)
    return drows.to(permuted_tokens.dtype), (chosen * grad[:, None]).sum(-1).to(probs.dtype)


def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **others: Any,
) -> list[torch.Tensor]:
    assert len(x) == len(weight) == 1 and not any(others.values()), "isn't simulated"
    (a,), (b,) = x, weight
    one_dtype(a, b)
    require(split_item in (2, 3) and group_list_type in (0, 1), f"split_item {split_item}, type {group_list_type}")
    require(group_list is not None and group_list.dtype == torch.int64 and group_list.dim() == 1, "group_list")
    assert group_list is not None
    counts = group_list.tolist()
    if group_list_type == 0:
        counts = [end - start for start, end in zip([0, *counts], counts, strict=False)]
    require(len(counts) > 1 and min(counts) >= 0, f"group_list {counts}")
    require(a.dim() == 2 and max(*a.shape[-1:], *b.shape[-1:]) < 65536, f"{tuple(a.shape)} times {tuple(b.shape)}")
    rows = [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
    if group_type == 2:  # groups of what is summed over
        require(a.t().is_contiguous() and b.is_contiguous(), "x isn't the transpose of rows")
        products = [wide(a)[:, one] @ wide(b)[one] for one in rows]
        # Whether the product of no rows is written at all isn't published.
        undefined = torch.full_like(products[0], float("nan"))
        written = [product if count else undefined for product, count in zip(products, counts, strict=True)]
        return [torch.stack(written).to(a.dtype)]
    require(group_type == 0 and b.dim() == 3 and len(b) == len(counts), f"group_type {group_type}")
    require(a.is_contiguous() and b.is_contiguous(), "a tensor that isn't contiguous")
    require(b.shape[1] == a.shape[1], f"{tuple(a.shape)} times {tuple(b.shape)}")
    result = torch.full((len(a), b.shape[2]), float("nan"))
    for one, matrix in zip(rows, wide(b), strict=True):
        result[one] = wide(a)[one] @ matrix
    return [result.to(a.dtype)]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_gemma_rms_norm": gemma_rms_norm,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_geglu": geglu,
    "npu_geglu_grad": geglu_grad,
    "npu_rotary_mul": rotary_mul,
    "npu_moe_token_permute": moe_token_permute,
    "npu_moe_token_permute_grad": moe_token_permute_grad,
    "npu_moe_token_unpermute": moe_token_unpermute,
    "npu_moe_token_unpermute_grad": moe_token_unpermute_grad,
    "npu_grouped_matmul": grouped_matmul,
}
