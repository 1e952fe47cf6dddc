"""The Triton programs that only interpreters have run so far compile for a GPU, in the forms in which they are used."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from tests.support.gpu_compiler import compiled_for_gpu
from twinkle.kernel.ops.fused_norms import add_kernels, qk_kernels
from twinkle.kernel.ops.moe import triton_block, triton_kernels, triton_launch, triton_router, triton_routing
from twinkle.kernel.ops.rms_norm import triton_kernels as rms_norm_kernels
from twinkle.loss import triton_token_losses

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ or torch.cuda.is_available(), reason="needs Triton's compiler, and a GPU runs them"
)

FLOATS = dict.fromkeys(
    ("limit", "alpha", "offset", "smoothing", "z_loss", "scale", "softcap", "total_weight", "hard_share"), "fp32"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED = 227 * 1024
"""What a program of an H200 may use of its multiprocessor's memory, in bytes."""


def tensors(dtype: str, **others: str) -> dict[str, str]:
    names = [
        "x",
        "weight",
        "bias",
        "gate_up",
        "out",
        "a",
        "b",
        "y",
        "grad",
        "dgate_up",
        "product",
        "back",
        "weights",
        "logits",
    ]
    types = {f"{name}_ptr": f"*{dtype}" for name in names} | FLOATS
    return types | {"slots_ptr": "*i64", "ends_ptr": "*i32", "places_ptr": "*i32", "share_ptr": "*fp32"} | others


def compiled(function: Any, dtype: str, tiles: triton_launch.Tiles | None, room: int = SHARED, **constants: Any) -> Any:
    options = {}
    if tiles is not None:
        tiles = tiles.within(room, DTYPES[dtype], weights=2 if function is triton_kernels.up_kernel else 1)
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        shape = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "INNER": tiles.inner}
        constants |= {"PRECISION": "ieee" if dtype == "fp32" else "tf32"} | shape
        constants |= {"EXPERTS": 128, "GROUP": tiles.group} if "EXPERTS" in function.arg_names else {}
    program = compiled_for_gpu(function, tensors(dtype), constants, **options)
    assert program.asm["cubin"] and program.metadata.shared <= room
    return program


GATE = {"ACTIVATION": "silu", "CLAMPED": False}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_products_of_experts(dtype: str) -> None:
    no_bias = {"BIAS": False, "bias_ptr": None}
    program = compiled(triton_kernels.up_kernel, dtype, triton_launch.UP, KEEP=True, **no_bias, **GATE)
    assert dtype == "fp32" or "wgmma" in program.asm["ptx"], "by the tensor cores' own instructions"
    compiled(triton_kernels.rows_kernel, dtype, triton_launch.ROWS, PARTS=1, **no_bias)
    compiled(triton_kernels.rows_kernel, dtype, triton_launch.ROWS, PARTS=2, **no_bias)
    compiled(triton_kernels.gate_backward_kernel, dtype, triton_launch.GATE_BACKWARD, **GATE)
    for a_tokens in (True, False):
        tokens = {"A_TOKENS": a_tokens, "B_TOKENS": not a_tokens}
        compiled(triton_kernels.weight_kernel, dtype, triton_launch.WEIGHT, **tokens, **no_bias)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_on_a_gpu_with_less_shared_memory(dtype: str) -> None:
    """99 KiB, as of GPUs for people who play."""
    options = {"BIAS": False, "bias_ptr": None, "room": 99 * 1024}
    compiled(triton_kernels.up_kernel, dtype, triton_launch.UP, KEEP=True, **options, **GATE)
    compiled(triton_kernels.rows_kernel, dtype, triton_launch.ROWS, PARTS=1, **options)
    compiled(triton_kernels.gate_backward_kernel, dtype, triton_launch.GATE_BACKWARD, room=99 * 1024, **GATE)
    tokens = {"A_TOKENS": False, "B_TOKENS": True}
    compiled(triton_kernels.weight_kernel, dtype, triton_launch.WEIGHT, **tokens, **options)


def test_the_route() -> None:
    types = dict.fromkeys(("counts_ptr", "totals_ptr", "ends_ptr", "places_ptr"), "*i32")
    types |= dict.fromkeys(("index_ptr", "slots_ptr", "tokens_ptr"), "*i64")
    shape = {"EXPERTS": 128, "BLOCK": triton_routing.CELLS // 128}
    for function in (triton_routing.count_kernel, triton_routing.place_kernel):
        assert compiled_for_gpu(function, types, shape, num_warps=8).asm["cubin"]
    assert compiled_for_gpu(triton_routing.scan_kernel, types, {"BLOCKS": 512}, num_warps=4).asm["cubin"]


@pytest.mark.parametrize(("dtype", "scores"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")])
@pytest.mark.parametrize("normalized", [True, False])
def test_the_router(dtype: str, scores: str, normalized: bool) -> None:
    types = {"logits_ptr": f"*{dtype}", "dlogits_ptr": f"*{dtype}", "index_ptr": "*i64"}
    types |= dict.fromkeys(("scores_ptr", "grad_ptr"), f"*{scores}")
    shape = {"TOP_K": 8, "NORMALIZED": normalized, "WIDTH": 128, "BLOCK": triton_router.CELLS // 128}
    assert compiled_for_gpu(triton_router.choose_kernel, types, {**shape, "CHOICES": 8}, num_warps=4).asm["cubin"]
    assert compiled_for_gpu(triton_router.choose_backward_kernel, types, shape, num_warps=4).asm["cubin"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_shared_expert(dtype: str) -> None:
    names = ("routed", "gate", "shared", "out", "grad", "dgate", "dshared")
    types = dict.fromkeys((f"{name}_ptr" for name in names), f"*{dtype}")
    for function in (triton_block.join_kernel, triton_block.join_backward_kernel):
        assert compiled_for_gpu(function, types, {"COLUMNS": 1024}, num_warps=4).asm["cubin"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("cast", "offset"), [("before", 0.0), ("after", 1.0)])
@pytest.mark.parametrize("rest", [0, 128])
def test_norms_and_rotary(dtype: str, cast: str, offset: float, rest: int) -> None:
    names = ("q", "k", "q_out", "k_out", "qw", "kw", "cos", "sin", "dq_out", "dk_out", "dq", "dk", "dqw", "dkw")
    types = dict.fromkeys((f"{name}_ptr" for name in names), f"*{dtype}")
    types |= {"partial_ptr": "*fp32", "arrived_ptr": "*i32", "q_eps": "fp32", "k_eps": "fp32"}
    shape = {"OFFSET": offset, "Q_HEADS": 8, "K_HEADS": 4, "PAIRS": 64, "REST": rest, "FAR": False}
    assert compiled_for_gpu(qk_kernels.forward_kernel, types, {**shape, "CAST": cast}, num_warps=4).asm["cubin"]
    sums = {"NEEDS_DW": True, "GROUP": 16, "WEIGHTS": 256}
    assert compiled_for_gpu(qk_kernels.backward_kernel, types, {**shape, **sums}, num_warps=4).asm["cubin"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sum_and_its_norm(dtype: str) -> None:
    names = ("residual", "summand", "w", "total", "y", "dtotal", "dy", "dx", "dw")
    types = dict.fromkeys((f"{name}_ptr" for name in names), f"*{dtype}")
    types |= {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "arrived_ptr": "*i32", "eps": "fp32"}
    shape = {"OFFSET": 0.0, "ROWS": 2, "BLOCK": 1024}
    assert compiled_for_gpu(add_kernels.forward_kernel, types, {**shape, "CAST": "before"}, num_warps=4).asm["cubin"]
    sums = {"NEEDS_DW": True, "GROUP": 16, "STAGES": 3}
    assert compiled_for_gpu(add_kernels.backward_kernel, types, {**shape, **sums}, num_warps=4).asm["cubin"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("absent", [("gate", "dgate"), ("gate", "dgate", "dw"), ("w", "gate", "dgate", "dw"), ()])
def test_the_backward_of_a_norm(dtype: str, absent: tuple[str, ...]) -> None:
    names = ("dy", "x", "w", "gate", "dx", "dw", "dgate")
    types = dict.fromkeys((f"{name}_ptr" for name in names), f"*{dtype}")
    types |= {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "arrived_ptr": "*i32", "eps": "fp32"}
    has = {"HAS_WEIGHT": "w" not in absent, "NEEDS_DW": "dw" not in absent}
    constants = {"OFFSET": 0.0, "FAR": False, **has, **{f"{name}_ptr": None for name in absent}}
    sums = {} if has["NEEDS_DW"] else {"partial_ptr": None, "arrived_ptr": None}
    shape = {"HAS_GATE": "gate" not in absent, "ROWS": 2, "BLOCK": 1024, "GROUP": 16, "STAGES": 3}
    backward = constants | sums | shape
    assert compiled_for_gpu(rms_norm_kernels.backward_kernel, types, backward, num_warps=4).asm["cubin"]
    if "gate" in absent:
        wide = {name: value for name, value in constants.items() if name not in ("gate_ptr", "dgate_ptr", "dw_ptr")}
        wide |= {"BLOCK": 8192} | ({} if has["NEEDS_DW"] else {"rstd_ptr": None})
        assert compiled_for_gpu(rms_norm_kernels.wide_backward_kernel, types, wide, num_warps=16).asm["cubin"]


def as_a_compiler_calls(function: Any, dtype: str, constants: dict[str, Any]) -> str:
    """The program in Triton's own terms, with Python's numbers as ``torch.compile`` hands them over: in fp64."""
    types = {name: f"*{dtype}" for name in function.arg_names if name.endswith("_ptr")}
    types |= {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "arrived_ptr": "*i32"}
    types |= {name: "fp64" for name in function.arg_names if name.endswith("eps")}
    return str(compiled_for_gpu(function, types, constants, num_warps=4).asm["ttir"])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_norms_in_a_compiled_model_compute_nothing_in_fp64(dtype: str) -> None:
    shape = {"OFFSET": 0.0, "ROWS": 2, "BLOCK": 1024}
    norm = {**shape, "CAST": "before", "HAS_WEIGHT": True, "HAS_GATE": False, "FAR": False}
    heads = {"OFFSET": 0.0, "Q_HEADS": 8, "K_HEADS": 4, "PAIRS": 64, "REST": 0, "FAR": False}
    backward = {"OFFSET": 0.0, "HAS_WEIGHT": True, "NEEDS_DW": True, "FAR": False}
    programs = [
        (rms_norm_kernels.forward_kernel, {**norm, "LOOP": False}),
        (rms_norm_kernels.forward_kernel, {**norm, "LOOP": True}),
        (rms_norm_kernels.backward_kernel, {**backward, **shape, "HAS_GATE": False, "GROUP": 16, "STAGES": 3}),
        (rms_norm_kernels.wide_backward_kernel, {**backward, "BLOCK": 8192}),
        (add_kernels.forward_kernel, {**shape, "CAST": "before"}),
        (qk_kernels.forward_kernel, {**heads, "CAST": "before"}),
        (qk_kernels.backward_kernel, {**heads, "NEEDS_DW": True, "GROUP": 16, "WEIGHTS": 256}),
    ]
    for function, constants in programs:
        lines = [line for line in as_a_compiler_calls(function, dtype, constants).splitlines() if "f64" in line]
        assert lines and all("tt.func" in line or "arith.truncf" in line for line in lines), lines


def test_experts_of_another_kind() -> None:
    gate = {"ACTIVATION": "gelu", "CLAMPED": True}
    compiled(triton_kernels.up_kernel, "bf16", triton_launch.UP, KEEP=False, BIAS=True, gate_up_ptr=None, **gate)
    compiled(triton_kernels.rows_kernel, "bf16", triton_launch.ROWS, PARTS=1, BIAS=True)
    tokens = {"A_TOKENS": False, "B_TOKENS": True}
    compiled(triton_kernels.weight_kernel, "bf16", triton_launch.WEIGHT, BIAS=True, **tokens)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_lies_between_the_products(dtype: str) -> None:
    compiled(triton_kernels.gate_kernel, dtype, None, COLUMNS=1024, **GATE)
    compiled(triton_kernels.gate_backward_rows_kernel, dtype, None, COLUMNS=1024, **GATE)
    compiled(triton_kernels.weighted_sums_kernel, dtype, None, ROWS=32, COLUMNS=128)
    compiled(triton_kernels.combine_kernel, dtype, None, WEIGHTED=True, COLUMNS=1024)
    compiled(triton_kernels.combine_kernel, dtype, None, WEIGHTED=False, weights_ptr=None, COLUMNS=1024)


LOSSES = [*itertools.product(["bf16"], *[[True, False]] * 3), ("fp32", True, True, True), ("fp16", False, False, False)]


@pytest.mark.parametrize(("dtype", "weight", "smoothing", "softcap"), LOSSES)
def test_the_losses_of_tokens(dtype: str, weight: bool, smoothing: bool, softcap: bool) -> None:
    types = tensors(dtype, target_ptr="*i64", class_weight_ptr="*fp32", upstream_ptr="*fp32", loss_ptr="*fp32")
    constants: dict[str, Any] = {"HAS_WEIGHT": weight, "SMOOTHING": smoothing, "SOFTCAP": softcap, "GRADIENT": True}
    if not weight:
        constants |= {"class_weight_ptr": None}
    block = {"BLOCK": triton_token_losses.BLOCK}
    program = compiled_for_gpu(triton_token_losses.token_losses_kernel, types, constants | block, num_warps=16)
    assert program.asm["cubin"]
