"""What no entry covers is named, with the config line that covers it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from tests.support import toys
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.config import default_chain
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.usefixtures("loopback")


def choice(op: str, *backends: str) -> KernelChoice:
    return KernelChoice(op, backends or ("loopback",))


def config_of(part: Any, model: nn.Module) -> dict[Any, KernelChoice]:
    """The config line as a user would paste it."""
    line = part.config_line.replace("backends=(", 'backends=("loopback", ')
    return eval("{" + line + "}", {"KernelChoice": KernelChoice, "model": model})


def test_a_custom_models_parts_are_named_and_the_line_covers_them() -> None:
    model = toys.toy()
    parts = {part.target: part for part in plan(model).uncovered}
    assert {target: (part.op, part.instances) for target, part in parts.items()} == {
        "tests.support.toys.ToyNorm": ("rms_norm", 4),
        "tests.support.toys.ToyMLP.forward": ("swiglu", 2),
        "tests.support.toys.apply_rope": ("rotary", 1),
        "tests.support.toys.OddNorm": (None, 1),
    }
    odd = parts.pop("tests.support.toys.OddNorm")
    assert odd.config_line is None and odd.reason == "no op computes what it does"
    chain = ", ".join(f'"{backend}"' for backend in default_chain("rms_norm"))
    assert parts["tests.support.toys.ToyNorm"].config_line == (
        f'"tests.support.toys.ToyNorm": KernelChoice(op="rms_norm", backends=({chain})),'
    )
    table = plan(model).table(width=200)
    assert all(part.config_line in table for part in parts.values())
    mapping = {key: value for part in parts.values() for key, value in config_of(part, model).items()}
    kernelize(model, {**DEFAULT_KERNEL_CONFIG, **mapping})
    made = report(model)
    assert [(row.op, row.state, row.instances) for row in made.rows if row.backend == "loopback"] == [
        ("rms_norm", "installed", 4),
        ("swiglu", "installed", 2),
        ("rotary", "installed", 1),
    ]
    assert made.uncovered == [odd]
    model(toys.toy_input())
    assert all(row.calls for row in made.rows if row.state == "installed")
    unkernelize(model)


def test_classes_that_no_path_leads_to_are_named_by_the_model() -> None:
    class LocalNorm(toys.ToyNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = nn.ModuleDict({"norm": LocalNorm(8), "mlp": toys.ToyMLP(), "inner": toys.Outer.InnerNorm(8)})
    given = {toys.ToyMLP: choice("swiglu"), "tests.support.toys.apply_rope": choice("rotary")}
    parts = plan(model, given).uncovered
    assert [part.config_line.partition(": ")[0] for part in parts if part.config_line] == [
        'type(model.get_submodule("norm"))',
        '"tests.support.toys.Outer.InnerNorm"',
    ]
    kernelize(model, {**given, **config_of(parts[0], model), **config_of(parts[1], model)})
    made = report(model)
    assert made.uncovered == [] and [row.instances for row in made.rows] == [1, 1, 1, 1]
    unkernelize(model)
    (alone,) = (part for part in plan(toys.OverridingNorm(8), {}).uncovered if part.op != "rotary")
    assert alone.op is None, "it computes something else, though its name ends like a norm's"


def test_a_subclass_with_code_of_its_own_is_not_covered_by_its_bases_entry() -> None:
    class Gemma(toys.ToyNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = nn.ModuleList([toys.ToyNorm(8), Gemma(8)])
    parts = plan(model, {toys.ToyNorm: choice("rms_norm")}).uncovered
    assert [part.target.rpartition(".")[2] for part in parts] == ["Gemma", "apply_rope"]


def test_a_class_that_is_named_by_another_path_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support import snapshots

    monkeypatch.setattr(snapshots, "ToyNorm", toys.ToyNorm, raising=False)  # as a package that re-exports it
    model = nn.ModuleList([toys.ToyNorm(8)])
    mapping = {"tests.support.snapshots.ToyNorm": choice("rms_norm")}
    assert [part.op for part in plan(model, mapping).uncovered] == ["rotary"]
    kernelize(model, mapping)
    assert [part.op for part in report(model).uncovered] == ["rotary"] and report(model).rows[0].state == "installed"
    unkernelize(model)


def test_odd_models_can_be_planned() -> None:
    made_elsewhere = type("Made", (nn.Module,), {"__module__": "no.such.module"})
    model = nn.Sequential(made_elsewhere(), nn.Linear(2, 2))
    assert plan(model).uncovered == [] and plan(nn.Identity()).uncovered == []
    assert plan(nn.Sequential()).device == "cpu"
