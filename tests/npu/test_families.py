"""Every family of the default config on the NPU: who serves it, and the numbers of output, loss and all gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from twinkle import presets
from twinkle.commands.comparison import ALL, OK, compare_entry
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
from twinkle.kernel.config import default_chain
from twinkle.kernel.ops.fla.npu import NO_GRADIENT, NOT_PACKED
from twinkle.kernel.ops.sdpa_attention.inputs import UNSERVED
from twinkle.kernel.report import report, short
from twinkle.kernel.undo import unkernelize

LEFT_TO_THE_ORIGINAL = {
    "rotary": {"torch_npu turns neighbouring channels by one table for the whole batch only"},
    "sdpa_attention": {UNSERVED["softcap"], "values of another width than queries"},
    "fla": {NO_GRADIENT, NOT_PACKED},
}
"""The calls that a kernel doesn't take: tables of DeepSeek-V4's, attention of Gemma 2 and DeepSeek-V3, training."""

IN_FP32 = {"moe_experts": {"torch_npu permutes tokens of bf16 only"}}

NOTHING_TO_FUSE = "without a shared expert a block only calls its router and its experts"

NOT_CALLED = {"deepseek_v3.apply_rotary_pos_emb"}
"""The preset's configuration calls the other of two functions."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_family(name: str, dtype: torch.dtype) -> None:
    original = presets.build(name, dtype=dtype, device="npu")
    outcome = compare_entry(original, ALL, DEFAULT_KERNEL_CONFIG)
    assert (outcome.verdict, outcome.backends) == (OK, ["npu"]), outcome

    model = kernelize(presets.build(name, dtype=dtype, device="npu"))
    model(**presets.inputs(model, device="npu"))
    rows = [row for row in report(model).rows if row.state != "unused" and "npu" in default_chain(str(row.op))]
    shared = any(name.endswith(".shared_expert") for name, _ in model.named_modules())
    blocks = [row for row in rows if row.op == "moe_block" and not shared]
    assert all(row.state == "refused" and row.why() == f"npu: {NOTHING_TO_FUSE}" for row in blocks), blocks
    rows = [row for row in rows if row not in blocks]
    assert rows and {(row.state, row.backend) for row in rows} == {("installed", "npu")}
    for row in rows:
        left = (LEFT_TO_THE_ORIGINAL | (IN_FP32 if dtype == torch.float32 else {})).get(str(row.op), set())
        assert row.errors == 0 and set(row.fallbacks) <= left, (short(row.target), row.fallbacks)
        assert row.calls or row.fallbacks or short(row.target) in NOT_CALLED, f"{short(row.target)} was not called"
    assert unkernelize(model).not_undone == ()
