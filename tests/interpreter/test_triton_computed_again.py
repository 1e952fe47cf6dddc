"""The product of a gated MLP isn't kept for the backward where it is large, and nobody can tell from the numbers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Phi3Config, Qwen3Config
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from tests.support.triton_device import DEVICE
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops import computed_again

MLPS = {"gate and up": (Qwen3MLP, Qwen3Config), "in one": (Phi3MLP, Phi3Config)}


@pytest.fixture(autouse=True)
def any_size_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed_again, "WORTH_BYTES", 1)


@pytest.fixture(params=MLPS)
def mlp(request: pytest.FixtureRequest) -> Iterator[Any]:
    made, config = MLPS[request.param]
    torch.manual_seed(0)
    module = made(config(hidden_size=32, intermediate_size=48)).to(DEVICE)
    name = f"{made.__module__}.{made.__qualname__}"
    yield kernelize(module, {name: KernelChoice("swiglu", ("triton",))})


class Product:
    """Watches the input of a module's down projection, without holding it."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        module.get_submodule("down_proj").register_forward_pre_hook(
            lambda _, inputs: self.seen.append(weakref.ref(inputs[0]))
        )

    @property
    def held(self) -> bool:
        return any(tensor() is not None for tensor in self.seen)


def gradients(module: Any, run: Any = None, **options: Any) -> list[torch.Tensor]:
    x = torch.linspace(-2, 2, 4 * 32, device=DEVICE).reshape(4, 32).requires_grad_()
    loss = (run or module)(x).square().sum()
    return list(torch.autograd.grad(loss, [x, *module.parameters()], **options))


def kept(module: Any, monkeypatch: pytest.MonkeyPatch, run: Any = None) -> list[torch.Tensor]:
    """The gradients where the product is kept, as it always is for small ones."""
    with monkeypatch.context() as patched:
        patched.setattr(computed_again, "WORTH_BYTES", 2**62)
        return gradients(module, run)


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_product_is_gone_after_the_forward(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(mlp)
    x = torch.randn(4, 32, device=DEVICE)
    out = mlp(x)
    assert len(product.seen) == 1 and not product.held
    out.sum().backward()
    monkeypatch.setattr(computed_again, "WORTH_BYTES", 2**20)
    out = mlp(x)
    assert product.held


def test_the_gradients_are_the_same_bits(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert equal(gradients(mlp), kept(mlp, monkeypatch))
    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    loss = mlp(x).square().sum()
    once, again = (torch.autograd.grad(loss, [x, *mlp.parameters()], retain_graph=True) for _ in range(2))
    assert equal(list(once), list(again))


def test_a_second_derivative_is_the_formulas(mlp: Any) -> None:
    def second(module: Any) -> torch.Tensor:
        first = gradients(module, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), module.down_proj.weight)[0]

    plain = copy.deepcopy(mlp)
    computed_again.WORTH_BYTES = 2**62  # the fixture takes it back
    expected = second(plain)
    computed_again.WORTH_BYTES = 1
    torch.testing.assert_close(second(mlp), expected)


def test_a_source_that_was_written_meanwhile_is_an_error(mlp: Any) -> None:
    """Also where only the down projection's gradient is asked for, so that nothing else would notice."""
    seen: list[torch.Tensor] = []
    first = next(mlp.children())
    first.register_forward_hook(lambda module, args, out: seen.append(out))
    out = mlp(torch.randn(4, 32, device=DEVICE))
    with torch.no_grad():
        seen[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), mlp.down_proj.weight)


def test_a_weight_that_was_written_meanwhile_is_an_error(mlp: Any) -> None:
    """PyTorch itself looks at nothing that goes through hooks."""
    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    out = mlp(x)
    with torch.no_grad():
        mlp.down_proj.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_a_last_projection_that_writes_into_its_input(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it saves then isn't the product."""
    mlp.down_proj = nn.Sequential(nn.ReLU(inplace=True), mlp.down_proj)
    assert equal(gradients(mlp), kept(mlp, monkeypatch))


def test_an_adapter_on_the_down_projection_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    module = nn.Sequential(Qwen3MLP(Qwen3Config(hidden_size=32, intermediate_size=48))).to(DEVICE)
    config = peft.LoraConfig(target_modules=["down_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(module, config)
    name = f"{Qwen3MLP.__module__}.{Qwen3MLP.__qualname__}"
    kernelize(adapted, {name: KernelChoice("swiglu", ("triton",))})
    wanted = [p for p in adapted.parameters() if p.requires_grad]

    def run() -> list[torch.Tensor]:
        x = torch.linspace(-2, 2, 4 * 32, device=DEVICE).reshape(4, 32)
        return list(torch.autograd.grad(adapted(x).square().sum(), wanted))

    found = run()
    monkeypatch.setattr(computed_again, "WORTH_BYTES", 2**62)
    assert len(wanted) == 2 and equal(found, run())


def test_others_hooks_come_first(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing drops everything, offloading moves everything: neither must be left with what we hold."""
    expected = kept(mlp, monkeypatch)
    assert equal(gradients(mlp, lambda x: checkpoint(mlp, x, use_reentrant=False)), expected)
    product, saved = Product(mlp), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().data_ptr() if tensor.shape[-1] == 48 else 0)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mlp(torch.randn(4, 32, device=DEVICE))
    storage = product.seen[0]()
    assert storage is not None and storage.data_ptr() in saved
    del out


def test_transforms_forbid_hooks_and_get_none(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        found = gradients(mlp)
    assert equal(found, kept(mlp, monkeypatch))
    x = torch.randn(4, 32, device=DEVICE)
    by_transform = torch.func.grad(lambda t: mlp(t).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(mlp(leaf).square().sum(), leaf)
    torch.testing.assert_close(by_transform, expected)
