"""``torch`` backend of ``rotary``: half the original's passes over the tensor, and nothing of it saved.

``out = x cos`` first, then each channel's partner times its signed sine is added in place. The gradient is the rotation
back, so only cos and sin are kept. Inputs are never written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from twinkle.gradients import saved_tensors
from twinkle.kernel.ops.rotary.reference import Dialect, function_of, turn_part
from twinkle.kernel.ops.torch_support import not_faster, transformed
from twinkle.kernel.ops.worthwhile import slower_for
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site


def accepts(site: Site) -> Reason | None:
    """None, or why the original stays."""
    if site.variant.dialect.output == "halves":
        return Reason("dialect", "it reads pairs of neighbours and writes halves, which would take a further pass here")
    return not_faster("rotary", site)


def load(target: Any, site: Site) -> Callable[..., Any]:
    """A function with the original's signature."""
    dialect: Dialect = site.variant.dialect
    slower = slower_for("rotary", "torch")

    def kernel(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        tables = _tables(cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), dialect)
        if torch.is_grad_enabled():
            return _Rotation.apply(dialect, *tables, *tensors)
        return tuple([turn_part(_turned, t, *tables, dialect, False) for t in tensors])

    def reason(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        why = "cos or sin needs a gradient" if cos.requires_grad or sin.requires_grad else transformed()
        return why or slower(tensors[0])

    return function_of(site.variant, kernel, reason, "torch_rotary")


class _Rotation(torch.autograd.Function):
    """Rotates any number of tensors by the same angles."""

    @staticmethod
    def forward(ctx: Any, dialect: Dialect, cos: torch.Tensor, signed_sin: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, signed_sin)
        ctx.dialect = dialect
        return tuple([turn_part(_turned, t, cos, signed_sin, dialect, False) for t in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        cos, signed_sin = saved_tensors(ctx, "rotary by torch")
        results = [
            turn_part(_turned, g, cos, signed_sin, ctx.dialect, True) if needed else None
            for g, needed in zip(gradients, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *results


def _tables(cos: torch.Tensor, sin: torch.Tensor, dialect: Dialect) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and what the partner of each channel is multiplied with: both ``[..., R]``, in the dialect's dtype."""
    if dialect.compute == "fp32" and cos.element_size() < 4:
        cos, sin = cos.float(), sin.float()
    if dialect.table == "full":
        a, b = _pairs(sin, dialect)
        return cos, _joined(-a, b, dialect)
    if dialect.table == "first_half":
        cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    return _joined(cos, cos, dialect), _joined(-sin, sin, dialect)


def _turned(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, dialect: Dialect, back: bool) -> torch.Tensor:
    """``x cos + partner(x) signed_sin``; back: ``x cos + partner(x signed_sin)``, the gradient of that."""
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    (a, b), (sin_a, sin_b) = _pairs(x, dialect), _pairs(signed_sin, dialect)
    out = x * cos
    # A CPU reads half rows of 16-bit numbers at a quarter of the speed of whole ones, and every other number like that.
    if dialect.pairing == "half" and (x.element_size() >= 4 or x.device.type != "cpu"):
        out_a, out_b = _pairs(out, dialect)
        out_a.addcmul_(b, sin_b if back else sin_a)
        out_b.addcmul_(a, sin_a if back else sin_b)
        return out
    return out.addcmul_(_joined(b, a, dialect), _joined(sin_b, sin_a, dialect) if back else signed_sin)


def _pairs(x: torch.Tensor, dialect: Dialect) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second channel of every pair."""
    if dialect.pairing == "half":
        half = x.shape[-1] // 2  # autograd doesn't let the views of chunk() be written to
        return x[..., :half], x[..., half:]
    return x[..., 0::2], x[..., 1::2]


def _joined(a: torch.Tensor, b: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """The tensor whose pairs are ``(a, b)``."""
    return torch.cat((a, b), dim=-1) if dialect.pairing == "half" else torch.stack((a, b), dim=-1).flatten(-2)
