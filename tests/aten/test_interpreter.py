"""Triton's interpreter as it is, in a process in which nobody has mended it, as these tests have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.aten.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the same whatever the device")


@pytest.mark.multiprocess
def test_numbers_that_it_cuts_off_are_pytorchs() -> None:
    """It takes conversions to bfloat16 for that; what only moves bits, and other dtypes, is the kernels'."""
    code = """
import torch
from torch.nn.functional import dropout, embedding, silu
from twinkle.aten import install
x = torch.tensor([1.0078, 3.4e38, 0.30999, 1.0])
def work(dtype):
    table = torch.full((2, 4), 0.3, dtype=dtype, requires_grad=True)
    (1.0039 * embedding(torch.tensor([1, 1]), table)).sum().backward()
    torch.manual_seed(0)
    return [torch.empty(4, dtype=dtype).copy_(x), x.type_as(torch.ones(1, dtype=dtype)), table.grad,
            silu(x.to(dtype)), *([dropout(x.to(dtype).clamp(max=9), 0.3)] if dtype is torch.bfloat16 else [])]
native = {dtype: work(dtype) for dtype in (torch.bfloat16, torch.float16)}
with install(["copy_", "type_as", "embedding", "silu", "dropout"], platform="cpu") as installed:
    for dtype, expected in native.items():
        found = work(dtype)
        assert all(torch.allclose(a, b, rtol=1e-3, atol=0) if dtype is torch.float16 else torch.equal(a, b)
                   for a, b in zip(found, expected, strict=True)), (found, expected)
    for name, made in installed.registrations.items():
        print(name, made.level, made.counts.kernel > 0, "interpreter" in made.counts.fallbacks)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "copy_ triton True True",
        "dropout triton False True",
        "embedding triton True False",
        "silu triton True True",
        "type_as triton True True",
    ]
