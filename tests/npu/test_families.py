"""Every family of the default config on the NPU: who serves it, and the numbers of output, loss and all gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from twinkle import presets
from twinkle.commands.verify import ALL, OK, compare_entry
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
from twinkle.kernel.ops.sdpa_attention.inputs import UNSERVED
from twinkle.kernel.ops.sdpa_attention.installer import _uses_sdpa
from twinkle.kernel.report import report, short
from twinkle.kernel.undo import unkernelize

ENTRIES = {target: choice for target, choice in DEFAULT_KERNEL_CONFIG.items() if choice.op != "fla"}

LEFT_TO_THE_ORIGINAL = {
    ("moe_experts", torch.float32): "torch_npu permutes tokens of bf16 only",
    ("rotary", torch.float32): "torch_npu turns neighbouring channels by one table for the whole batch only",
    ("rotary", torch.bfloat16): "torch_npu turns neighbouring channels by one table for the whole batch only",
    ("sdpa_attention", torch.float32): UNSERVED["softcap"],
    ("sdpa_attention", torch.bfloat16): UNSERVED["softcap"],
}
"""The calls that a kernel doesn't take; those of rotary are some tables of DeepSeek-V4's, of attention Gemma 2's."""

NOT_CALLED = {"deepseek_v3.apply_rotary_pos_emb"}
"""The preset's configuration calls the other of two functions."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_family(name: str, dtype: torch.dtype) -> None:
    original = presets.build(name, dtype=dtype, device="npu")
    outcome = compare_entry(original, ALL, ENTRIES)
    assert (outcome.verdict, outcome.backends) == (OK, ["npu"]), outcome

    model = kernelize(presets.build(name, dtype=dtype, device="npu"), ENTRIES)
    model(**presets.inputs(model, device="npu"))
    rows = [row for row in report(model).rows if row.state != "unused"]
    for key, layers in (("sdpa", _uses_sdpa),):
        if not any(map(layers, model.modules())):
            row = rows.pop(next(i for i, row in enumerate(rows) if row.target == key))
            assert (row.state, row.why()) == ("refused", "the installer found no site in this model")
    assert rows and {(row.state, row.backend) for row in rows} == {("installed", "npu")}
    for row in rows:
        left = {LEFT_TO_THE_ORIGINAL.get((str(row.op), dtype))}
        assert row.errors == 0 and set(row.fallbacks) <= left, (short(row.target), row.fallbacks)
        assert row.calls or row.fallbacks or short(row.target) in NOT_CALLED, f"{short(row.target)} was not called"
    assert unkernelize(model).not_undone == ()
