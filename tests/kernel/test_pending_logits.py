"""Pending logits behave as the logits would, whatever is done to them, and keep out of the way of the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.kernel.ops.causal_lm_loss.ours import load_torch
from twinkle.kernel.ops.causal_lm_loss.pending_logits import Head, PendingLogits, _value_of

B, T, H, V = 2, 5, 6, 7
LOSS = load_torch(None)


class Pair(NamedTuple):
    first: Any
    second: Any


def head_and_logits(bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Head, torch.Tensor]:
    """A pending call, and what it would have returned."""
    generator = torch.Generator().manual_seed(0)
    x, weight, offset = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in ((B, T, H), (V, H), V))
    return Head(x, weight, offset if bias else None, LOSS), F.linear(x, weight, offset if bias else None)


SHARES = torch.linspace(0, 1, B * T * V).double().view(B * T, V)
MASK = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
KEPT = {  # what can be written down
    "float": lambda z: z.float(),
    "double": lambda z: z.to(torch.float64),
    "to its device": lambda z: z.to(z.device),
    "contiguous": lambda z: z.contiguous(),
    "times": lambda z: z * 0.5,
    "times, from the left": lambda z: 3 * z,
    "divided": lambda z: z / 4.0,
    "tanh": lambda z: torch.tanh(z),
    "tanh, as a method": lambda z: z.tanh(),
    "flattened": lambda z: z.view(-1, V),
    "reshaped": lambda z: z.reshape((-1, z.shape[-1])),
    "shifted": lambda z: z[..., :-1, :],
    "all": lambda z: z[...],
    "the last": lambda z: z[-3:],
    "some": lambda z: z[torch.tensor([0, 1, 0])],
    "as they are": lambda z: z[:],
}
COMPUTED = {  # what needs the numbers
    "plus": lambda z: z + 1,
    "from": lambda z: 1 - z,
    "minus themselves": lambda z: z - z,
    "times a tensor": lambda z: z * torch.full((V,), 2.0, dtype=z.dtype),
    "a tensor times": lambda z: torch.full((V,), 2.0, dtype=z.dtype) * z,
    "in place": lambda z: _times_in_place(z * 1),
    "softmax": lambda z: torch.softmax(z, -1),
    "as a method": lambda z: z.log_softmax(-1),
    "clamped in place": lambda z: z.clone().clamp_(max=0.5),
    "joined": lambda z: torch.cat([z, z], dim=0),
    "divided by a tensor": lambda z: z / torch.full((V,), 2.0, dtype=z.dtype),
    "viewed otherwise": lambda z: z.reshape(V, -1),
    "one class": lambda z: z[..., 1:],
    "half precision and back": lambda z: z.to(torch.bfloat16).to(z.dtype),
    "negative": lambda z: -z,
    "squared": lambda z: z**2,
    "transposed": lambda z: z.transpose(0, -1),
    "unsqueezed": lambda z: z[None],
}


def _times_in_place(z: Any) -> Any:
    z *= 2
    return z


def weighed(z: torch.Tensor) -> torch.Tensor:
    """A number that every element has a share in."""
    return (z * torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)).sum()


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([*KEPT, *COMPUTED]), max_size=5), st.booleans())
def test_anything_done_to_them_gives_what_it_gives_of_logits(names: list[str], bias: bool) -> None:
    head, logits = head_and_logits(bias)
    ours: Any = head.pending()
    theirs: Any = logits * 1
    for name in names:
        step: Callable[[Any], Any] = KEPT.get(name) or COMPUTED[name]
        try:
            theirs = step(theirs.clone())
        except (RuntimeError, IndexError):  # no shape for it
            return
        ours = step(ours.clone() if isinstance(ours, torch.Tensor) else ours)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.dim() == theirs.dim()
    if isinstance(ours, PendingLogits):
        assert not set(names) & set(COMPUTED)
        ours = ours.value("the test")
    assert torch.equal(ours, theirs)
    leaves = [t for t in (head.x, head.weight, head.bias) if t is not None]
    found = torch.autograd.grad(weighed(ours), leaves, retain_graph=True)
    for gradient, expected in zip(found, torch.autograd.grad(weighed(theirs), leaves), strict=True):
        torch.testing.assert_close(gradient, expected)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([name for name in KEPT if name not in ("double", "as they are", "all")]), max_size=6),
    st.sampled_from(["mean", "sum", "none"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_their_cross_entropy(names: list[str], reduction: str, weighted: bool, smoothing: float, bias: bool) -> None:
    head, logits = head_and_logits(bias, torch.float32)
    ours: Any = head.pending()
    theirs: Any = logits
    for name in names:
        theirs = KEPT[name](theirs.clone())
        ours = KEPT[name](ours.clone() if isinstance(ours, torch.Tensor) else ours)
    ours, theirs = ours.reshape(-1, V), theirs.reshape(-1, V)
    target = torch.arange(len(theirs)) % V
    target[::3] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.linspace(0.5, 2, V, dtype=theirs.dtype)
    loss, expected = (F.cross_entropy(z, target, **options) for z in (ours, theirs))
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    twice_capped = sum("tanh" in name for name in names) > 1
    assert head.fused is not twice_capped and (head.why is not None) is twice_capped
    leaves = [t for t in (head.x, head.weight, head.bias) if t is not None]
    found = torch.autograd.grad(weighed(loss), leaves)
    for gradient, reference in zip(found, torch.autograd.grad(weighed(expected), leaves), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda z: F.cross_entropy(z, SHARES), "other than of one class"),
        (lambda z: F.cross_entropy(z.view(B, T, V).transpose(1, 2), torch.zeros(B, T, dtype=torch.long)), "transpose"),
        (lambda z: F.cross_entropy(z, torch.zeros(B * T, dtype=torch.long), size_average=False), "other than"),
        (lambda z: F.nll_loss(torch.log_softmax(z, -1), torch.zeros(B * T, dtype=torch.long)), "log_softmax"),
        (lambda z: F.mse_loss(z, torch.zeros(B * T, V).double()), "mse_loss"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_other_losses_get_logits(call: Callable[[Any], torch.Tensor], why: str) -> None:
    head, logits = head_and_logits()
    torch.testing.assert_close(call(head.pending().view(-1, V)), call(logits.view(-1, V)))
    assert not head.fused and head.why is not None and why in head.why


def test_a_loss_in_half_precision_is_rounded_to_it() -> None:
    head, logits = head_and_logits(dtype=torch.bfloat16)
    target = torch.arange(B * T) % V
    loss, expected = (F.cross_entropy(z.view(-1, V), target) for z in (head.pending(), logits))
    assert head.fused and loss.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)


def test_a_wrong_target_is_the_originals_error() -> None:
    right = torch.zeros(B * T, dtype=torch.long)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (torch.full((B * T,), V), {}),
        (torch.full((B * T,), -1), {}),
        (right[1:], {}),
        (right.int(), {}),
        (right, {"label_smoothing": 1.5}),
        (right, {"reduction": "avg"}),
        (right, {"weight": torch.ones(3).double()}),
    ]
    for target, options in cases:
        head, logits = head_and_logits()
        with pytest.raises(Exception) as theirs:
            F.cross_entropy(logits.view(-1, V), target, **options)
        with pytest.raises(theirs.type) as ours:
            F.cross_entropy(head.pending().view(-1, V), target, **options)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("at_head", [False, True])
def test_they_are_what_the_heads_call_made_them_whatever_holds_later(at_head: bool) -> None:
    """Autocast where the head is called counts; that where the loss is computed doesn't."""
    head, _ = head_and_logits(dtype=torch.float32)
    target = torch.arange(B * T) % V

    def loss(call: Callable[[], Any], computed: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=at_head):
            logits = call()
        with torch.autocast("cpu", torch.bfloat16, enabled=not at_head):
            return F.cross_entropy((logits + 0 if computed else logits).view(-1, V).float(), target)

    x = head.x.detach().bfloat16().requires_grad_() if at_head else head.x
    for computed in (False, True):
        expected = loss(lambda: F.linear(x, head.weight, head.bias), computed)
        ours = loss(lambda: Head(x, head.weight, head.bias, LOSS).pending(), computed)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
        leaves = [x, head.weight]
        for gradient, right in zip(*(torch.autograd.grad(found, leaves) for found in (ours, expected)), strict=True):
            torch.testing.assert_close(gradient, right, rtol=2e-2, atol=1e-3 if at_head else 1e-6)


def test_they_are_computed_once_and_what_is_written_to_them_stays() -> None:
    head, logits = head_and_logits()
    pending = head.pending()
    pending[0] = 0.0
    assert torch.equal(pending[1], logits[1]) and not pending[0].any()
    assert pending.value("") is pending.value("") and "setitem" in str(head.why)
    pending.mul_(2)
    assert torch.equal(pending[1], 2 * logits[1])
    flat = head.pending().view(-1, V)
    assert torch.equal(pending.view(-1, V)[T:] * 1.0, 2 * logits[1]), "also where it could be written down"
    flat.mul_(3)
    target = torch.arange(B * T) % V
    torch.testing.assert_close(F.cross_entropy(flat, target), F.cross_entropy(flat.value(""), target))
    assert not head.fused


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_what_python_asks_of_them() -> None:
    head, logits = head_and_logits()
    pending = head.pending()
    assert (
        len(pending) == B and hash(pending) == hash(pending) and pending.size(-1) == V and pending.numel() == B * T * V
    )
    assert "shape=(2, 5, 7)" in repr(pending) and pending.requires_grad and pending.is_floating_point()
    assert torch.equal(pending == pending, torch.ones(B, T, V, dtype=torch.bool))
    assert [row.shape for row in pending] == [(T, V)] * B
    assert torch.equal(logits @ torch.eye(V).double(), pending @ torch.eye(V).double())
    assert not hasattr(pending, "no_such_attribute") and reversed(pending).shape == (B, T, V)
    assert (np.float64(2) * head.pending().detach()).dtype == torch.float64
    assert (7 % pending).shape == (+pending).shape == pending.shape and type(np.float32(2) * pending) is torch.Tensor
    frozen = Head(head.x.detach(), head.weight.detach(), None, LOSS).pending()
    assert not frozen.requires_grad and not frozen.value("").requires_grad
    some = Pair(pending, 2)
    assert torch.equal(torch.stack(some[:1]), logits[None]) and torch.equal(_value_of(some, "").first, logits)
    assert torch.equal(pending[torch.ones(B, T, dtype=torch.uint8), 3], logits[torch.ones(B, T, dtype=torch.bool), 3])
    assert torch.equal(copy.copy(pending), logits)
