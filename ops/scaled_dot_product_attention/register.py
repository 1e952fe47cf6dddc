"""What ``aten::scaled_dot_product_attention`` is, which calls our kernels take, and which are worth it."""

import functools

import torch

from twinkle.aten import Condition, Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import FLOATING, beside, multiplied, one_device, tensor
from twinkle.aten.layouts import broadcasts

LONG = 1024
"""As many queries are PyTorch's own: its kernels are faster there."""
WIDEST = 256
HELD = 4
"""So many matrices of scores, in float32 or float64, the gradient holds at once."""
MOST_HELD = 32 * 2**20
"""Bytes of them. PyTorch's own kernels never hold one: with much more, a model whose gradients fitted into memory would
no longer."""


def _ones(device, *shape, **options):
    return torch.ones(shape or (1, 2, 3, 4), device=device, **options)


def _call(query, key=None, value=None, mask=None, dropout=0.0, causal=False, scale=None, gqa=False):
    key = query if key is None else key
    return query, key, key if value is None else value, mask, dropout, causal, scale, gqa


def _shapes_fit(query, key, value, mask, dropout, causal, scale, gqa):
    heads = query.shape[1] % key.shape[1] == 0 if gqa else query.shape[1] == key.shape[1]
    batch = query.shape[0] == key.shape[0] == value.shape[0]
    keys = key.shape[1:3] == value.shape[1:3] and query.shape[3] == key.shape[3]
    return heads and batch and keys and (scale is None or scale > 0)


def _mask_fits(query, key, value, mask, *_):
    if mask is None:
        return True
    known = mask.dtype in (torch.bool, query.dtype) and mask.device == query.device and mask.dim() > 1
    return known and broadcasts(mask.shape, (*query.shape[:3], key.shape[2]))


def _gradient_fits(query, key, value, mask, *_):
    given = [t for t in (query, key, value, mask) if t is not None]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return True
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return HELD * scores * max(query.dtype.itemsize, torch.float32.itemsize) <= MOST_HELD


def _large_gradient(device):
    return _call(_ones(device, 1, 1, LONG - 1, 1).requires_grad_(), _ones(device, 1, 1, MOST_HELD // (HELD * LONG), 1))


def _any_backend(*_):
    """Each of the switches is on, whatever the device; all are at first."""
    of = torch._C
    return (
        of._get_flash_sdp_enabled()
        and of._get_mem_efficient_sdp_enabled()
        and of._get_math_sdp_enabled()
        and of._get_cudnn_sdp_enabled()
    )


def _no_arguments(device):
    raise NotImplementedError("the process has these switches, not a call")


def _qkv(place, tensor):
    """A call with that tensor as query, key or value."""
    others = [_ones(tensor.device) for _ in range(3)]
    others[place] = tensor[None, None] if tensor.layout is torch.strided else tensor
    return _call(*others)


SPEC = OperatorSpec(
    schema=(
        "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,"
        " float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
    home=Home.of(__name__, __file__),
    semantics=Semantics.ROUNDS,
    kernels={
        "triton": Kernel(
            "kernel.triton_level:scaled_dot_product_attention_triton",
            (
                Condition(
                    "width",
                    "a head has at most 256 numbers",
                    lambda query, key, value, *_: max(query.shape[3], value.shape[3]) <= WIDEST,
                    lambda device: _call(_ones(device, 1, 1, 2, WIDEST + 1)),
                ),
                multiplied(0, lambda t: _call(t[None, None])),
            ),
        ),
        "torch": Kernel("kernel.torch_level:scaled_dot_product_attention_torch"),
    },
    conditions=(
        *(
            condition
            for place, name in enumerate(("query", "key", "value"))
            for condition in tensor(place, name, functools.partial(_qkv, place))
        ),
        *tensor(3, "attn_mask", lambda t: _call(beside(t, 1, 2, 3, 4), mask=t), without=("empty",), optional=True),
        Condition(
            "dtype",
            "query, key and value have one dtype: float32, bfloat16, float16 or float64",
            lambda query, key, value, *_: query.dtype == key.dtype == value.dtype and query.dtype in FLOATING,
            lambda device: _call(_ones(device), _ones(device, dtype=torch.bfloat16)),
        ),
        one_device((0, 1, 2), functools.partial(_qkv, 0)),
        Condition(
            "rank",
            "they have four dimensions: batch, heads, length, width",
            lambda query, key, value, *_: query.dim() == key.dim() == value.dim() == 4,
            lambda device: _call(_ones(device, 2, 3, 4)),
        ),
        Condition(
            "shape",
            "batches and heads are equal, or with enable_gqa the query's heads a multiple; a scale is positive",
            _shapes_fit,
            lambda device: _call(_ones(device, 2, 2, 3, 4), _ones(device, 1, 2, 3, 4)),
        ),
        Condition(
            "mask",
            "a mask is of bool or of the query's dtype, has two dimensions at least and can be broadcast to the scores",
            _mask_fits,
            lambda device: _call(_ones(device), mask=_ones(device, 4, 4)),
        ),
        Condition(
            "mask-and-causal",
            "there is no mask where is_causal says what is seen",
            lambda query, key, value, mask, dropout, causal, *_: mask is None or not causal,
            lambda device: _call(_ones(device), mask=_ones(device, 3, 3), causal=True),
        ),
        Condition(
            "dropout",
            "nothing is dropped",
            lambda query, key, value, mask, dropout, *_: dropout == 0,
            lambda device: _call(_ones(device), dropout=0.5),
        ),
        Condition(
            "backend-chosen",
            "PyTorch may choose among its own kernels: no program took that away by torch.nn.attention.sdpa_kernel",
            _any_backend,
            _no_arguments,
            each_time=True,
        ),
    ),
    routing=(
        Condition(
            "long",
            "there are fewer than 1024 queries, or a mask",
            lambda query, key, value, mask, *_: query.shape[2] < LONG or mask is not None,
            lambda device: _call(_ones(device, 1, 1, LONG, 2), _ones(device, 1, 1, 3, 2)),
        ),
        Condition(
            "large-gradient",
            "no gradient is wanted, or it holds at most 32 MiB of scores: in float32, two million of all heads",
            _gradient_fits,
            _large_gradient,
            each_time=True,
        ),
    ),
    pullback="kernel.torch_level:scaled_dot_product_attention_pullback",
    model={"attn_implementation": "sdpa"},
    reference="reference:scaled_dot_product_attention_reference",
)
scaled_dot_product_attention_aten = SPEC.aten
register_a1 = SPEC.register_a1
