"""``scaled_dot_product_attention`` through PyTorch: who serves which call, in which mode, and its gradients."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

from tests.aten.conftest import DEVICE, TRITON
from twinkle.aten import Profile, RegistrationError, install
from twinkle.aten.registration import active

NAME = "scaled_dot_product_attention"


def tensors(queries: int = 5, keys: int = 7, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, n, 8, generator=generator).to(DEVICE, dtype) for n in (queries, keys, keys)]


def served(installed: Any) -> dict[str, int]:
    counts = installed.registrations[NAME].counts
    return {name: n for name, n in {"kernel": counts.kernel, **counts.fallbacks}.items() if n}


MASK = torch.ones(5, 7, dtype=torch.bool, device=DEVICE).tril(1)
CALLS = {
    "short": (lambda: attention(*tensors()), "kernel"),
    "causal": (lambda: attention(*tensors(), is_causal=True), "kernel"),
    "what is seen": (lambda: attention(*tensors(), attn_mask=MASK), "kernel"),
    "what is added": (lambda: attention(*tensors(), attn_mask=MASK.float()), "kernel"),
    "long": (lambda: attention(*tensors(1024, 2)), "long"),
    "long with a mask": (lambda: attention(*tensors(1024, 2), attn_mask=MASK[:1, :2]), "kernel"),
    "dropout": (lambda: attention(*tensors(), dropout_p=0.5), "dropout"),
    "three dimensions": (lambda: attention(*(t[0] for t in tensors())), "rank"),
    "dtypes": (lambda: attention(*tensors(dtype=torch.float16)), "kernel"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["auto", "native", "triton"])
def test_the_route(call: str, mode: str, chip: Profile) -> None:
    work, route = CALLS[call]
    if mode == "triton" and not TRITON:
        with pytest.raises(RegistrationError, match=f"^{NAME}: Triton doesn't run on {chip.platform}: ") as refused:
            install([NAME], platform=chip.platform, modes={NAME: mode})
        assert refused.value.code == "no-triton" and active() == []
        return
    torch.manual_seed(0)
    expected = work()
    with install([NAME], platform=chip.platform, modes={NAME: mode}) as installed:
        torch.manual_seed(0)
        result = work()
        assert installed.registrations[NAME].mode == mode
    if mode == "native":
        route = "native-mode"
    if mode == "triton" and route == "long":
        route = "kernel"
    assert served(installed) == {route: 1}
    if route == "kernel":
        assert torch.allclose(result.float(), expected.float(), rtol=1e-5, atol=2e-3 if call == "dtypes" else 1e-6)
    else:
        assert torch.equal(result, expected)


def test_the_mode_of_a_profile(chip: Profile) -> None:
    quiet = dataclasses.replace(chip, modes={NAME: "native"})
    with install([NAME, "clone"], platform=quiet) as installed:
        attention(*tensors())
        assert {name: made.mode for name, made in installed.registrations.items()} == {NAME: "native", "clone": "auto"}
        assert served(installed) == {"native-mode": 1}
    with install([NAME], platform=quiet, modes={NAME: "auto"}) as installed:
        attention(*tensors())
        assert served(installed) == {"kernel": 1}


@pytest.mark.parametrize(
    ("modes", "code", "message"),
    [
        ({NAME: "nativ"}, "unknown-mode", "unknown mode 'nativ'; known: auto, triton, native; did you mean 'native'"),
        ({"clone": "auto"}, "unknown-operator", "clone: has a mode but isn't installed; installed: scaled_dot"),
    ],
)
def test_wrong_modes(modes: dict[str, str], code: str, message: str, chip: Profile) -> None:
    with pytest.raises(RegistrationError, match=message) as refused:
        install([NAME], platform=chip.platform, modes=modes)
    assert refused.value.code == code and active() == []


def test_an_operator_without_a_triton_kernel(chip: Profile) -> None:
    with pytest.raises(RegistrationError, match="detach: it has no Triton kernel"):
        install(["detach"], platform=chip.platform, modes={"detach": "triton"})


def test_a_profile_with_a_mode_that_does_not_exist(chip: Profile) -> None:
    with pytest.raises(ValueError, match=f"mode 'fast' of {NAME} is none of auto, triton, native"):
        dataclasses.replace(chip, modes={NAME: "fast"})


def test_what_autograd_notices(chip: Profile) -> None:
    """An argument that was written before the backward pass is an error, as natively; what sees nothing gives zeros."""
    with install([NAME], platform=chip.platform) as installed:
        query, key, value = tensors()
        query.requires_grad_()
        result = attention(query, key, value)
        key += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
        blind = MASK.clone()
        blind[2] = False
        query, key, value = (t.requires_grad_() for t in tensors())
        bias = torch.zeros(5, 7, device=DEVICE, requires_grad=True)
        result = attention(query, key, value, attn_mask=bias.masked_fill(~blind, float("-inf")))
        result.pow(2).sum().backward()
        assert not result[:, :, 2].any() and not query.grad[:, :, 2].any()
        assert all(torch.isfinite(t.grad).all() and t.grad.any() for t in (query, key, value, bias))
        assert served(installed) == {"kernel": 2}


def test_a_mask_that_is_looked_up_gets_its_gradient(chip: Profile) -> None:
    """As a learned position bias does, one for all batches and queries."""

    def gradient() -> torch.Tensor:
        bias = torch.randn(2, 1, 7, generator=torch.Generator().manual_seed(5)).to(DEVICE).requires_grad_()
        query, key, value = tensors()
        query.requires_grad_()  # on CUDA, PyTorch's own kernel fails when it is the mask alone that does
        attention(query, key, value, attn_mask=bias[None]).pow(2).sum().backward()
        return bias.grad

    native = gradient()
    with install([NAME], platform=chip.platform):
        ours = gradient()
    assert ours.shape == (2, 1, 7) and torch.allclose(ours, native, rtol=1e-4, atol=1e-6)


def test_a_query_whose_heads_share_memory(chip: Profile) -> None:
    """PyTorch's own kernel on the CPU (2.13) lays its result out as such a query, and writes beside it."""
    query = torch.arange(20.0, device=DEVICE).as_strided((1, 2, 1, 3), (6, 1, 6, 1))
    key = torch.tensor([86.0, 48.0, 37.0], device=DEVICE).view(1, 1, 1, 3).repeat(1, 2, 1, 1)
    with install([NAME], platform=chip.platform) as installed:
        assert torch.equal(attention(query, key, key), key), "there is one key, whose value is the result"
        assert served(installed) == {"kernel": 1}


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
def test_a_program_that_chooses_among_pytorchs_kernels_gets_one_of_those(backend: SDPBackend, chip: Profile) -> None:
    """Or its exception, where the device has none such."""

    def work() -> Any:
        try:
            with sdpa_kernel(backend):
                return attention(*tensors())
        except RuntimeError as error:
            return type(error)

    native = work()
    with install([NAME], platform=chip.platform) as installed:
        ours = work()
        assert served(installed) == {"backend-chosen": 1}
        attention(*tensors())
        assert served(installed) == {"backend-chosen": 1, "kernel": 1}
    assert ours is native if isinstance(native, type) else torch.equal(ours, native)


def test_a_gradient_that_would_fill_the_memory_is_pytorchs(chip: Profile) -> None:
    """A mask of 1024 tokens, for four heads: the gradient of our kernel would hold the scores, several times."""
    query, key, value = (torch.randn(1, 4, 1024, 4, device=DEVICE) for _ in range(3))
    mask = torch.ones(1024, 1024, dtype=torch.bool, device=DEVICE).tril()
    with install([NAME], platform=chip.platform) as installed:
        attention(query[:, :, :600], key, value.requires_grad_(), attn_mask=mask[:600]).sum().backward()
        assert served(installed) == {"large-gradient": 1}
        attention(query[:, :, :100], key, value, attn_mask=mask[:100]).sum().backward()
        with torch.no_grad():
            attention(query[:, :, :600], key[:, :, :2], value[:, :, :2], attn_mask=mask[:600, :2])
        assert served(installed) == {"large-gradient": 1, "kernel": 2}


@pytest.mark.skipif(not TRITON, reason="it is the Triton kernel's grid")
@pytest.mark.parametrize("causal", [False, True])
def test_a_grid_that_is_smaller_than_the_work(causal: bool, chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.scaled_dot_product_attention.kernel import triton_level

    query, key, value = tensors(130, 70)
    native = attention(query, key, value, is_causal=causal)
    monkeypatch.setattr(triton_level, "most_programs", lambda device: 4)  # of three blocks for each of two heads
    triton_level._program.cache_clear()
    with install([NAME], platform=chip.platform) as installed:
        assert torch.allclose(attention(query, key, value, is_causal=causal), native, rtol=1e-5, atol=1e-6)
        assert served(installed) == {"kernel": 1}
    triton_level._program.cache_clear()


@pytest.mark.multiprocess
@pytest.mark.skipif(DEVICE != "cpu", reason="the same whatever the device")
def test_what_the_interpreter_multiplies_wrongly_is_pytorchs() -> None:
    """In a process in which nobody has mended it, as these tests have."""
    code = """
import torch
from twinkle.aten import install
q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
native = torch.nn.functional.scaled_dot_product_attention(q, q, q)
with install(["scaled_dot_product_attention"], platform="cpu", modes={"scaled_dot_product_attention": "triton"}) as all:
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), native)
    torch.nn.functional.scaled_dot_product_attention(*[q.float()] * 3)
    print(all.registrations["scaled_dot_product_attention"].counts)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "kernel=1, fallbacks={'interpreter': 1}" in done.stdout, done.stdout + done.stderr
