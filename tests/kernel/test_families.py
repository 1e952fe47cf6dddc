"""Every family of the default config, whole: what is installed where, the numbers, and the way back.

All chains are set to ``loopback``, the ops' references, so everything but the kernels themselves is exercised. What is
installed on how many instances is in ``golden/families.json``. After a change that means to move it:

    python -m tests.kernel.test_families
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

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
from twinkle.kernel import kernelize
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import compare_models

GOLDEN = Path(__file__).with_name("golden") / "families.json"
FAMILIES: dict[str, dict[str, int]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}

# Installed, but the preset's configuration calls the other of two functions.
NOT_CALLED = {"deepseek_v3": {"deepseek_v3.apply_rotary_pos_emb"}}


def chosen_experts(model: torch.nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The experts that each layer's router chooses for each token, as sorted indices ``[tokens, k]``."""
    chosen: list[torch.Tensor] = []

    def note(module: Any, args: Any, result: Any) -> None:
        results = result if isinstance(result, tuple) else (result,)
        chosen.extend(r.sort(dim=-1).values for r in results if isinstance(r, torch.Tensor) and r.dtype == torch.int64)

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("router")]
    hooks = [router.register_forward_hook(note) for router in routers]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return chosen


def inputs_routed_alike(model: torch.nn.Module) -> dict[str, Any]:
    """Inputs for which the model routes every token as it does in fp64.

    Where rounding alone decides about an expert, the original is far from its own reference, and the judgement, which
    allows a kernel twice that, would allow anything.
    """
    exact = copy.deepcopy(model).double()
    if hasattr(model.config, "_experts_implementation"):
        exact.set_experts_implementation("eager")
    for seed in range(40):
        inputs = presets.inputs(model, seed=seed)
        double = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        if all(map(torch.equal, chosen_experts(model, inputs), chosen_experts(exact, double))):
            return inputs
    raise AssertionError("no inputs that are routed alike")


def test_every_preset_has_a_golden_entry():
    assert FAMILIES.keys() == presets.PRESETS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", presets.PRESETS)
def test_loopback(name, dtype):
    model = presets.build(name, dtype=dtype)
    inputs = inputs_routed_alike(model)
    original, before, bits = copy.deepcopy(model), look(model), step(model, inputs)
    experts = chosen_experts(model, inputs)

    kernelize(model, mapping("loopback"))
    assert installed(model) == FAMILIES[name]
    assert all(map(torch.equal, chosen_experts(model, inputs), experts))  # else tokens would have to be excluded
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
    assert same_bits(step(model, inputs), bits)


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
