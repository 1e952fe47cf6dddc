"""The stand-in for torch_npu is as strict as what is published: otherwise the other tests here would prove nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.npu.conftest import SIMULATED
from tests.simulated_device import cann

if not SIMULATED:
    pytest.skip("it is about the stand-in, in whose place there is torch_npu", allow_module_level=True)

import torch_npu

ROOT = Path(__file__).parents[2]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to("npu", dtype)


X, GAMMA, TABLE = tensor(3, 8), tensor(8), tensor(1, 1, 5, 8)

WRONG: dict[str, Callable[[], Any]] = {
    "a name": lambda: torch_npu.npu_rms_norm(X, GAMMA, eps=1e-6),
    "a parameter that is left out": lambda: torch_npu.npu_rms_norm(X),
    "one too many": lambda: torch_npu.npu_swiglu(X, -1, 1),
    "the order": lambda: torch_npu.npu_rms_norm(X, 1e-6, GAMMA),
    "a type": lambda: torch_npu.npu_swiglu(X, dim="last"),
    "by position what is taken by name": lambda: torch_npu.npu_grouped_matmul([X], [X], None),
    "a tensor for a list": lambda: torch_npu.npu_grouped_matmul(X, X),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_call_that_is_not_the_published_one_fails(call: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"npu::npu_\w+|overload"):
        call()


def test_all_that_is_published_is_there_and_nothing_else() -> None:
    assert torch_npu.__version__ == "2.14.0" and sum(name.startswith("npu_") for name in dir(torch_npu)) > 300
    assert not hasattr(torch_npu, "npu_rms_norm_v9")
    with pytest.raises(NotImplementedError, match="npu_gelu"):
        torch_npu.npu_gelu(X)


def test_no_function_has_a_gradient_of_its_own() -> None:
    with pytest.raises(AssertionError, match="npu_swiglu is called where gradients are recorded"):
        torch_npu.npu_swiglu(tensor(3, 8).requires_grad_())
    with torch.no_grad():
        torch_npu.npu_swiglu(tensor(3, 8).requires_grad_())


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="npu")


ROWS, STACK = tensor(6, 8), tensor(2, 8, 4)
PRODUCT = {"group_type": 0, "group_list_type": 1, "split_item": 2}
CHOICES = torch.zeros(3, 2, dtype=torch.int64, device="npu")

REFUSED: dict[str, Callable[[], Any]] = {
    "fp64": lambda: torch_npu.npu_swiglu(X.double()),
    "an odd width": lambda: torch_npu.npu_swiglu(tensor(3, 7)),
    "two dtypes": lambda: torch_npu.npu_rms_norm(X.float(), GAMMA),
    "one dimension": lambda: torch_npu.npu_rms_norm(GAMMA, GAMMA),
    "another width": lambda: torch_npu.npu_rms_norm(X, tensor(4)),
    "a norm that needs rows": lambda: torch_npu.npu_gemma_rms_norm(tensor(8, 8).t(), GAMMA),
    "three dimensions to rotate": lambda: torch_npu.npu_rotary_mul(TABLE[0], TABLE[0], TABLE[0]),
    "tables of another length": lambda: torch_npu.npu_rotary_mul(tensor(2, 3, 4, 8), TABLE, TABLE),
    "tables of another width": lambda: torch_npu.npu_rotary_mul(tensor(2, 3, 5, 16), TABLE, TABLE),
    "a wide head": lambda: torch_npu.npu_rotary_mul(*[tensor(1, 1, 1, 896)] * 3),
    "many heads": lambda: torch_npu.npu_rotary_mul(tensor(1, 1000, 1, 8), *[tensor(1, 1, 1, 8)] * 2),
    "a table for each row, of neighbours": lambda: torch_npu.npu_rotary_mul(
        tensor(2, 3, 5, 8), tensor(2, 1, 5, 8), tensor(2, 1, 5, 8), rotary_mode="interleave"
    ),
    "tokens of fp32": lambda: torch_npu.npu_moe_token_permute(X.float(), CHOICES),
    "choices of int16": lambda: torch_npu.npu_moe_token_permute(X, CHOICES.short()),
    "a stack that lies transposed": lambda: torch_npu.npu_grouped_matmul(
        [ROWS], [tensor(2, 4, 8).transpose(1, 2)], group_list=counts(3, 3), **PRODUCT
    ),
    "one group": lambda: torch_npu.npu_grouped_matmul([ROWS], [STACK[:1]], group_list=counts(6), **PRODUCT),
    "groups of int32": lambda: torch_npu.npu_grouped_matmul([ROWS], [STACK], group_list=counts(3, 3).int(), **PRODUCT),
    "rows, where their transpose is asked for": lambda: torch_npu.npu_grouped_matmul(
        [ROWS], [ROWS], group_list=counts(3, 3), **PRODUCT | {"group_type": 2}
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_the_chip_refuses_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(cann.Refused):
        call()


def test_rows_of_nobody_are_undefined() -> None:
    (result,) = torch_npu.npu_grouped_matmul([ROWS], [STACK], group_list=counts(2, 1), **PRODUCT)
    assert result[:3].isfinite().all() and result[3:].isnan().all()
    ends = PRODUCT | {"group_list_type": 0}
    (same,) = torch_npu.npu_grouped_matmul([ROWS], [STACK], group_list=counts(2, 3), **ends)
    assert torch.equal(same[:3], result[:3])


def gradients_of(function: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor) -> Any:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def test_the_published_gradients_are_those_of_the_functions() -> None:
    """In fp32, where PyTorch differentiates what the functions compute."""
    x, gamma, grad = torch.randn(4, 3, 8), torch.randn(8), torch.randn(4, 3, 8)
    rstd = cann.rms_norm(x, gamma)[1]
    expected = gradients_of(lambda x, gamma: cann.rms_norm(x, gamma)[0], grad, x, gamma)
    torch.testing.assert_close(cann.rms_norm_backward(grad, x, gamma, rstd), expected)
    half = grad[..., :4]
    torch.testing.assert_close((cann.swiglu_backward(half, x),), gradients_of(cann.swiglu, half, x))
    for options in ({"approximate": a, "activate_left": left} for a in (0, 1) for left in (True, False)):
        gelu = cann.geglu(x, **options)[1]
        expected = gradients_of(lambda x, options=options: cann.geglu(x, **options)[0], half, x)
        torch.testing.assert_close((cann.geglu_grad(half, x, gelu, **options),), expected)
    tokens, choices = torch.randn(5, 8).bfloat16(), torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0], [2, 1]])
    rows, places = cann.moe_token_permute(tokens, choices)
    assert torch.equal(rows, tokens[choices.flatten().argsort(stable=True) // 2])
    grad = torch.randn(10, 8).bfloat16()
    expected = gradients_of(lambda t: cann.moe_token_permute(t, choices)[0], grad, tokens)
    torch.testing.assert_close((cann.moe_token_permute_grad(tokens, grad, choices, places),), expected)
    rows, probs, grad = torch.randn(10, 8), torch.rand(5, 2), torch.randn(5, 8)
    expected = gradients_of(lambda r, p: cann.moe_token_unpermute(r, places, p), grad, rows, probs)
    torch.testing.assert_close(cann.moe_token_unpermute_grad(rows, grad, places, probs), expected)


def test_the_product_neither_has_it_nor_can_import_it() -> None:
    sources = [path.read_text() for folder in ("src", "ops", "cookbook") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100 and not any("simulated_device" in text for text in sources)
    code = (
        "from importlib.util import find_spec; assert not find_spec('torch_npu') and not find_spec('simulated_device')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", timeout=60)
    assert done.returncode == 0, done.stderr
