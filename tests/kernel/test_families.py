"""Every family of the default config, whole: what is installed where, the numbers, and the way back.

All chains are set to ``loopback``, the ops' references, so everything but the kernels themselves is exercised. What is
installed on how many instances is in ``golden/families.json``. After a change that means to move it:

    python -m tests.kernel.test_families
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.models import (
    clean_process,  # noqa: F401
    differences,
    installed,
    look,
    mapping,
    rows_of,
    same_bits,
    step,
)
from twinkle import presets
from twinkle.commands.comparison import comparable_inputs
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
from twinkle.kernel.report import short
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

GOLDEN = Path(__file__).with_name("golden") / "families.json"
FAMILIES: dict[str, dict[str, int]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}

# Installed, but the preset's configuration calls the other of two functions.
NOT_CALLED = {"deepseek_v3": {"deepseek_v3.apply_rotary_pos_emb"}}


def test_every_preset_has_a_golden_entry():
    assert FAMILIES.keys() == presets.PRESETS.keys()


def test_every_default_entry_is_exercised_by_a_preset():
    exercised = {target for family in FAMILIES.values() for target in family}
    assert exercised == {short(target) for target in DEFAULT_KERNEL_CONFIG if "." in target}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", presets.PRESETS)
def test_loopback(name, dtype):
    model = presets.build(name, dtype=dtype)
    original, bits = copy.deepcopy(model), step(model)
    before = look(model)  # transformers notes things on modules at the first call

    kernelize(model, mapping("loopback"))
    assert installed(model) == FAMILIES[name]
    inputs = next(comparable_inputs(original, model))
    comparisons = compare_models(original, model, inputs, presets.loss)
    assert [c for c in comparisons if c.used > 1] == []
    assert {c.name for c in comparisons} >= {f"gradient of {n}" for n in bits if n != "logits"}
    rows = rows_of(model)
    assert {target for target, row in rows.items() if row.state != "installed"} == set()
    assert {target for target, row in rows.items() if row.fallbacks or row.counts.errors} == set()
    assert {target for target, row in rows.items() if not row.calls} == NOT_CALLED.get(name, set())

    undone = unkernelize(model)
    assert undone.not_undone == ()
    assert differences(before, look(model)) == []
    assert same_bits(step(model), bits)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_refuse(name):
    model = presets.build(name)
    before = look(model)
    kernelize(model, mapping("refuse"))
    rows = rows_of(model)
    assert {target: row.instances for target, row in rows.items()} == FAMILIES[name]
    assert {row.state for row in rows.values()} == {"refused"}
    assert {row.why() for row in rows.values()} == {"refuse: refuse refuses everything"}
    assert differences(before, look(model)) == []


def regenerate() -> None:
    from twinkle.kernel.testing import register_test_backends

    register_test_backends()
    found = {}
    for name in presets.PRESETS:
        model = kernelize(presets.build(name), mapping("loopback"))
        found[name] = dict(sorted(installed(model).items()))
        unkernelize(model)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    regenerate()
