"""The ``npu`` backend of ``rotary`` and ``multimodal_rotary``: ``npu_rotary_mul``, forward and backward.

The gradient of a rotation is the rotation back: the same function with the partner's sine, negated. So of a call only
the tables are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.gradients import saved_tensors
from twinkle.kernel.ops import npu_support
from twinkle.kernel.ops.npu_support import call_reason, npu_function
from twinkle.kernel.ops.rotary.multimodal_reference import MultimodalRotaryVariant, recombine
from twinkle.kernel.ops.rotary.reference import Dialect, RotaryVariant, function_of, turn_part

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

available = functools.partial(npu_support.available, {"npu_rotary_mul": ("rotary_mode",)})

WIDEST = 896
"""Heads have fewer channels than this."""
MOST = 1000
"""Batch and heads are fewer than this each; as a product where pairs are neighbours."""

_MODES = {"half": "half", "interleaved": "interleave"}


class _Rotation(torch.autograd.Function):
    """Turns ``x``, of 4 dimensions, by tables ``cos`` and ``sin`` that spread over it; ``mode`` says what is a pair."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mode = mode
        return npu_function("npu_rotary_mul")(x, cos, sin, rotary_mode=mode)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        cos, sin = saved_tensors(ctx, "rotary by npu")
        if ctx.mode == "half":
            a, b = sin.chunk(2, dim=-1)
            back = torch.cat((-b, -a), dim=-1)
        else:
            back = torch.stack((-sin[..., 1::2], -sin[..., 0::2]), dim=-1).flatten(-2)
        return _Rotation.apply(grad, cos, back, ctx.mode), None, None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """All channels of ``x [..., R]`` turned by prepared tables, in the dtype that the dialect computes in."""
    dtype = torch.float32 if dialect.compute == "fp32" else torch.promote_types(x.dtype, cos.dtype)
    x = x.to(dtype)
    if dialect.output == "halves":
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    tensors = x, cos.to(dtype), sin.to(dtype)
    flat = x.dim() == 3  # the vision towers', without a batch
    turned = _Rotation.apply(*(t[None] if flat else t for t in tensors), _mode(dialect))
    return turned[0] if flat else turned  # type: ignore[no-any-return]


def _spread(table: torch.Tensor, unsqueeze_dim: int, x: torch.Tensor) -> torch.Tensor:
    """A table with as many dimensions as what it turns; new ones in front, as broadcasting has it."""
    table = table.unsqueeze(unsqueeze_dim)
    return table[(None,) * (x.dim() - table.dim())] if table.dim() < x.dim() else table


def _mode(dialect: Dialect) -> str:
    return _MODES["half" if dialect.output == "halves" else dialect.pairing]


def _table(table: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """One value per channel."""
    if dialect.table == "full":
        return table
    values = table[..., : table.shape[-1] // 2] if dialect.table == "first_half" else table
    if _mode(dialect) == "half":
        return torch.cat((values, values), dim=-1)
    return values.repeat_interleave(2, dim=-1)


def load(target: Any, site: Site) -> Callable[..., Any]:
    """A function with the original's signature."""
    variant: RotaryVariant = site.variant
    dialect = variant.dialect

    def kernel(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        cos, sin = (_table(_spread(table, unsqueeze_dim, tensors[0]), dialect) for table in (cos, sin))
        return tuple([turn_part(_turned, tensor, cos, sin, dialect) for tensor in tensors])

    def reason(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        cos, sin = (_spread(table, unsqueeze_dim, tensors[0]) for table in (cos, sin))
        return _reason(tensors, cos, sin, dialect)

    return function_of(variant, kernel, reason, "npu_rotary")


def load_multimodal(target: Any, site: Site) -> Callable[..., Any]:
    """The function of older versions of transformers, which puts the tables together itself."""
    variant: MultimodalRotaryVariant = site.variant
    dialect = variant.dialect

    def npu_multimodal_rotary(q, k, cos, sin, mrope_section, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        cos, sin = (recombine(table, mrope_section).unsqueeze(unsqueeze_dim) for table in (cos, sin))
        return tuple([turn_part(_turned, tensor, cos, sin, dialect) for tensor in (q, k)])

    def accepts_call(q, k, cos, sin, mrope_section, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return _reason((q, k), cos[0].unsqueeze(unsqueeze_dim), sin[0].unsqueeze(unsqueeze_dim), dialect)

    npu_multimodal_rotary.accepts_call = accepts_call  # type: ignore[attr-defined]
    return npu_multimodal_rotary


def _reason(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, dialect: Dialect) -> str | None:
    """Why a call can't be served; the tables have as many dimensions as the tensors already."""
    why = call_reason(*tensors, cos, sin, one_dtype=False)
    if why is not None:
        return why
    if cos.requires_grad or sin.requires_grad:
        return "cos or sin needs a gradient"
    if cos.shape != sin.shape:
        return "cos and sin differ in shape"
    for x in tensors:
        why = _shape_reason(x, cos, dialect)
        if why is not None:
            return why
    return None


def _shape_reason(x: torch.Tensor, cos: torch.Tensor, dialect: Dialect) -> str | None:
    """As the function's documentation has it: 4 dimensions, tables that spread over the heads and perhaps the batch."""
    if x.dim() not in (3, 4) or cos.dim() != x.dim():
        return "torch_npu rotates tensors of 3 or 4 dimensions"
    batch, one, two, channels = (1, *x.shape) if x.dim() == 3 else x.shape
    table_batch, table_one, table_two, width = (1, *cos.shape) if x.dim() == 3 else cos.shape
    if (table_one, table_two) == (1, two):
        heads = one
    elif (table_one, table_two) == (one, 1):
        heads = two
    else:
        return "cos and sin don't spread over the heads"
    if dialect.table == "half_width":
        width *= 2
    if width % 2 or width > channels or width >= WIDEST:
        return "cos and sin are wider than the head, or not of an even number of channels below 896"
    if _mode(dialect) == "interleave":
        if table_batch != 1:
            return "torch_npu turns neighbouring channels by one table for the whole batch only"
        return None if batch * heads < MOST else "batch times heads is 1000 or more"
    if table_batch not in (1, batch):
        return "cos and sin have another batch than the input"
    return None if max(batch, heads) < MOST else "a batch or a number of heads of 1000 or more"
