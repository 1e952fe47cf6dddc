"""How operators start their Triton programs: compiled once for a layout, then by addresses alone.

With a kernel in the place of Triton's that notes what it is launched with, so no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops.dropout.kernel import triton_level as dropout
from ops.embedding.backward.kernel import triton_level as embedding_backward
from ops.embedding.kernel import triton_level as embedding
from ops.scaled_dot_product_attention.kernel import triton_level as attention
from ops.silu.kernel import triton_level as silu
from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle.aten import launch, strided, triton_kernels

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="no program is run: the device is all the same")


class Kernel:
    """Notes its launches, those by Triton and those of what was compiled; ``real`` is a ``@triton.jit`` function."""

    def __init__(self, real: Any) -> None:
        self.arg_names = real.arg_names
        self.compiled: list[dict[str, Any]] = []
        self.started: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> Any:
            named = dict(zip(self.arg_names, arguments, strict=False)) | constants
            assert list(named) and set(named) == set(self.arg_names), "every parameter once"
            self.compiled.append({"grid": grid, **named})
            return Compiled(self)

        return run


class Compiled:
    packed_metadata = "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any) -> None:
            self.kernel.started.append({"grid": grid, **dict(zip(self.kernel.arg_names, arguments, strict=True))})

        return start


HOMES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "copy_tiles": (triton_kernels, strided._copying),
    "drop": (dropout, dropout._program),
    "gather_rows": (embedding, embedding._program),
    "sum_rows": (embedding_backward, embedding_backward._program),
    "attend": (attention, attention._program),
    "silu_elements": (silu, silu._program),
}
"""Where each kernel is looked up, and what remembers its launches."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernel]]:
    found = {}
    for name, (module, remembered) in HOMES.items():
        found[name] = Kernel(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
        remembered.cache_clear()  # type: ignore[attr-defined]
    yield found
    for _, remembered in HOMES.values():
        remembered.cache_clear()  # type: ignore[attr-defined]


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.ones(shape, dtype=dtype)
    assert made.data_ptr() % 16 == 0
    return made


def attend() -> None:
    x = aligned(1, 2, 3, 4)
    attention.scaled_dot_product_attention_triton(x, x, x, is_causal=True)


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a copy": ("copy_tiles", lambda: strided.triton_copy(aligned(6, 5), aligned(12, 5)[::2])),
    "a cast": ("copy_tiles", lambda: strided.triton_copy(aligned(6, 5), aligned(6, 5, dtype=torch.bfloat16))),
    "of pairs": ("copy_tiles", lambda: strided.triton_copy(*(aligned(4, dtype=torch.complex128) for _ in "ab"))),
    "a transposition": ("copy_tiles", lambda: strided.triton_copy(aligned(48, 32), aligned(32, 48).t())),
    "of narrow elements": (
        "copy_tiles",
        lambda: strided.triton_copy(aligned(41, 33, dtype=torch.uint8), aligned(33, 41, dtype=torch.uint8).t()),
    ),
    "dropout": ("drop", lambda: dropout.dropout_triton(aligned(6, 5), 0.5, True)),
    "embedding": ("gather_rows", lambda: embedding.embedding_triton(aligned(6, 4), torch.tensor([[1, 2]]))),
    "of embedding": (
        "sum_rows",
        lambda: embedding_backward.embedding_dense_backward_triton(aligned(2, 4), torch.tensor([1, 2]), 6, -1, False),
    ),
    "attention": ("attend", attend),
    "silu": ("silu_elements", lambda: silu.silu_triton(aligned(6, 5))),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_of_a_layout_is_started_at_once(name: str, kernels: dict[str, Kernel]) -> None:
    """With the arguments that Triton got at the first, but for the tensors, which are addresses."""
    kernel, call = kernels[CALLS[name][0]], CALLS[name][1]
    call()
    assert (len(kernel.compiled), kernel.started) == (1, [])
    call()
    assert len(kernel.compiled) == len(kernel.started) == 1
    first, second = kernel.compiled[0], kernel.started[0]
    assert second.pop("grid") == (*first.pop("grid"), 1, 1)
    for parameter, value in first.items():
        if hasattr(value, "data_ptr"):
            assert isinstance(second[parameter], int)
        else:
            assert second[parameter] == value, parameter


LARGE: dict[str, Callable[[], Any]] = {
    "copy_tiles": lambda: strided.triton_copy(aligned(100, 100), aligned(100, 100).t()),
    "drop": lambda: dropout.dropout_triton(aligned(9000), 0.5, True),
    "gather_rows": lambda: embedding.embedding_triton(aligned(6, 4096), torch.tensor([1] * 9)),
    "sum_rows": lambda: embedding_backward.embedding_dense_backward_triton(
        aligned(9, 4), torch.tensor([1] * 9), 6, -1, False
    ),
    "attend": lambda: attention.scaled_dot_product_attention_triton(*[aligned(2, 3, 3, 4)] * 3),
    "silu_elements": lambda: silu.silu_triton(aligned(9000)),
}
"""Work for more than three programs, by kernel."""


@pytest.mark.parametrize("name", HOMES)
def test_no_grid_is_larger_than_the_device_accepts(
    name: str, kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (strided, HOMES[name][0]):  # each looks it up where it imports it
        monkeypatch.setattr(module, "most_programs", lambda device: 3, raising=False)
    LARGE[name]()
    assert [launched["grid"] for launched in kernels[name].compiled] == [(3,)]


ALIKE: dict[str, Callable[[], list[Any]]] = {
    "item sizes": lambda: [
        strided.triton_copy(aligned(8, dtype=dtype), aligned(8, dtype=dtype))
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
    ],
    "dtypes converted to": lambda: [
        strided.triton_copy(aligned(8, dtype=dtype), aligned(8)) for dtype in (torch.float32, torch.bfloat16)
    ],
    "strides": lambda: [strided.triton_copy(aligned(8), aligned(8 * step)[::step]) for step in (1, 2, 3)],
    "probabilities": lambda: [dropout.dropout_triton(aligned(8), p, True) for p in (0.1, 0.2)],
    "tables": lambda: [embedding.embedding_triton(aligned(n, 4), torch.tensor([1])) for n in (2, 3)],
    "kinds of indices": lambda: [
        embedding.embedding_triton(aligned(4, 4), torch.tensor([1], dtype=dtype))
        for dtype in (torch.int32, torch.int64)
    ],
    "paddings": lambda: [
        embedding_backward.embedding_dense_backward_triton(aligned(1, 4), torch.tensor([1]), 4, padding, mean)
        for padding in (-1, 1)
        for mean in (False, True)
    ],
    "scales": lambda: [
        attention.scaled_dot_product_attention_triton(*[aligned(1, 2, 3, 4)] * 3, is_causal=causal, scale=scale)
        for causal in (False, True)
        for scale in (None, 0.25)
    ],
}
"""Calls that are alike, but for what is named."""


@pytest.mark.parametrize("what", ALIKE)
def test_calls_that_differ_have_launches_of_their_own(what: str, kernels: dict[str, Kernel]) -> None:
    calls = len(ALIKE[what]())
    assert sum(len(kernel.compiled) for kernel in kernels.values()) == calls
    assert not any(kernel.started for kernel in kernels.values())


@pytest.mark.parametrize(("target", "most"), [("cuda", 2**31 - 1), ("hip", 65535), ("xpu", 65535)])
def test_the_largest_grid_is_of_what_triton_compiles_for(
    target: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's and Kunlunxin's devices are ``cuda`` to PyTorch as well."""
    import triton

    driver = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend=target))
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda _: driver))
    launch._target.cache_clear()
    assert launch.most_programs(torch.device("cuda", 0)) == most
    assert launch.most_programs(torch.device("cpu")) == 65535
    launch._target.cache_clear()
