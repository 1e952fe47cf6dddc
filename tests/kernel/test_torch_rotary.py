"""The torch backend of rotary: numbers, gradients of both orders, what it leaves to the original, under a compiler."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.torch_backend import compiled, site
from twinkle.kernel.ops.rotary import reference as rotary_reference
from twinkle.kernel.ops.rotary import torch as rotary
from twinkle.kernel.probe import random_tensor
from twinkle.kernel.verify import allowed_error_used

DIALECTS = [dialect for dialect in rotary_reference.DIALECTS if dialect.output == "paired"]


def rotary_of(variant: rotary_reference.RotaryVariant):
    return rotary.load(None, site(variant))


def run_rotary(function, variant, args: tuple[torch.Tensor, ...], dtype: torch.dtype | None = None):
    """Outputs and the gradients of the rotated tensors."""
    args = tuple(a.to(dtype or a.dtype).detach().clone() for a in args)
    tensors = [t.requires_grad_() for t in args[: variant.tensors]]
    outputs = function(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [random_tensor(*o.shape, seed=9).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, tensors, seeds)]


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "bf16 with fp32 tables", "fp32 with bf16 tables"],
)
@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_rotary_is_within_the_judgement(dialect, width, dtypes):
    for parameters in rotary_reference.SIGNATURES:
        variant = rotary_reference.RotaryVariant(dialect, width < 16, parameters)
        args = rotary_reference._inputs(variant, 16, width, *dtypes)
        function = rotary_of(variant)
        assert function.accepts_call(*args) is None
        ours = run_rotary(function, variant, args)
        theirs = run_rotary(rotary_reference.build(variant), variant, args)
        judge = run_rotary(rotary_reference.build(variant, torch.float64), variant, args, torch.float64)
        errors = [allowed_error_used(*results) for results in zip(ours, theirs, judge, strict=True)]
        assert max(errors) <= 1, (parameters, errors)
        with torch.no_grad():
            again = function(*args)
        assert torch.equal(again[0] if isinstance(again, tuple) else again, ours[0])


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_gradients_of_rotary_of_both_orders(dialect):
    variant = rotary_reference.RotaryVariant(dialect, True, ("q", "k", "cos", "sin", "unsqueeze_dim"))
    q, k, cos, sin = rotary_reference._inputs(variant, 16, 8, torch.float64, torch.float64)
    q, k = q[:1, :, :2].requires_grad_(), k[:1, :1, :2].requires_grad_()
    function = rotary_of(variant)
    assert torch.autograd.gradcheck(lambda q, k: function(q, k, cos[:1, :2], sin[:1, :2]), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: function(q, k, cos[:1, :2], sin[:1, :2]), (q, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_takes_any_layout_and_writes_to_no_input(dtype):
    variant = rotary_reference.RotaryVariant(rotary_reference.Dialect(), False, rotary_reference.SIGNATURES[0])
    function, expected = rotary_of(variant), rotary_reference.build(variant)
    cos, sin = (random_tensor(1, 5, 16, seed=s).to(dtype) for s in (1, 2))
    base = random_tensor(2, 5, 4, 32, seed=3).to(dtype)
    layouts = [base[..., :16].transpose(1, 2), base[..., ::2].permute(0, 2, 1, 3), base[:, :, :1, :16].mT.mT.mT.mT]
    for x in layouts:
        x = x if x.shape[2] == 5 else x.transpose(1, 2)
        q, k = x.detach().requires_grad_(), x.detach()[:, :1].requires_grad_()
        before = [t.detach().clone() for t in (q, k, cos, sin)]
        ours, theirs = function(q, k, cos, sin), expected(q, k, cos, sin)
        assert all(map(torch.equal, ours, function(q.contiguous(), k.contiguous(), cos, sin)))
        assert [o.stride() for o in ours] == [(t * cos.unsqueeze(1)).stride() for t in (q, k)]
        ours[0].sum().backward()  # k's gradient is missing, q's has strides of zero
        torch.testing.assert_close(q.grad, torch.autograd.grad(theirs[0].sum(), q)[0])
        assert all(map(torch.equal, (q, k, cos, sin), before))


def test_rotary_of_nothing():
    variant = rotary_reference.RotaryVariant(rotary_reference.Dialect(), False, rotary_reference.SIGNATURES[0])
    q = torch.zeros(0, 2, 5, 16, requires_grad=True)
    out = rotary_of(variant)(q, q.detach(), torch.zeros(0, 5, 16), torch.zeros(0, 5, 16))
    assert [o.shape for o in out] == [q.shape, q.shape]
    out[0].sum().backward()
    assert q.grad.shape == q.shape


def test_rotary_keeps_only_the_tables():
    """The original keeps query, key and the halves it turned; here the backward needs nothing of them."""
    variant = rotary_reference.RotaryVariant(rotary_reference.Dialect(), False, rotary_reference.SIGNATURES[0])
    q, k, cos, sin = rotary_reference._inputs(variant, 16, 16, torch.float32, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        rotary_of(variant)(q.requires_grad_(), k.requires_grad_(), cos, sin)
    assert kept == [cos.numel(), sin.numel()]


def test_tables_that_need_a_gradient_go_to_the_original():
    variant = rotary_reference.RotaryVariant(rotary_reference.Dialect(), False, rotary_reference.SIGNATURES[0])
    q, k, cos, sin = rotary_reference._inputs(variant, 16, 16, torch.float32, torch.float32)
    accepts_call = rotary_of(variant).accepts_call
    assert accepts_call(q, k, cos, sin, unsqueeze_dim=1) is None
    assert accepts_call(q, k, cos, sin.requires_grad_()) == "cos or sin needs a gradient"
    assert torch.func.vmap(lambda q: torch.tensor(accepts_call(q, k, cos, sin) is None))(q).any().item() is False


def test_a_dialect_that_gives_halves_is_refused():
    (halves,) = set(rotary_reference.DIALECTS) - set(DIALECTS)
    variant = rotary_reference.RotaryVariant(halves, False, rotary_reference.SIGNATURES[0])
    assert rotary.accepts(site(variant)).code == "dialect"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS[::2], ids=str)
def test_compiled_rotary_gives_the_same_bits(dialect, dtype):
    variant = rotary_reference.RotaryVariant(dialect, True, ("q", "k", "cos", "sin", "unsqueeze_dim"))
    args = rotary_reference._inputs(variant, 16, 8, dtype, dtype)
    function = rotary_of(variant)

    def call(*args):
        assert function.accepts_call(*args) is None
        return function(*args)

    eager, traced = (run_rotary(f, variant, args) for f in (call, compiled(call)))
    assert all(map(torch.equal, eager, traced))
