"""Gradients under ``vmap``: what is asked of a backward then must not depend on a tensor's memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.batched_gradients import assert_same_gradients
from tests.support.models import clean_process  # noqa: F401
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.worthwhile import every_size
from twinkle.loss import linear_cross_entropy


@pytest.mark.parametrize(
    ("preset", "ops"),
    [
        ("qwen3", ("rms_norm", "rotary", "causal_lm_loss")),
        ("gemma2", ("rms_norm", "rotary", "causal_lm_loss")),
        ("qwen3_moe", ("moe_experts",)),
        ("qwen3_next", ("gated_rms_norm",)),
    ],
)
def test_several_gradients_at_once(preset: str, ops: tuple[str, ...]) -> None:
    with every_size():
        assert_same_gradients(preset, "torch", *ops)


def test_jacobians_and_hessians_of_a_norm() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms = torch.nn.Sequential(LlamaRMSNorm(6))

    def function(x: torch.Tensor) -> torch.Tensor:
        return norms(x).sum(0)[:3]

    x = torch.linspace(-1, 2, 24).view(4, 6)
    uses = (
        torch.autograd.functional.jacobian,
        lambda f, *a, **k: torch.autograd.functional.hessian(_summed(f), *a, **k),
    )
    expected = [use(function, x) for use in uses]
    kernelize(norms, {LlamaRMSNorm: KernelChoice("rms_norm", ("torch",))}, strict=True)
    with every_size():
        for use, right in zip(uses, expected, strict=True):
            torch.testing.assert_close(use(function, x, vectorize=True), right)


def _summed(function):
    return lambda x: function(x).square().sum()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_gradients_of_the_loss_and_the_usual_one_afterwards(reduction, dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size).to(dtype).requires_grad_() for size in ((7, 5), (11, 5), (11,)))
    target = torch.tensor([3, 0, -100, 10, 4, 4, 1])
    options = {"reduction": reduction, "label_smoothing": 0.1}
    class_weight = torch.linspace(0.5, 1.5, 11)

    def gradients(loss, **more):
        shares = torch.linspace(-1, 2, 3 * loss.numel()).view(3, *loss.shape).to(loss.dtype)
        several = torch.autograd.grad(loss, (x, weight, bias), shares, is_grads_batched=True, retain_graph=True)
        return [*several, *torch.autograd.grad(loss, (x, weight, bias), shares[0])]

    logits = torch.nn.functional.linear(x, weight, bias).float()
    expected = gradients(torch.nn.functional.cross_entropy(logits, target, class_weight, **options))
    ours = gradients(linear_cross_entropy(x, weight, target, bias=bias, class_weight=class_weight, chunk=3, **options))
    for found, right in zip(ours, expected, strict=True):
        assert found.dtype == right.dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
