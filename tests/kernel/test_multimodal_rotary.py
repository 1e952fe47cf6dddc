"""The op ``multimodal_rotary``: recognised in the function of transformers before 5.0, and computed as it does."""

from __future__ import annotations

from typing import Any

import torch

from twinkle.kernel.ops.rotary import multimodal_reference as reference
from twinkle.kernel.targets import Site
from twinkle.reasons import Reason


def half_turn(x: torch.Tensor) -> torch.Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def rotated(q: Any, k: Any, cos: Any, sin: Any, mrope_section: Any, unsqueeze_dim: int = 1) -> Any:
    doubled = list(mrope_section) * 2
    ends = [sum(doubled[: i + 1]) for i in range(len(doubled))]
    parts = list(zip([0, *ends], ends, range(len(ends)), strict=False))
    cos, sin = (torch.cat([t[i % 3, ..., a:b] for a, b, i in parts], -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin


def only_the_first_table(q: Any, k: Any, cos: Any, sin: Any, mrope_section: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos[0].unsqueeze(unsqueeze_dim), sin[0].unsqueeze(unsqueeze_dim)
    return q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin


def site_of(function: Any) -> Site:
    return Site(None, function.__name__, None, function.__name__, function, torch.device("cpu"), torch.float32)


def test_the_formula_is_recognised_and_computed() -> None:
    variant = reference.probe(site_of(rotated))
    assert isinstance(variant, reference.MultimodalRotaryVariant)
    args = reference.example(site_of(rotated), variant).args
    torch.testing.assert_close(reference.build(variant)(*args), rotated(*args))


def test_another_formula_or_signature_is_a_reason() -> None:
    other = reference.probe(site_of(only_the_first_table))
    assert isinstance(other, Reason) and other.code == "not-this-op"
    plain = reference.probe(site_of(lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)))
    assert isinstance(plain, Reason) and plain.code == "signature"
