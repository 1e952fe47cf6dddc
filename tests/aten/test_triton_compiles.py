"""The Triton programs compile for a GPU, in every form in which they are launched; no GPU is needed for that."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ops.dropout.kernel import programs
from ops.embedding.backward.kernel.programs import sum_rows
from ops.embedding.kernel.programs import gather_rows
from ops.scaled_dot_product_attention.kernel.programs import attend
from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle.aten import triton_kernels

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="the compiler is the same whatever the device")


def compile_for_gpu(
    function: Any, signature: dict[str, Any], constants: dict[str, Any], known: dict[Any, Any] | None = None
) -> Any:
    """``known``: what the compiler may take for granted of arguments, by place."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=known)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


LAYOUTS = ("sizes", "to_strides", "source_strides")
ONCE = pytest.mark.parametrize("once", [False, True])
WIDE = pytest.mark.parametrize("wide", [False, True])


def loops(compiled: Any) -> int:
    return compiled.asm["ttgir"].count("scf.for")


@pytest.mark.parametrize(("to", "source"), [("*u8", "*u8"), ("*i64", "*i64"), ("*bf16", "*fp32"), ("*fp32", "*fp16")])
@pytest.mark.parametrize(("batch", "few", "rows"), [((), 1, 1), (("i32",), 3, 32), (("i32", "i32"), 1, 64)])
@WIDE
@ONCE
def test_copy_tiles(to: str, source: str, batch: tuple[str, ...], few: int, rows: int, wide: bool, once: bool) -> None:
    signature = {"to": to, "source": source, **tile("i64" if wide else "i32"), **dict.fromkeys(LAYOUTS, batch)}
    constants = copying(RANK=len(batch), FEW=few, TOGETHER=4 if few == 3 else few, WIDE=wide, ONCE=once, ROWS=rows)
    assert loops(compile_for_gpu(triton_kernels.copy_tiles, signature, constants)) == (not once)


def tile(integer: str) -> dict[str, str]:
    numbers = ("rows", "columns", "batches", "to_row", "to_column", "source_row", "source_column")
    return dict.fromkeys(numbers, integer)


def copying(**constants: Any) -> dict[str, Any]:
    usual = {"RANK": 0, "FEW": 1, "TOGETHER": 1, "UNIT": 1, "TURNED": False, "PACK": 1, "WIDE": False, "ONCE": True}
    return {**usual, "ROWS": 32, "COLUMNS": 64, **constants}


@pytest.mark.parametrize(("element", "few", "bits"), [("*i64", 2, 128), ("*i16", 2, 32), ("*u8", 4, 32)])
@pytest.mark.parametrize("turned", [False, True])
def test_few_elements_are_moved_at_once(element: str, few: int, bits: int, turned: bool) -> None:
    """Where strides are multiples of them: an access each for all that lies side by side, and a warp's accesses are
    neighbours."""
    signature = {"to": element, "source": element, **tile("i32"), **dict.fromkeys(LAYOUTS, ())}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    constants = copying(FEW=few, TOGETHER=few, UNIT=few, TURNED=turned)
    compiled = compile_for_gpu(triton_kernels.copy_tiles, signature, constants, aligned)
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    assert {int(many or 1) * int(width) for many, width in accesses} == {bits}
    layouts = dict(re.findall(r"(#blocked\d*) = .*threadsPerWarp = \[([\d, ]+)\]", compiled.asm["ttgir"]))
    places = re.findall(r"tt\.(?:load|store) .*tensor<(\d+)x.*, (#blocked\d*)>", compiled.asm["ttgir"])
    columns_first, rows_first = ("64", "32, 1, 1"), ("32", "32, 1, 1")
    expected = [rows_first if turned else columns_first, columns_first]
    assert [(size, layouts[layout]) for size, layout in places] == expected, "the densest side, along which a warp goes"


@pytest.mark.parametrize(("element", "bits"), [("*u8", 8), ("*i16", 16)])
@WIDE
@ONCE
def test_narrow_elements_are_written_as_words(element: str, bits: int, wide: bool, once: bool) -> None:
    """They are read one by one, by a warp every fourth along the source; whole words are written, along the
    destination."""
    signature = {"to": element, "source": element, **tile("i64" if wide else "i32"), **dict.fromkeys(LAYOUTS, ())}
    constants = copying(source_row=1, to_column=1, TURNED=True, PACK=4, WIDE=wide, ONCE=once, ROWS=128, COLUMNS=128)
    compiled = compile_for_gpu(triton_kernels.copy_tiles, signature, constants)
    assert loops(compiled) == (not once)
    assert set(re.findall(r"ld\.global\S*?\.b(\d+)", compiled.asm["ptx"])) == {str(bits)}
    assert set(re.findall(r"st\.global\S*?\.b(\d+)", compiled.asm["ptx"])) == {str(bits), str(4 * bits)}
    layouts = dict(re.findall(r"(#blocked\d*) = .*threadsPerWarp = \[([\d, ]+)\]", compiled.asm["ttgir"]))
    places = re.findall(r"tt\.(?:load|store) .*tensor<([\dx]+)x!.*, (#blocked\d*)>", compiled.asm["ttgir"])
    assert [(size, layouts[layout]) for size, layout in places[:2]] == [
        ("32x4x32x4", "32, 1, 1, 1"),
        ("32x4x32", "1, 1, 32"),
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@WIDE
@ONCE
def test_drop(dtype: str, wide: bool, once: bool) -> None:
    signature = {"to": f"*{dtype}", "source": f"*{dtype}", "seed": "*i64", "total": "i64" if wide else "i32"}
    constants = {"THRESHOLD": 2**32 - 1, "SCALE": 1.5, "WIDE": wide, "ONCE": once, "BLOCK": 512}
    assert loops(compile_for_gpu(programs.drop, signature, constants)) == (not once)


@pytest.mark.parametrize("rows", [1, 8, 2048])
@pytest.mark.parametrize("element", ["*u8", "*i16", "*i64"])
def test_gather_rows(element: str, rows: int) -> None:
    numbers = dict.fromkeys(("entries", "width", "row_stride", "column_stride", "total"), "i32")
    signature = {"to": element, "weight": element, "indices": "*i64", **numbers}
    assert compile_for_gpu(gather_rows, signature, {"ROWS": rows, "COLUMNS": 2048 // rows}).asm["cubin"]


@pytest.mark.parametrize(("dtype", "indices"), [("fp32", "i64"), ("bf16", "i32"), ("fp64", "i64")])
def test_sum_rows(dtype: str, indices: str) -> None:
    import triton.language as tl

    signature = {"to": f"*{dtype}", "grads": f"*{dtype}", "rows": f"*{indices}", "positions": "*i64", "ends": "*i64"}
    signature |= dict.fromkeys(("width", "padding", "total", "grad_stride", "column_stride"), "i32")
    constants = {"MEAN": True, "WIDE": tl.float64 if dtype == "fp64" else tl.float32, "BLOCK": 1024}
    assert compile_for_gpu(sum_rows, signature, constants).asm["cubin"]


@pytest.mark.parametrize(("dtype", "mask"), [("fp32", 2), ("bf16", 0), ("bf16", 1), ("fp16", 2), ("fp64", 2)])
@pytest.mark.parametrize(("width", "out_width"), [(64, 64), (16, 32), (128, 256)])
def test_attend(dtype: str, mask: int, width: int, out_width: int) -> None:
    signature = dict.fromkeys(("to", "query", "key", "value"), f"*{dtype}")
    signature["mask"] = "*u8" if mask == 1 else f"*{dtype}"
    signature |= dict.fromkeys(
        ("to_strides", "query_strides", "key_strides", "value_strides", "mask_strides"), ("i32",) * 4
    )
    signature |= dict.fromkeys(("blocks", "heads", "group", "queries", "keys", "width", "out_width", "total"), "i32")
    double = dtype == "fp64"
    rows = 16 if double else 64
    constants = {"SCALE": 0.125, "MASK": mask, "CAUSAL": mask == 0, "DOUBLE": double, "ROWS": rows, "COLUMNS": rows}
    constants |= {"WIDTH": width, "OUT_WIDTH": out_width, "ONCE": width > 16}
    assert compile_for_gpu(attend, signature, constants).asm["cubin"]
