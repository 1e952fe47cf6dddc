"""What the op level comes upon beside the numbers: calls that PyTorch refuses, and what a kernel leaves behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.aten.conftest import DEVICE
from twinkle.aten import Profile, catalog
from twinkle.aten.harness import op_level
from twinkle.aten.harness.unlisted import refused_calls
from twinkle.aten.spec import OperatorSpec


def test_a_missing_condition_is_noticed_and_its_place_named(chip: Profile) -> None:
    """PyTorch has no ``silu`` of whole numbers; its decomposition, which is our kernel here, makes floats of them."""
    silu = catalog.operator("silu")
    kernels = {"torch": silu.kernels["torch"]}
    without = replace(silu, kernels=kernels, conditions=tuple(c for c in silu.conditions if c.code != "dtype"))
    problems = [problem for problem in op_level.run(without, chip).problems if "in int64" in problem]
    assert len(problems) == 1
    assert problems[0].startswith("silu/contiguous/float32/0, self in int64: no exception, natively ")
    assert re.search(r"; the kernel must not take it: conditions= is at silu/register.py:\d+$", problems[0])
    assert op_level.run(replace(silu, kernels=kernels), chip).problems == []


def drawing(result: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return result


def without_gradients(result: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return result


def in_double(result: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return result


def as_a_parameter(result: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(result, requires_grad=False)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (drawing, "changes in the process: ['random numbers of cpu'"),
        (without_gradients, "changes in the process: ['gradients'], natively []"),
        (in_double, "changes in the process: ['default dtype'], natively []"),
        (as_a_parameter, "type: Parameter, natively Tensor"),
    ],
)
def test_what_a_kernel_leaves_behind_is_noticed(
    fault: Callable[[torch.Tensor], torch.Tensor], problem: str, chip: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ops.silu.kernel import torch_level

    right = torch_level.silu_torch
    monkeypatch.setattr(torch_level, "silu_torch", lambda self: fault(right(self)))
    silu = catalog.operator("silu")
    dtype = torch.get_default_dtype()
    try:
        with torch.enable_grad():
            outcome = op_level.run(replace(silu, kernels={"torch": silu.kernels["torch"]}), chip)
    finally:
        torch.set_default_dtype(dtype)
    assert any(problem in found for found in outcome.problems), outcome.problems


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("silu", {"self in int64"}),
        ("copy_", {"self of shape [4, 1050]", "self of shape [1050]"}),
        ("embedding", {"indices in float32", "indices in float64"}),
        ("empty_strided", set()),
    ],
)
def test_what_pytorch_refuses_is_found_by_trying(name: str, refused: set[str]) -> None:
    found = {call.split(", ", 1)[1] for call, _ in refused_calls(catalog.operator(name), torch.device(DEVICE))}
    assert refused <= found and bool(refused) == bool(found)


def test_they_are_made_anew(spec: OperatorSpec) -> None:
    """What was tried may have been written by the operator."""
    one, other = (list(refused_calls(spec, torch.device(DEVICE))) for _ in range(2))
    assert [name for name, _ in one] == [name for name, _ in other]
    for (_, mine), (_, yours) in zip(one, other, strict=True):
        tensors = [(a, b) for a, b in zip(mine, yours, strict=True) if isinstance(a, torch.Tensor)]
        assert all(a is not b and torch.equal(a.cpu(), b.cpu()) for a, b in tensors)
