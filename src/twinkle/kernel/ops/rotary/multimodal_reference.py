"""The multimodal rotary function of transformers before 5.0 (Qwen2-VL, arXiv:2409.12191, section 2.1).

cos and sin hold three tables, for time, height and width; ``mrope_section`` says how many channels each serves in turn.
Newer versions recombine the tables inside the rotary embedding and call the plain rotary function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from twinkle.kernel.ops.derived import Example
from twinkle.kernel.ops.rotary.reference import Dialect, parameters_of, rotate
from twinkle.kernel.probe import agree, probed, random_tensor
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from twinkle.kernel.targets import Site

REPLACES = "function"
PARAMETERS = ("q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim")


@dataclasses.dataclass(frozen=True)
class MultimodalRotaryVariant:
    """There is one variant; only the dialect of the rotation is recorded."""

    dialect: Dialect = Dialect()


def recombine(table: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
    """One table ``[B, S, D]`` from three ``[3, B, S, D]``: chunk i of the doubled ``sections`` from table ``i % 3``."""
    chunks = table.split(list(sections) * 2, dim=-1)
    return torch.cat([chunk[i % 3] for i, chunk in enumerate(chunks)], dim=-1)


@probed("multimodal_rotary")
def probe(site: Site) -> MultimodalRotaryVariant | Reason:
    """Calls the function on small inputs and compares it with the reference."""
    if parameters_of(site.original) != PARAMETERS:
        return Reason("signature", f"{site.name} is not called with ({', '.join(PARAMETERS)})")
    variant = MultimodalRotaryVariant()
    *tensors, sections = example(site, variant).args
    for dtype, table_dtype in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        q, k, cos, sin = (t.to(d) for t, d in zip(tensors, (dtype, dtype, table_dtype, table_dtype), strict=True))
        results, expected = site.original(q, k, cos, sin, sections), build(variant)(q, k, cos, sin, sections)
        if not all(agree(r, e, mismatches=0.02) for r, e in zip(results, expected, strict=True)):
            return Reason("not-this-op", f"{site.name} does not compute the multimodal rotary formula")
    return variant


def build(variant: MultimodalRotaryVariant, compute_dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """The maths as a function with the original's signature."""

    def reference_multimodal_rotary(  # type: ignore[no-untyped-def]
        q, k, cos, sin, mrope_section, unsqueeze_dim=1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (recombine(t, mrope_section).unsqueeze(unsqueeze_dim) for t in (cos, sin))
        return tuple(rotate(t, cos, sin, variant.dialect, compute_dtype) for t in (q, k))  # type: ignore[return-value]

    return reference_multimodal_rotary


original = build(MultimodalRotaryVariant())
"""No model of the versions of transformers that we support calls such a function."""


def example(site: Site, variant: MultimodalRotaryVariant) -> Example:
    """Heads of 16 channels, sections (2, 3, 3)."""
    q, k = random_tensor(2, 4, 5, 16, seed=1), random_tensor(2, 2, 5, 16, seed=2)
    cos, sin = random_tensor(3, 2, 5, 16, seed=3), random_tensor(3, 2, 5, 16, seed=4)
    return Example(None, (q, k, cos, sin, [2, 3, 3]), fixed=(2, 3))
