"""Gated MLPs: ``down(activation(gate(x)) * up(x))``, and how to recognise them.

The projections are called as modules, never read for their weights: they may be quantised, clipped or carry LoRA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from twinkle.kernel.ops.derived import Example, layer
from twinkle.kernel.probe import WIDTH, agree, probed, random_tensor, stand_in, uneven
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}

PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
)
"""The names of the children: gate, up and down; or gate and up in one (gate first), and down."""


@dataclasses.dataclass(frozen=True)
class GluVariant:
    """What a gated MLP computes.

    Attributes:
        activation: a key of :data:`ACTIVATIONS`.
        projections: the children's names, one of :data:`PROJECTIONS`.
    """

    activation: str
    projections: tuple[str, ...]


GateUp = Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def gate_up_of(variant: GluVariant) -> GateUp:
    """``(module, x) -> (gate, up)``, each ``[..., I]``; for a fused projection two views of one ``[..., 2 I]``."""
    if len(variant.projections) == 2:
        fused = variant.projections[0]

        def split(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            gate, up = getattr(module, fused)(x).chunk(2, dim=-1)
            return gate, up

        return split
    gate_name, up_name, _ = variant.projections
    return lambda module, x: (getattr(module, gate_name)(x), getattr(module, up_name)(x))


def glu_layer(
    name: str, variant: GluVariant, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], **options: Any
) -> type[nn.Module]:
    """The layer class of a gated MLP from a function of ``(gate, up)``, both ``[..., I]``; ``options`` as ``layer``."""
    gate_up, down = gate_up_of(variant), variant.projections[-1]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, down)(product(*gate_up(self, x)))

    return layer(name, forward, **options)


class GluReference:
    """The reference of one op: gated MLPs with one of ``activations``."""

    def __init__(self, op: str, activations: tuple[str, ...]) -> None:
        self.op = op
        self.activations = activations
        self.probe = probed(op)(self._probe)

    def _probe(self, site: Site) -> GluVariant | Reason:
        """Runs the instance's own forward with small projections and compares it with each activation."""
        assert site.module is not None
        children = site.module._modules
        names = next((p for p in PROJECTIONS if all(children.get(name) is not None for name in p)), None)
        if names is None:
            expected = " or ".join("/".join(p) for p in PROJECTIONS)
            return Reason("not-this-op", f"{site.owner.__qualname__} has no children {expected}")
        others = [n for n, child in children.items() if n not in names and child is not None and _has_state(child)]
        if others:
            return Reason("not-this-op", f"{site.owner.__qualname__} has further children: {', '.join(others)}")
        fitting = list(ACTIVATIONS)
        for training, leading in ((True, (32,)), (False, (4, 8))):
            twin, x = small_mlp(site.module, names, training=training), uneven(*leading, WIDTH, seed=9)
            result = site.original(twin, x.clone())
            fitting = [a for a in fitting if agree(result, _mlp(twin, x, GluVariant(a, names)))]
        if not fitting:
            return Reason("not-this-op", f"{site.owner.__qualname__} computes more than down(activation(gate) * up)")
        found = fitting[0]
        if found not in self.activations:
            ours = " or ".join(self.activations)
            return Reason("activation", f"the activation is {found}, {self.op} computes {ours}")
        return GluVariant(found, names)

    def build(self, variant: GluVariant, compute_dtype: torch.dtype | None = None) -> type[nn.Module]:
        """The maths as a layer class; with ``compute_dtype`` the activation and product are computed in it."""
        activation = ACTIVATIONS[variant.activation]

        def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            if compute_dtype is None:
                return activation(gate) * up
            return (activation(gate.to(compute_dtype)) * up.to(compute_dtype)).to(gate.dtype)

        return glu_layer("ReferenceGLU", variant, product)

    def called_children(self, variant: GluVariant) -> tuple[str, ...]:
        """The projections; kernels go past whatever else an MLP has, its activation."""
        return variant.projections

    def example(self, site: Site, variant: GluVariant) -> Example:
        """Narrow inputs: hidden size 32, the intermediate size as it is (96 where it can't be read)."""
        assert site.module is not None
        width = getattr(site.module._modules[variant.projections[0]], "out_features", None)
        if not isinstance(width, int):
            width = 96 * (3 - len(variant.projections) + 1)
        twin = small_mlp(site.module, variant.projections, hidden=32, width=width)
        return Example(twin, (random_tensor(2, 5, 32, seed=3),))


def _has_state(child: nn.Module) -> bool:
    """Whether a child could do more than an activation does: dropouts differ between train and eval."""
    is_dropout = isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0
    return is_dropout or any(True for _ in (*child.parameters(), *child.buffers()))


def small_mlp(
    module: nn.Module, names: tuple[str, ...], hidden: int = WIDTH, width: int | None = None, training: bool = True
) -> Any:
    """A stand-in with small fp32 linear projections; ``width`` is that of the first one's output."""
    fused = len(names) == 2
    width = width or hidden * (2 if fused else 1)
    shapes = [(hidden, width)] * (len(names) - 1) + [(width // 2 if fused else width, hidden)]
    children: dict[str, Any] = {}
    for index, (name, (inside, outside)) in enumerate(zip(names, shapes, strict=True)):
        linear = nn.Linear(inside, outside, device="meta").to_empty(device="cpu")
        linear.weight.data = random_tensor(outside, inside, seed=20 + index) / inside**0.5
        linear.bias.data = random_tensor(outside, seed=30 + index)
        children[name] = linear
    return stand_in(module, training=training, **children)


def _mlp(twin: Any, x: torch.Tensor, variant: GluVariant) -> torch.Tensor:
    gate, up = gate_up_of(variant)(twin, x)
    return getattr(twin, variant.projections[-1])(ACTIVATIONS[variant.activation](gate) * up)


SWIGLU = GluReference("swiglu", ("silu",))
GEGLU = GluReference("geglu", ("gelu_tanh", "gelu"))
