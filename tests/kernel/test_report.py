"""The report: every entry ends as rows, with states, candidates, reasons and counts; and what no entry covers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support import toys
from tests.support.snapshots import differences, state_of
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, hub, kernelize
from twinkle.kernel.hub import HubRef
from twinkle.kernel.ops.rms_norm.reference import RMSNormVariant
from twinkle.kernel.registry import KernelImpl, get_op, register_op
from twinkle.kernel.report import STATES, Row, plan, report, short
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.usefixtures("own_registry", "loopback")

QWEN3 = "transformers.models.qwen3.modeling_qwen3"
NORM, MLP, ROTARY = f"{QWEN3}.Qwen3RMSNorm", f"{QWEN3}.Qwen3MLP.forward", f"{QWEN3}.apply_rotary_pos_emb"


def choice(op: str, *backends: str) -> KernelChoice:
    return KernelChoice(op, backends or ("loopback",))


@pytest.fixture
def qwen3() -> Iterator[nn.Module]:
    model = presets.build("qwen3")
    yield model
    unkernelize(model)


def run(model: nn.Module) -> None:
    with torch.no_grad():
        model(**presets.inputs(model))


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_for_each_state(qwen3: nn.Module) -> None:
    mapping = {
        **{key: DEFAULT_KERNEL_CONFIG[key] for key in (NORM, "sdpa")},
        modeling_qwen3.Qwen3RMSNorm: choice("rms_norm"),
        MLP: choice("swiglu", "refuse"),
        ROTARY: choice("rotary", "nobodys"),
        f"{QWEN3}.Qwen3Gone": choice("rms_norm"),
        toys.ToyNorm: choice("rms_norm"),
    }
    kernelize(qwen3, mapping)
    run(qwen3)
    made = report(qwen3)
    assert [(short(row.target), row.state, row.instances, row.scope, row.default) for row in made.rows] == [
        ("qwen3.Qwen3RMSNorm", "overridden", 9, "model", True),
        ("sdpa", "kept", 0, "process", True),
        ("qwen3.Qwen3RMSNorm", "installed", 9, "model", False),
        ("qwen3.Qwen3MLP.forward", "refused", 2, "model", False),
        ("qwen3.apply_rotary_pos_emb", "kept", 1, "process", False),
        ("qwen3.Qwen3Gone", "missing", 0, "model", False),
        ("tests.support.toys.ToyNorm", "unused", 0, "model", False),
    ]
    assert {row.state for row in made.rows} == set(STATES) - {"failed"}
    installed = made.rows[2]
    assert (installed.op, installed.backend, installed.installer) == ("rms_norm", "loopback", "default_installer")
    assert installed.implementation == "twinkle.kernel.ops.derived.ReferenceRMSNorm"
    assert (installed.calls, installed.fallbacks, installed.errors) == (9, {}, 0)
    assert all(row.why() for row in made.rows if row.state != "installed"), "each says why"
    assert all(row.backend is None and row.calls == 0 for row in made.rows if row.state != "installed")
    assert [[(t.backend, [r.code for r in t.reasons]) for t in row.tried] for row in made.rows[3:5]] == [
        [("refuse", ["refused"])],
        [("nobodys", ["not-registered"])],
    ]
    assert made.row("Qwen3MLP.forward") is made.rows[3] and made.row(MLP) is made.rows[3]
    with pytest.raises(KeyError, match="no row for 'Qwen3Attention'; rows: .*Qwen3RMSNorm"):
        made.row("Qwen3Attention")


def test_one_row_per_backend_and_one_for_what_is_left() -> None:
    """Instances of one class that take different kernels, or none."""
    register_op(
        "picky",
        implementations={
            name: KernelImpl(
                lambda target: get_op("rms_norm").load_reference().build(RMSNormVariant(1.0, "after", "scale", "eps")),
                lambda: (True, None),
                lambda site, eps=eps: None if site.module.eps == eps else f"eps is {site.module.eps}, not {eps}",
            )
            for name, eps in (("small", 1e-6), ("large", 1e-3))
        },
    )
    model = nn.ModuleList([toys.ToyNorm(8) for _ in range(6)])
    for module, eps in zip(model, (1e-6, 1e-3, 1e-6, 1.0, 1e-6, 1e-3), strict=True):
        module.eps = eps
    mapping = {toys.ToyNorm: choice("picky", "small", "large")}
    planned = plan(model, mapping).rows
    kernelize(model, mapping)
    rows = report(model).rows
    expected = [("installed", "small", 3), ("installed", "large", 2), ("refused", None, 1)]
    assert [(row.state, row.backend, row.instances) for row in rows] == expected
    assert [(row.state, row.backend, row.instances) for row in planned] == expected
    small, large = rows[2].tried
    assert {str(reason): sites for reason, sites in small.reasons.items()} == {
        "eps is 0.001, not 1e-06": 2,
        "eps is 1.0, not 1e-06": 1,
    }
    assert {str(reason): sites for reason, sites in large.reasons.items()} == {"eps is 1.0, not 0.001": 1}
    for module in model:
        module(torch.ones(1, 8))
    assert [row.calls for row in report(model).rows] == [3, 2, 0]
    unkernelize(model)


def test_the_same_reason_of_many_instances_is_told_once(qwen3: nn.Module) -> None:
    kernelize(qwen3, {NORM: choice("swiglu", "refuse", "loopback")})
    (row,) = report(qwen3).rows
    assert [(t.backend, list(t.reasons.values())) for t in row.tried] == [("refuse", [9]), ("loopback", [9])]


def test_a_report_of_what_was_never_kernelized(qwen3: nn.Module) -> None:
    made = report(qwen3)
    assert made.rows == [] and made.device == "cpu"
    assert made.uncovered == [], "the default config covers all of it"
    assert made.table(width=200) == (
        "Nothing is kernelized in this model: call twinkle.kernel.kernelize(model). "
        "twinkle.kernel.report.plan(model).table() shows what that would do."
    )


def test_a_report_of_a_custom_model_names_what_the_default_config_would_not_cover() -> None:
    made = report(toys.toy())
    assert made.uncovered == plan(toys.toy()).uncovered != []
    table = made.table(width=200)
    assert table.startswith("Nothing is kernelized") and "Not covered by the default mapping" in table
    assert all(part.config_line in table for part in made.uncovered if part.config_line)


def test_a_report_after_the_undo(qwen3: nn.Module) -> None:
    kernelize(qwen3, {NORM: choice("rms_norm")})
    unkernelize(qwen3)
    assert report(qwen3).rows == [] and report(qwen3).uncovered == []
    assert report(qwen3).table().startswith("Nothing is kernelized in this model")


def test_a_part_of_a_model_and_a_wrapper_around_it(qwen3: nn.Module) -> None:
    kernelize(qwen3, {NORM: choice("rms_norm"), MLP: choice("swiglu")})
    assert [row.instances for row in report(qwen3.model.layers[0]).rows] == [4, 1]
    assert [row.instances for row in report(nn.Sequential(qwen3)).rows] == [9, 2]


def test_a_later_call_on_a_part_does_not_hide_the_rest(qwen3: nn.Module) -> None:
    kernelize(qwen3, {NORM: choice("rms_norm")})
    kernelize(qwen3.model.layers[0], {NORM: choice("rms_norm", "inductor")})
    rows = {row.backend: row.instances for row in report(qwen3).rows}
    assert rows == {"loopback": 5, "inductor": 4}


def test_what_somebody_else_put_on_top_is_told(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    kernelize(qwen3, {NORM: choice("rms_norm"), ROTARY: choice("rotary"), MLP: choice("swiglu")})
    norm, rotary, mlp = report(qwen3).rows
    assert "since" not in norm.why() + rotary.why() + mlp.why()
    qwen3.model.norm.forward = lambda x: x  # e.g. a patch of another tool that comes later
    with monkeypatch.context() as patched:
        patched.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, *args: (q, k))
        found = report(qwen3)
        now = {row.target: row.why() for row in found.rows}
        assert "1 of the modules have got a forward of their own since, which runs instead" in now[NORM]
        assert "modeling_qwen3.apply_rotary_pos_emb was replaced by somebody else since" in now[ROTARY]
        assert "since" not in now[mlp.target] and "replaced by somebody" in found.table(width=300)
        assert any("forward of their own" in note for note in found.to_dict()["rows"][0]["notes"])
    del qwen3.model.norm.forward
    assert all("since" not in row.why() for row in (norm, rotary, *report(qwen3).rows))


def test_a_module_that_is_changed_afterwards_is_told(qwen3: nn.Module) -> None:
    """Another activation: the original serves, until kernelize looks anew."""
    kernelize(qwen3, {NORM: choice("rms_norm"), MLP: choice("swiglu")})
    norm, mlp = report(qwen3).rows
    qwen3.model.norm.variance_epsilon = 1e-3  # which the kernel reads at each call
    before = list(report(qwen3).rows[1].notes)
    qwen3.model.layers[0].mlp.act_fn = nn.GELU()
    (note,) = report(qwen3).rows[1].notes
    assert before == [] and note.startswith("1 of the modules have been changed since") and norm.notes == []
    kernelize(qwen3, {MLP: choice("swiglu")})
    assert [(row.instances, row.notes) for row in report(qwen3).rows if row.state == "installed"] == [(9, []), (1, [])]


def test_a_class_that_is_changed_afterwards_is_told(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules don't see the change: kernelize looks anew."""
    kernelize(qwen3, {NORM: choice("rms_norm"), MLP: choice("swiglu")})
    with monkeypatch.context() as patched:
        patched.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: x)
        norm, mlp = report(qwen3).rows
        assert any("Qwen3RMSNorm.forward was changed in its class since" in note for note in norm.notes)
        assert norm.why().endswith("kernelize again to decide anew") and "since" not in mlp.why()
    assert "since" not in report(qwen3).rows[0].why()


@pytest.mark.parametrize("value", (None, 3, "qwen3", nn.Linear))
def test_a_report_on_what_is_no_model(value: Any) -> None:
    for function, name in ((report, "report"), (unkernelize, "unkernelize"), (plan, "kernelize")):
        with pytest.raises(ValueError, match=f"{name} needs an nn.Module, got"):
            function(value)


# --- devices --------------------------------------------------------------------------------------------------------


def test_a_device_may_have_a_platforms_name(qwen3: nn.Module) -> None:
    assert plan(qwen3, device="nvidia").device == plan(qwen3, device="cuda").device == "cuda"
    assert plan(qwen3, device="cuda:1").device == "cuda:1"
    for device, words in (
        ("npu", "PyTorch knows no device 'npu' here: the package torch_npu is not installed"),
        ("mlu590:0", "PyTorch knows no device 'mlu' here: the package torch_mlu is not installed"),
        ("cudda", "no such device; did you mean 'cuda'?"),
        ("cuda:x", "no such device"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"device={device!r}: {words}")):
            plan(qwen3, device=device)


# --- again ----------------------------------------------------------------------------------------------------------


def test_the_same_again_is_left_alone(qwen3: nn.Module) -> None:
    mapping = with_backends({key: DEFAULT_KERNEL_CONFIG[key] for key in (NORM, MLP, ROTARY)}, "loopback")
    kernelize(qwen3, mapping)
    run(qwen3)
    state, rows = state_of(qwen3), report(qwen3).rows
    kernelize(qwen3, mapping)
    assert differences(state, state_of(qwen3)) == []
    assert [row.counts for row in report(qwen3).rows] == [row.counts for row in rows], "the same counters"
    assert [row.calls for row in rows] == [9, 2, 2]


def test_an_instance_that_computes_something_else_by_now_gets_another_kernel() -> None:
    model = presets.build("gemma", num_hidden_layers=1)
    mlp, x = model.model.layers[0].mlp, torch.linspace(-3, 3, 64)[None]
    mapping = {type(mlp): choice("geglu")}
    kernelize(model, mapping)
    mlp.act_fn = nn.GELU()
    kernelize(model, mapping)
    assert report(model).rows[0].state == "installed"
    ours = mlp(x)
    unkernelize(model)
    torch.testing.assert_close(ours, mlp(x), rtol=1e-6, atol=1e-6)


def test_another_implementation_of_the_same_name_is_another(qwen3: nn.Module) -> None:
    """As when a notebook's cell that defines the kernel is changed and run again."""

    def define(factor: float) -> tuple[type[nn.Module], Any]:
        class Mine(nn.Module):
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                return factor * hidden_states

        def mine(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
            return factor * q, factor * k

        return Mine, mine

    x = torch.ones(1, 1, 2, 64)
    for factor in (2.0, 3.0):
        layer, function = define(factor)
        kernelize(qwen3, {NORM: layer, ROTARY: function})
        assert torch.equal(qwen3.model.norm(x), factor * x)
        assert torch.equal(modeling_qwen3.apply_rotary_pos_emb(x, x, None, None)[0], factor * x)
        assert [row.state for row in report(qwen3).rows] == ["installed"] * 2
    other = presets.build("qwen3", seed=1)
    kernelize(other, {ROTARY: define(3.0)[1]})
    (row,) = report(other).rows
    assert row.state == "refused" and "already serves another model with backend custom" in row.why()
    kernelize(other, {ROTARY: function})
    assert report(other).rows[0].state == "installed", "the same function may serve both"
    unkernelize(other)


def test_a_second_model_that_wants_another_backend_gets_a_reason(qwen3: nn.Module) -> None:
    kernelize(qwen3, {ROTARY: choice("rotary")})
    other = presets.build("qwen3", seed=1)
    kernelize(other, {ROTARY: choice("rotary", "inductor", "loopback")})
    (row,) = report(other).rows
    assert (row.state, row.backend) == ("installed", "loopback")
    assert "process-wide and already serves another model with backend loopback" in row.why()
    assert "unkernelize that model first" in row.why()
    unkernelize(other)


# --- the data -------------------------------------------------------------------------------------------------------


def test_verification_leaves_a_mark_on_what_passed(qwen3: nn.Module) -> None:
    mapping = {NORM: choice("rms_norm"), MLP: choice("swiglu", "refuse"), ROTARY: choice("rotary")}
    kernelize(qwen3, mapping)
    assert [row.verified for row in report(qwen3).rows] == [False, False, False]
    kernelize(qwen3, mapping, verify=True)
    rows = report(qwen3).to_dict()["rows"]
    assert [row["verified"] for row in rows] == [True, False, True], "what an earlier call installed is compared too"
    other = presets.build("qwen3", seed=1)
    kernelize(other, mapping, verify=True)
    assert [row.verified for row in report(other).rows] == [True, False, True]
    unkernelize(other)


def test_what_could_not_be_verified_has_no_mark() -> None:
    meta = presets.build("qwen3", device="meta")
    kernelize(meta, {NORM: choice("rms_norm")}, verify=True)
    (row,) = report(meta).rows
    assert row.state == "installed" and "not verified" in row.why() and not row.verified


def test_an_earlier_row_is_verified_only_when_all_it_serves_was() -> None:
    class Norm(toys.ToyNorm):
        offset = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.float()
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
            return (h * (self.offset + self.scale.float())).to(x.dtype)

    model = nn.ModuleList([Norm(8), Norm(8)])
    model[1].offset = 0.0
    mapping = {Norm: choice("rms_norm")}
    kernelize(model, mapping)
    for part, verified in ((model[0], False), (model, True)):
        kernelize(part, mapping, verify=True)
        (row,) = report(model).rows
        assert row.instances == 2 and row.verified is verified
    unkernelize(model)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sdpa", DEFAULT_KERNEL_CONFIG["sdpa"], False),
        ("fla", KernelChoice("fla", ("inductor",)), False),
        (MLP, KernelChoice("swiglu", ("npu",)), False),  # there are others to name
        (MLP, KernelChoice("swiglu", ("npu", "refuse")), False),
        (MLP, KernelChoice("swiglu", ("loopbak",)), False),  # a misspelling is nobody's future work
        (MLP, KernelChoice("swiglu", ("loopback",)), False),
    ],
)
def test_an_op_without_backends_is_marked(qwen3: nn.Module, key: str, value: KernelChoice, expected: bool) -> None:
    (row,) = plan(qwen3, {key: value}).to_dict()["rows"]
    assert row["unimplemented"] is expected


def test_a_default_entry_that_waits_for_its_backends_is_marked(own_registry: None) -> None:
    del get_op("moe_block").implementations["npu"]
    rows = {row.op: row for row in plan(presets.build("qwen3_moe")).rows if row.state != "unused"}
    assert rows["moe_block"].unimplemented and not rows["rms_norm"].unimplemented
    (npu,) = rows["moe_block"].to_dict()["tried"]
    assert npu["reasons"] == [
        {
            "code": "not-registered",
            "text": "backend npu is not registered for op moe_block",
            "hint": "registered: triton, inductor, loopback, refuse",
            "sites": 0,
        }
    ]


@pytest.mark.parametrize(("device", "here"), [("cpu", True), ("meta", True), ("xpu", False)])
def test_a_plan_says_whether_the_device_is_here(qwen3: nn.Module, device: str, here: bool) -> None:
    made = plan(qwen3, {NORM: choice("rms_norm")}, device=device)
    assert (made.device, made.device_here, made.to_dict()["device_here"]) == (device, here, here)
    assert made.table(width=300).startswith(f"This machine has no {device}: packages and hardware") is not here


def test_compiled_calls_are_part_of_the_data() -> None:
    row = Row("a.b", "op", "installed", "mine", instances=1)
    row.counts.compiled = True
    row.counts.fall_back("x is on the meta device")
    row.counts.fall_back("x is on the meta device")
    assert row.to_dict()["fallbacks"] == {"x is on the meta device": 2} and row.to_dict()["compiled"] is True


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v4", "gemma4", "phi4"])
def test_the_data_is_plain(name: str) -> None:
    model = presets.build(name)
    planned = plan(model).to_dict()
    assert json.loads(json.dumps(planned)) == planned
    kernelize(model, with_backends(DEFAULT_KERNEL_CONFIG, "refuse", "loopback"))
    run(model)
    data = report(model).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert len(data["rows"]) >= len(DEFAULT_KERNEL_CONFIG)
    assert set(data["rows"][0]) >= {
        *("target", "op", "state", "backend", "installer", "scope", "instances", "tried", "calls", "fallbacks")
    }
    for row in data["rows"]:
        assert row["state"] in STATES
    unkernelize(model)


# --- planning touches nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_plan_touches_nothing_and_tells_what_happens(name: str) -> None:
    model = presets.build(name)
    mapping = with_backends(DEFAULT_KERNEL_CONFIG, "loopback")
    random = torch.random.get_rng_state()
    before = state_of(model)
    planned = plan(model, mapping)
    assert differences(before, state_of(model)) == []
    assert torch.equal(random, torch.random.get_rng_state())
    kernelize(model, mapping)

    def outline(rows: list[Row]) -> list[tuple[Any, ...]]:
        """Of logical names, how many places there are their installers alone know."""
        rows = [row for row in rows if "." in row.target]
        return [(row.target, row.op, row.state, row.backend, row.instances, row.scope, row.why()) for row in rows]

    made = report(model)
    assert outline(planned.rows) == outline(made.rows)
    assert planned.uncovered == made.uncovered
    unkernelize(model)
    assert differences(before, state_of(model)) == []


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_plan_works_without_weights(name: str) -> None:
    """On the meta device it is the same as on a real one."""
    mapping = with_backends(DEFAULT_KERNEL_CONFIG, "loopback")
    real, meta = plan(presets.build(name), mapping), plan(presets.build(name, device="meta"), mapping)
    assert meta.device == "meta" and [(r.target, r.state, r.instances, r.why()) for r in meta.rows] == [
        (r.target, r.state, r.instances, r.why()) for r in real.rows
    ]
    assert meta.uncovered == real.uncovered


def test_a_plan_fetches_no_hub_kernel(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: HubRef, target: Any, site: Any) -> Any:
        raise AssertionError("fetched while planning")

    monkeypatch.setattr(HubRef, "load", fetch)
    (row,) = plan(qwen3, {NORM: hub("nobody/nothing", "Norm", version=1)}).rows
    assert (row.state, row.backend, row.instances) == ("installed", "hub", 9)
