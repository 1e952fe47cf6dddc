"""What is timed for an op: classes and functions of transformers with inputs, and the shapes to try.

Inputs are laid out as in a model: queries and keys are ``[batch, positions, heads, channels]`` in memory. Projections
of an MLP are stubs that return a given tensor, so only the activation and the product are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinkle.kernel.ops import triton_support
from twinkle.kernel.targets import Site

Shape = tuple[int, ...]


@dataclass
class Subject:
    """A live module or function of transformers with inputs.

    Attributes:
        module: None for a function.
        args: what it is called with.
        leaves: the tensors that get gradients. Some of Liger's kernels write their gradients over them; times don't
            depend on the values.
        peers: further candidates, called with ``args``.
        kwargs: what an op with an installer gets besides, which says what it is to compute.
        original: of such an op, what transformers' own modules make of ``args``.
        floors: what takes the same arguments but does next to nothing: the least that any candidate can cost.
    """

    module: nn.Module | None
    args: tuple[Any, ...]
    leaves: list[torch.Tensor]
    peers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    floors: dict[str, Callable[..., Any]] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    original: Callable[..., Any] | None = None

    @property
    def call_args(self) -> tuple[Any, ...]:
        """``args``, after the module where there is one."""
        return self.args if self.module is None else (self.module, *self.args)


Make = Callable[[Any, Shape, torch.dtype, torch.device], Subject]


def _random(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype).requires_grad_()


class Nothing(torch.autograd.Function):
    """Launches nothing: its time is what any ``autograd.Function`` costs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0], ctx.saved_tensors[0]


def norm(
    cls: Any, shape: Shape, dtype: torch.dtype, device: torch.device, *, gated: bool = False, peer: bool = True
) -> Subject:
    """An RMSNorm of ``[rows, width]``, with a gate of the same shape where it takes one."""
    module = cls(shape[-1], eps=1e-6).to(device, dtype)
    with torch.no_grad():
        module.weight.add_(torch.randn_like(module.weight), alpha=0.1)
    inputs = tuple(_random(shape, dtype, device) for _ in range(2 if gated else 1))
    if gated or not peer:
        return Subject(module, inputs, [*inputs, module.weight])
    width, weight = (shape[-1],), module.weight
    peers: dict[str, Callable[..., Any]] = {"F.rms_norm": lambda x: F.rms_norm(x, width, weight, 1e-6)}
    floors: dict[str, Callable[..., Any]] = {
        "x * w": lambda x: x * weight,
        "empty Function": lambda x: Nothing.apply(x, weight),
    }
    return Subject(module, inputs, [*inputs, weight], peers, floors)


class Given(nn.Module):
    """Stands for a projection: whatever comes in, the given tensor comes out; without one, what came in."""

    def __init__(self, output: torch.Tensor | None = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.output is None else self.output


def mlp(cls: Any, shape: Shape, dtype: torch.dtype, device: torch.device) -> Subject:
    """The activation and product of a gated MLP on gate and up of ``[rows, width]`` each."""
    family = importlib.import_module(cls.__module__.replace(".modeling_", ".configuration_"))
    config = getattr(family, cls.__name__.removesuffix("MLP") + "Config")(hidden_size=64, intermediate_size=shape[-1])
    module = cls(config)
    if hasattr(module, "gate_up_proj"):
        leaves = [_random((shape[0], 2 * shape[1]), dtype, device)]
        module.gate_up_proj = Given(leaves[0])
    else:
        leaves = [_random(shape, dtype, device) for _ in range(2)]
        module.gate_proj, module.up_proj = map(Given, leaves)
    module.down_proj = Given()
    hidden = torch.zeros(shape[0], 64, device=device, dtype=dtype)
    return Subject(module, (hidden,), leaves)


def rotary(function: Any, shape: Shape, dtype: torch.dtype, device: torch.device, *, part: float = 1.0) -> Subject:
    """Query and key of ``(batch, positions, query heads, key heads, channels)``; ``part`` of the channels rotate."""
    batch, length, heads, key_heads, channels = shape
    leaves = [_random((batch, length, n, channels), dtype, device) for n in (heads, key_heads)]
    angles = torch.randn(1, length, int(channels * part) // 2, device=device).repeat(1, 1, 2)
    q, k = (leaf.transpose(1, 2) for leaf in leaves)
    return Subject(None, (q, k, angles.cos().to(dtype), angles.sin().to(dtype)), leaves)


ONE_BY_ONE = "triton, one by one"
"""What a fused kernel has to beat: the Triton kernels of its parts."""


def qk_norm_rotary(_: Any, shape: Shape, dtype: torch.dtype, device: torch.device) -> Subject:
    """Norms and rotary of ``(batch, positions, query heads, key heads, channels)``, as Qwen3's attention has them."""
    qwen3 = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    batch, length, heads, key_heads, channels = shape
    leaves = [_random((batch, length, n, channels), dtype, device) for n in (heads, key_heads)]
    norms = [norm(qwen3.Qwen3RMSNorm, (1, channels), dtype, device, peer=False).module for _ in leaves]
    weights: Any = [module.weight for module in norms if module is not None]
    angles = torch.randn(1, length, channels // 2, device=device).repeat(1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def one_after_another(norms: Any, rotary: Any, q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> Any:
        q, k = (norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True))
        return rotary(q, k, *rest[2:])

    peers: dict[str, Callable[..., Any]] = {}
    if triton_support.available()[0]:
        ours = [functools.partial(_triton_norm, weight) for weight in weights]
        peers[ONE_BY_ONE] = functools.partial(one_after_another, ours, _triton_rotary(qwen3, device, dtype))
    return Subject(
        None,
        (*leaves, *weights, *tables),
        [*leaves, *weights],
        peers,
        kwargs={"q_eps": 1e-6, "k_eps": 1e-6, "offset": 0.0, "cast": "before", "heads_at": 2},
        original=functools.partial(one_after_another, norms, qwen3.apply_rotary_pos_emb),
    )


def add_rms_norm(_: Any, shape: Shape, dtype: torch.dtype, device: torch.device) -> Subject:
    """A sum and its norm of ``[rows, width]``, as Qwen3's layers have them."""
    qwen3 = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    summands = [_random(shape, dtype, device) for _ in range(2)]
    module: Any = norm(qwen3.Qwen3RMSNorm, shape, dtype, device, peer=False).module

    def one_after_another(norm: Any, residual: torch.Tensor, summand: torch.Tensor, _: torch.Tensor) -> Any:
        total = residual + summand
        return total, norm(total)

    peers: dict[str, Callable[..., Any]] = {}
    if triton_support.available()[0]:
        peers[ONE_BY_ONE] = functools.partial(one_after_another, functools.partial(_triton_norm, module.weight))
    return Subject(
        None,
        (*summands, module.weight),
        [*summands, module.weight],
        peers,
        kwargs={"eps": 1e-6, "offset": 0.0, "cast": "before"},
        original=functools.partial(one_after_another, module),
    )


def _triton_norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from twinkle.kernel.ops.rms_norm.triton import rms_norm

    return rms_norm(x, weight, None, 1e-6, 0.0, "before")


def _triton_rotary(family: Any, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    from twinkle.kernel.ops.rotary import reference, triton

    site = Site(None, "rotary", family, "rotary", family.apply_rotary_pos_emb, device, dtype)
    return triton.load(None, dataclasses.replace(site, variant=reference.probe(site)))


@dataclass(frozen=True)
class Case:
    """One op in one variant.

    Attributes:
        op, variant: for the report.
        target: below ``transformers.models``: the class, method or function that the op replaces; or the logical key of
            an op with an installer.
        make: gives its inputs.
        every_shape: whether all shapes of the op are measured, or only the first.
    """

    op: str
    variant: str
    target: str
    make: Make
    every_shape: bool = False


_gated = functools.partial(norm, gated=True)
_offset = functools.partial(norm, peer=False)  # F.rms_norm knows no 1 + w
_partial = functools.partial(rotary, part=0.5)

CASES = (
    Case("rms_norm", "llama", "qwen3.modeling_qwen3.Qwen3RMSNorm", norm, True),
    Case("rms_norm", "gemma", "gemma.modeling_gemma.GemmaRMSNorm", _offset),
    Case("rms_norm", "olmo2", "olmo2.modeling_olmo2.Olmo2RMSNorm", norm),
    Case("gated_rms_norm", "next", "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated.forward", _gated, True),
    Case("swiglu", "llama", "llama.modeling_llama.LlamaMLP.forward", mlp, True),
    Case("swiglu", "phi3-fused", "phi3.modeling_phi3.Phi3MLP.forward", mlp),
    Case("geglu", "gemma", "gemma.modeling_gemma.GemmaMLP.forward", mlp, True),
    Case("rotary", "llama", "llama.modeling_llama.apply_rotary_pos_emb", rotary, True),
    Case("rotary", "glm4-partial", "glm4.modeling_glm4.apply_rotary_pos_emb", _partial),
    Case("qk_norm_rotary", "qwen3", "fused_qk", qk_norm_rotary, True),
    Case("add_rms_norm", "qwen3", "fused_add_norm", add_rms_norm, True),
)

OPS = tuple(dict.fromkeys(case.op for case in CASES))

DTYPES = (torch.bfloat16, torch.float32)

Shapes = dict[str, tuple[Shape, ...]]
SMALL: Shapes = {
    "rms_norm": ((64, 128),),
    "gated_rms_norm": ((64, 128),),
    "swiglu": ((64, 128),),
    "geglu": ((64, 128),),
    "rotary": ((1, 16, 4, 2, 64),),
    "qk_norm_rotary": ((1, 16, 4, 2, 64),),
    "add_rms_norm": ((64, 128),),
}
"""So small that the host's work is all there is."""

LARGE: dict[str, Shapes] = {
    "accelerator": {
        "rms_norm": ((16384, 4096), (16384, 2048), (131072, 128)),
        "gated_rms_norm": ((131072, 128),),
        "swiglu": ((16384, 12288),),
        "geglu": ((16384, 12288),),
        "rotary": ((4, 4096, 32, 8, 128),),
        "qk_norm_rotary": ((4, 4096, 32, 8, 128), (4, 2048, 16, 8, 128)),
        "add_rms_norm": ((16384, 4096), (8192, 1024)),
    },
    "cpu": {
        "rms_norm": ((2048, 1024), (2048, 3072), (32768, 128)),
        "gated_rms_norm": ((32768, 128),),
        "swiglu": ((2048, 3072),),
        "geglu": ((2048, 3072),),
        "rotary": ((1, 2048, 16, 8, 128), (1, 1024, 14, 2, 64)),
        "qk_norm_rotary": ((1, 2048, 16, 8, 128),),
        "add_rms_norm": ((2048, 1024),),
    },
}

PASSES = {
    "rms_norm": (2, 5),
    "gated_rms_norm": (3, 8),
    "swiglu": (3, 8),
    "geglu": (3, 8),
    "rotary": (2, 4),
    "qk_norm_rotary": (2, 5),
    "add_rms_norm": (4, 8),
}
"""op -> how often a tensor of the input's size has to cross the memory: forward, forward and backward."""


def traffic_mb(op: str, shape: Shape, dtype: torch.dtype, direction: str) -> float:
    """The memory traffic of a case that no implementation can avoid, in MB.

    Args:
        direction: ``f`` or ``fb``.
    """
    if op in ("rotary", "qk_norm_rotary"):
        batch, length, heads, key_heads, channels = shape
        shape = (batch, length, heads + key_heads, channels)
    return math.prod(shape) * dtype.itemsize * PASSES[op][direction == "fb"] / 1e6


@dataclass(frozen=True)
class Item:
    """One line of a run's plan: a case in a shape and dtype; ``small`` when the host's work is what is looked at."""

    case: Case
    shape: Shape
    dtype: torch.dtype
    small: bool = False


def quick_items(ops: Sequence[str]) -> list[Item]:
    """Everything in toy sizes: does it run at all?"""
    return [
        Item(case, shape, dtype, True)
        for dtype in DTYPES
        for case in CASES
        if case.op in ops
        for shape in SMALL[case.op]
    ]


def host_items(ops: Sequence[str]) -> list[Item]:
    """The first variant of each op in its small shape."""
    firsts = {case.op: case for case in reversed(CASES) if case.op in ops}
    return [Item(case, SMALL[case.op][0], DTYPES[0], True) for case in reversed(firsts.values())]


def all_items(ops: Sequence[str], device: torch.device) -> list[Item]:
    """What shows how fast the kernels are on that device, the most wanted first."""
    shapes = LARGE["cpu" if device.type == "cpu" else "accelerator"]
    large = [
        Item(case, shape, dtype)
        for dtype in DTYPES
        for case in CASES
        if case.op in ops
        for shape in (shapes[case.op] if case.every_shape else shapes[case.op][:1])
    ]
    of_first_dtype = sum(item.dtype == DTYPES[0] for item in large)
    return [*large[:of_first_dtype], *host_items(ops), *large[of_first_dtype:]]


def sizes(shape: Shape) -> str:
    """``(64, 128)`` -> ``64x128``."""
    return "x".join(map(str, shape))
