"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and how to recognise its dialects.

A pair of channels ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``. Models differ in which channels make a pair,
in how the table of cosines is laid out, in what part of the head rotates, and in where they round.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.probe import agree, probed, random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

REPLACES = "function"


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The maths of a rotary function.

    Attributes:
        pairing: ``half`` pairs channel i with i + R/2, ``interleaved`` pairs 2i with 2i + 1.
        table: the last dimension of cos and sin: ``full`` holds one value per channel; ``first_half`` holds one per
            channel, of which the first half is read, one per pair; ``half_width`` holds one per pair.
        part: which channels rotate when the table is narrower than the head.
        output: ``paired`` as the input; ``halves``: pairs are read interleaved and written half by half.
        compute: ``promoted`` to the wider of input and table, or ``fp32``.
        restores: whether the result is cast to the input's dtype; without it, it is in the computed dtype.
    """

    pairing: Literal["half", "interleaved"] = "half"
    table: Literal["full", "first_half", "half_width"] = "full"
    part: Literal["leading", "trailing"] = "leading"
    output: Literal["paired", "halves"] = "paired"
    compute: Literal["promoted", "fp32"] = "promoted"
    restores: bool = False


DIALECTS = (
    Dialect(),  # Llama, Mistral, Qwen, Gemma, …
    Dialect(restores=True),  # OLMo 2 and 3
    Dialect(compute="fp32", restores=True),  # the vision towers of Qwen
    Dialect(table="half_width"),  # gpt-oss
    Dialect("interleaved", "first_half"),  # GLM, GLM-4
    Dialect("interleaved", "first_half", compute="fp32", restores=True),  # ERNIE 4.5
    Dialect("interleaved", "full", compute="fp32", restores=True),  # Cohere 2
    Dialect("interleaved", "first_half", output="halves"),  # DeepSeek-V3
    Dialect("interleaved", "half_width", "trailing", compute="fp32", restores=True),  # DeepSeek-V4
)


@dataclasses.dataclass(frozen=True)
class RotaryVariant:
    """What a rotary function computes, and how it is called.

    Attributes:
        dialect: the maths.
        partial: whether channels beyond the table's width pass through.
        parameters: the original's parameter names, in order; a trailing ``unsqueeze_dim`` says where cos and sin get
            the heads' dimension, without one it is the last but one.
    """

    dialect: Dialect
    partial: bool
    parameters: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """How many tensors a call rotates: 2 (query and key) or 1."""
        return self.parameters.index("cos")


SIGNATURES: tuple[tuple[str, ...], ...] = (
    ("q", "k", "cos", "sin", "unsqueeze_dim"),
    ("q", "k", "cos", "sin"),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"),
    ("x", "cos", "sin", "unsqueeze_dim"),
)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dialect: Dialect, compute_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rotates the channels of ``x``.

    Args:
        x: ``[..., D]``.
        cos, sin: broadcast against ``x`` but for the last dimension, which is the table's (see :class:`Dialect`).
        dialect: the maths.
        compute_dtype: instead of the dialect's own; nothing is rounded to a narrower dtype then.

    Returns:
        ``x``'s shape and the dialect's dtype.
    """
    if dialect.table == "first_half":
        cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    if dialect.table != "full":
        spread = _double if _pairing(dialect) == "half" else _repeat
        cos, sin = spread(cos), spread(sin)
    return turn_part(_turned, x, cos, sin, dialect, compute_dtype)


def turn_part(
    turn: Callable[..., torch.Tensor],
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dialect: Dialect,
    *further: Any,
) -> torch.Tensor:
    """Turns those channels of ``x`` that rotate and passes on the others.

    Args:
        turn: ``turn(channels, cos, sin, dialect, *further)`` -> the channels turned, in any dtype.
        x: ``[..., D]``.
        cos, sin: tables as ``turn`` wants them, ``[..., R]``: R channels rotate, at the end that the dialect says.

    Returns:
        ``x``'s shape; the dtype that ``turn`` gives, or ``x``'s where the dialect restores it.
    """
    width, whole = cos.shape[-1], x.shape[-1]
    start = whole - width if dialect.part == "trailing" else 0
    # A view of all of it would be the same, and costs time on the host.
    turned = turn(x if width == whole else x[..., start : start + width], cos, sin, dialect, *further)
    if dialect.restores:
        turned = turned.to(x.dtype)
    return turned if width == whole else torch.cat((x[..., :start], turned, x[..., start + width :]), dim=-1)


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dialect: Dialect, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    if dialect.compute == "fp32" or compute_dtype is not None:
        dtype = compute_dtype or torch.float32
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    if dialect.output == "halves":
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return x * cos + _quarter_turn(x, _pairing(dialect)) * sin


def _pairing(dialect: Dialect) -> str:
    """Of what is written, see ``Dialect.output``."""
    return "half" if dialect.output == "halves" else dialect.pairing


def _double(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table, table), dim=-1)


def _repeat(table: torch.Tensor) -> torch.Tensor:
    return table.repeat_interleave(2, dim=-1)


def _quarter_turn(x: torch.Tensor, pairing: str) -> torch.Tensor:
    """Each pair ``(a, b)`` as ``(-b, a)``."""
    if pairing == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def function_of(
    variant: RotaryVariant, kernel: Callable[..., Any], reason: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """What a backend loads: a kernel and its ``accepts_call``, both called as the original is.

    Args:
        variant: says with which signature.
        kernel: see :func:`with_signature`.
        reason: ``reason(tensors, cos, sin, unsqueeze_dim)`` -> why the kernel can't serve the call, or None.
        name: the function's ``__name__``.
    """
    function = with_signature(variant, kernel, name)
    function.accepts_call = _called_alike(variant, reason, f"{name}_accepts")  # type: ignore[attr-defined]
    return function


def with_signature(variant: RotaryVariant, kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that is called as the original is.

    Args:
        variant: says with which signature.
        kernel: ``kernel(tensors, cos, sin, unsqueeze_dim)`` -> one result per tensor of the tuple ``tensors``.
        name: the function's ``__name__``.
    """
    if variant.tensors > 1:
        return _called_alike(variant, kernel, name)

    def function(x, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return kernel((x,), cos, sin, unsqueeze_dim)[0]

    function.__name__ = function.__qualname__ = name
    return function


def _called_alike(variant: RotaryVariant, call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``call(tensors, cos, sin, unsqueeze_dim)`` as a function with the original's signature and ``call``'s result."""
    function: Callable[..., Any]
    if variant.tensors == 1:

        def function(x, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def,no-redef]
            return call((x,), cos, sin, unsqueeze_dim)

    elif "position_ids" in variant.parameters:

        def function(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):  # type: ignore[no-untyped-def,no-redef]
            return call((q, k), cos, sin, unsqueeze_dim)

    elif "unsqueeze_dim" in variant.parameters:

        def function(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def,no-redef]
            return call((q, k), cos, sin, unsqueeze_dim)

    else:

        def function(q, k, cos, sin):  # type: ignore[no-untyped-def,no-redef]
            return call((q, k), cos, sin, -2)

    function.__name__ = function.__qualname__ = name
    return function


def parameters_of(function: Any) -> tuple[str, ...]:
    """Parameter names in order. A function that HF kernels turned into a module has them on its class's ``forward``."""
    forward = type(function).forward if isinstance(function, nn.Module) else function
    names = tuple(inspect.signature(forward).parameters)
    return names[1:] if isinstance(function, nn.Module) else names


HEAD = 16


@probed("rotary")
def probe(site: Site) -> RotaryVariant | Reason:
    """Calls the function on small inputs and compares it with every dialect."""
    parameters = parameters_of(site.original)
    parameters = ("x", *parameters[1:]) if parameters[1:2] == ("cos",) else parameters
    parameters = ("q", "k", *parameters[2:]) if parameters[2:3] == ("cos",) else parameters
    if parameters not in SIGNATURES:
        return Reason("signature", f"{site.name}({', '.join(parameters)}) is no rotary signature that is known")
    for dialect in DIALECTS:
        variant = RotaryVariant(dialect, False, parameters)
        if _matches(site, variant, HEAD):
            return dataclasses.replace(variant, partial=_matches(site, variant, HEAD // 2))
    return Reason("not-this-op", f"{site.name} computes none of the known rotary dialects")


def _matches(site: Site, variant: RotaryVariant, width: int) -> bool:
    for args, kwargs in _calls(variant, width):
        try:
            results = site.original(*(a.clone() for a in args), **kwargs)
        except RuntimeError:  # shapes that this dialect's table has and the function's hasn't
            return False
        expected = build(variant)(*args, **kwargs)
        if variant.tensors == 1:
            results, expected = (results,), (expected,)
        if not all(agree(r, e, mismatches=0.02) for r, e in zip(results, expected, strict=True)):
            return False
    return True


def _calls(variant: RotaryVariant, width: int) -> Iterator[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    """The calls that a probe makes: all dtypes, either layout, and positions, which a kernel will not look at."""
    yield _inputs(variant, HEAD, width, torch.float32, torch.float32), {}
    args = _inputs(variant, HEAD, width, torch.bfloat16, torch.bfloat16)
    if "unsqueeze_dim" not in variant.parameters:
        yield args, {}
    else:
        *tensors, cos, sin = args
        yield (*(t.transpose(1, 2) for t in tensors), cos, sin), {"unsqueeze_dim": 2}
    positions = {"position_ids": torch.arange(4, -1, -1)[None]} if "position_ids" in variant.parameters else {}
    yield _inputs(variant, HEAD, width, torch.bfloat16, torch.float32), positions


def _inputs(
    variant: RotaryVariant, head: int, width: int, dtype: torch.dtype, table_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """A call's positional arguments: ``[B, H, S, D]`` and tables ``[B, S, width]``; without B where none unsqueezes.

    The query has four heads, the key two.
    """
    table = width // 2 if variant.dialect.table == "half_width" else width
    batched = "unsqueeze_dim" in variant.parameters
    shapes = [(2, heads, 5, head) if batched else (5, heads, head) for heads in (4, 2)[: variant.tensors]]
    table_shape = (2, 5, table) if batched else (5, table)
    tensors = [random_tensor(*shape, dtype=dtype, seed=40 + i) for i, shape in enumerate(shapes)]
    tables = [random_tensor(*table_shape, dtype=table_dtype, seed=50 + i) for i in range(2)]
    return (*tensors, *tables)


def build(variant: RotaryVariant, compute_dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """The maths as a function with the original's signature."""

    def kernel(tensors: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(rotate(t, cos, sin, variant.dialect, compute_dtype) for t in tensors)

    return with_signature(variant, kernel, "reference_rotary")


def example(site: Site, variant: RotaryVariant) -> Example:
    """Heads of 64 channels; cos and sin as models make them, each pair's value twice."""
    args = _inputs(variant, 64, 64, torch.float32, torch.float32)
    *tensors, cos, sin = args
    angles = random_tensor(*cos.shape[:-1], 32, seed=60)
    if variant.dialect.table != "half_width":
        interleaved = variant.dialect.pairing == "interleaved" and variant.dialect.output == "paired"
        angles = _repeat(angles) if interleaved and variant.dialect.table == "full" else _double(angles)
    return Example(None, (*tensors, angles.cos(), angles.sin()), fixed=(variant.tensors, variant.tensors + 1))
