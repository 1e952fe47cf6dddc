"""The ``torch`` backend of ``sdpa_attention``: PyTorch's fused functions, by transformers' rules.

``F.scaled_dot_product_attention``, or flex attention where that was measured faster. Unlike transformers' own function
it adds a graded mask as it is on an Ascend NPU too, where theirs makes it boolean, and a row without any key is the
mean of all values, as in eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from twinkle.kernel.ops.sdpa_attention.inputs import Inputs, call_reason, function_of, repeated, with_means
from twinkle.kernel.ops.sdpa_attention.masks import filled

WIDEST = 256
"""Up to this many channels the fused kernels of PyTorch share heads of keys themselves."""


def fused(given: Inputs, dropout: float) -> torch.Tensor:
    """``[B, N, Sq, Dv]`` by ``F.scaled_dot_product_attention``."""
    query, key, value, groups = given.query, given.key, given.value, given.groups
    mask, empty = filled(given)
    options = {}
    # With a mask PyTorch would take the unfused path for shared heads.
    if groups > 1 and mask is None and key.shape[-1] == value.shape[-1] <= WIDEST:
        options["enable_gqa"] = True  # the condition itself may be a compiler's symbol, or a trace's tensor
    else:
        key, value = repeated(key, groups), repeated(value, groups)
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout, given.causal, scale=given.scale, **options)
    return with_means(out, empty, given)


def load(target: Any) -> Callable[..., Any]:
    """A function with the signature of transformers'."""
    from twinkle.kernel.ops.sdpa_attention import flex

    return attention_by(flex.pays)


def attention_by(takes_flex: Callable[[Inputs, float], bool]) -> Callable[..., Any]:
    """The function with the signature of transformers'.

    Args:
        takes_flex: whether flex attention computes a call, of its inputs and the share that is dropped.
    """
    from twinkle.kernel.ops.sdpa_attention import flex

    def attend(given: Inputs, dropout: float) -> torch.Tensor:
        out = flex.attention(given) if takes_flex(given, dropout) else None
        return fused(given, dropout) if out is None else out

    return function_of(attend, call_reason, "torch_attention")  # type: ignore[no-any-return]
