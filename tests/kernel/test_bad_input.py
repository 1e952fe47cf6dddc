"""What users get wrong: an error or a row that names the thing, the nearest right one, the remedy; nothing changes."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support import toys
from tests.support.refusals import refused
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, hub, kernelize
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import unkernelize

QWEN3 = "transformers.models.qwen3.modeling_qwen3"
TOYS = "tests.support.toys"
NORM, NORM_FORWARD, ROTARY = f"{QWEN3}.Qwen3RMSNorm", f"{QWEN3}.Qwen3RMSNorm.forward", f"{QWEN3}.apply_rotary_pos_emb"

pytestmark = pytest.mark.usefixtures("loopback")


def choice(op: str = "rms_norm") -> KernelChoice:
    return KernelChoice(op, ("loopback",))


@pytest.fixture(scope="module")
def qwen3() -> nn.Module:
    return presets.build("qwen3")


# --- the model and the mapping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, ["needs an nn.Module, got None"]),
        ({"a": 1}, ["got dict {'a': 1}"]),
        ("qwen3", ["got 'qwen3'"]),
        (modeling_qwen3.Qwen3RMSNorm, ["got the class transformers.models.qwen3", "give an instance"]),
        (modeling_qwen3, ["got module"]),
    ],
)
def test_no_model(model: Any, words: list[str]) -> None:
    refused(model, None, *words)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ("rms_norm", ["mapping must map targets to what replaces them, got 'rms_norm'"]),
        ([("a.b", choice())], ["got list"]),
        (choice(), ["got KernelChoice", "write {target: …}"]),
        (hub("a/b", "c", version=1), ["got HubRef", "write {target: …}"]),
        (toys.ToyNorm, ["got the class tests.support.toys.ToyNorm", "write {target: …}"]),
        (0, ["got int 0"]),
        (True, ["got bool True"]),
    ],
)
def test_a_mapping_that_is_none(qwen3: nn.Module, mapping: Any, words: list[str]) -> None:
    refused(qwen3, mapping, *words)


def test_any_mapping_will_do(qwen3: nn.Module) -> None:
    mapping = types.MappingProxyType({modeling_qwen3.Qwen3RMSNorm: choice()})
    kernelize(qwen3, mapping)
    assert report(qwen3).row("Qwen3RMSNorm").state == "installed"
    unkernelize(qwen3)


@pytest.mark.usefixtures("untouched")
def test_an_empty_mapping_is_not_the_default(qwen3: nn.Module) -> None:
    kernelize(qwen3, {})
    assert report(qwen3).rows == []


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("device", ["gpu", "cpu:x", 3.5, "npu:0:1"])
def test_no_device(qwen3: nn.Module, device: Any) -> None:
    refused(qwen3, None, f"device={device!r}", device=device)


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("key", "words"),
    [
        (3, ["a mapping's key must be an nn.Module subclass, a dotted path or a logical name, got int 3"]),
        (None, ["got None"]),
        ((QWEN3, "Qwen3MLP"), ["got tuple"]),
        (toys.ToyNorm(4), ["got ToyNorm ToyNorm()", "give its class ToyNorm"]),
        (toys.apply_rope, ["got function", "write its dotted path 'tests.support.toys.apply_rope'"]),
        ("", ["the key '' is no dotted path", "package.module.Class"]),
        ("..", ["is no dotted path"]),
        (f"{QWEN3}.", ["is no dotted path"]),
        (f"{QWEN3}:Qwen3MLP", ["is no dotted path", "package.module.Class"]),
        (f" {QWEN3}.Qwen3MLP", ["is no dotted path"]),
        (dict, ["the class builtins.dict is no nn.Module subclass"]),
        (f"{TOYS}.Outer", ["tests.support.toys.Outer is no nn.Module subclass"]),
    ],
    # Not str alone: an address in a name would differ between the processes that share the tests.
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_a_key_of_no_kind(qwen3: nn.Module, key: Any, words: list[str]) -> None:
    refused(qwen3, {key: choice()}, *words)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("key", "op", "words"),
    [
        ("qwen3", "rms_norm", ["'qwen3' is a logical name (it has no dot)", "op rms_norm has no installer", "fla, "]),
        ("Qwen3MLP", "swiglu", ["'Qwen3MLP' is a logical name", "dotted path"]),
    ],
)
def test_a_logical_name_without_an_installer(qwen3: nn.Module, key: str, op: str, words: list[str]) -> None:
    refused(qwen3, {key: choice(op)}, *words)
    refused(qwen3, {key: toys.ToyNorm}, f"{key!r} is a logical name", "got the class tests.support.toys.ToyNorm")


IN_THE_MODEL = [
    ("model.norm", "rms_norm", [f"is a place in this model, and a key names code: write {NORM!r} for all of its 9"]),
    ("model.layers.0.mlp", "swiglu", [f"write '{QWEN3}.Qwen3MLP' for all of its 2 Qwen3MLP"]),
    ("model.layers.0.mlp.forward", "swiglu", [f"write '{QWEN3}.Qwen3MLP'"]),
    ("model.layers.0.mlp.up_proj", "swiglu", ["is a place in this model", "own class that uses this Linear"]),
    ("lm_head", "swiglu", ["is a logical name", "own class that uses this Linear"]),
    ("model", "rms_norm", [f"write '{QWEN3}.Qwen3Model'"]),
    ("Qwen3RMSNorm", "rms_norm", ["is a logical name", f"write its dotted path {NORM!r}"]),
    ("Qwen3RMSNorm.forward", "rms_norm", [f"write its dotted path {NORM_FORWARD!r}"]),
    ("apply_rotary_pos_emb", "rotary", [f"write its dotted path {ROTARY!r}"]),
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("key", "op", "words"), IN_THE_MODEL)
def test_a_key_that_is_something_in_the_model(qwen3: nn.Module, key: str, op: str, words: list[str]) -> None:
    refused(qwen3, {key: choice(op)}, repr(key), *words)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("op", "key", "place"),
    [
        ("causal_lm_loss", "fused_ce", f"{QWEN3}.Qwen3ForCausalLM.forward"),
        ("qk_norm_rotary", "fused_qk", f"{QWEN3}.Qwen3Attention.forward"),
        ("qk_norm_rotary", "fused_qk", ROTARY),
        ("add_rms_norm", "fused_add_norm", modeling_qwen3.Qwen3DecoderLayer),
        ("sdpa_attention", "sdpa", f"{QWEN3}.eager_attention_forward"),
        ("fla", "fla", f"{QWEN3}.Qwen3Attention"),
    ],
    ids=str,
)
def test_a_place_for_an_op_that_finds_its_places_itself(qwen3: nn.Module, op: str, key: str, place: Any) -> None:
    refused(qwen3, {place: choice(op)}, f"op {op} finds its places by itself", f"write the key {key!r} instead")


OUTSIDE = [
    (f"{TOYS}.ToyNrom", ["tests.support.toys has no 'ToyNrom'", "nearest: tests.support.toys.ToyNorm"]),
    (f"{TOYS}.toynorm", ["nearest: tests.support.toys.ToyNorm"]),
    (f"{TOYS}.ToyMPL.forward", ["has no 'ToyMPL'", "nearest: tests.support.toys.ToyMLP.forward"]),
    (f"{TOYS}.ToyMLP.foward", ["toys.ToyMLP has no 'foward'", "nearest: tests.support.toys.ToyMLP.forward"]),
    (f"{TOYS}.Outer.InerNorm", ["tests.support.toys.Outer has no 'InerNorm'", "nearest: tests.support.toys.Outer.Inn"]),
    (f"{TOYS}.apply_rop", ["nearest: tests.support.toys.apply_rope"]),
    (f"{TOYS}.apply_rope.forward", ["tests.support.toys.apply_rope is no class", "no method 'forward'"]),
    (f"{TOYS}.HEADS", ["tests.support.toys.HEADS is a int, neither a class nor a function"]),
    (f"{TOYS}.apply_rotary_from_elsewhere", ["has no 'apply_rotary_from_elsewhere'"]),
    (TOYS, ["tests.support.toys is a module, neither a class nor a function"]),
    ("tests.suport.toys.ToyNorm", ["tests has no 'suport'", "nearest: tests.support"]),
    ("transfomers.models.qwen3.modeling_qwen3.Qwen3MLP", ["no Python package 'transfomers'", "nearest: transformers"]),
    ("zebra_xyz.Norm", ["there is no Python package 'zebra_xyz'", "install zebra_xyz, or mend the path"]),
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("key", "words"), OUTSIDE)
def test_a_mistyped_path_outside_transformers(qwen3: nn.Module, key: str, words: list[str]) -> None:
    refused(qwen3, {f"{QWEN3}.Qwen3MLP.forward": choice("swiglu"), key: choice()}, key, *words)


def test_a_module_that_cannot_be_imported_is_named(
    qwen3: nn.Module, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_toys.py").write_text("raise OSError('disk on fire')")
    (tmp_path / "needing_toys.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused(qwen3, {"broken_toys.Norm": choice()}, "importing broken_toys raised OSError: disk on fire")
    refused(qwen3, {"needing_toys.Norm": choice()}, "importing needing_toys", "No module named 'not_there_at_all'")


INSIDE = [
    (f"{QWEN3}.Qwen3RMSnorm", f"nearest: {QWEN3}.Qwen3RMSNorm"),
    (f"{QWEN3}.Qwen3MPL.forward", f"nearest: {QWEN3}.Qwen3MLP.forward"),
    (f"{QWEN3}.Qwen3MLP.foward", f"nearest: {QWEN3}.Qwen3MLP.forward"),
    (f"{QWEN3}.apply_rotary_pos_embed", f"nearest: {QWEN3}.apply_rotary_pos_emb"),
    ("transformers.models.qwen33.modeling_qwen33.Qwen3MLP", "nearest: transformers.models.qwen3"),
    ("transformers.models.qwen3.modelling_qwen3.Qwen3MLP", f"nearest: {QWEN3}"),
]


@pytest.mark.parametrize(("key", "hint"), INSIDE)
def test_a_mistyped_path_inside_transformers_is_a_row_and_the_others_are_installed(
    caplog: pytest.LogCaptureFixture, key: str, hint: str
) -> None:
    model = presets.build("qwen3")
    kernelize(model, {key: choice(), f"{QWEN3}.Qwen3RMSNorm": choice()})
    rows = report(model).rows
    assert [(row.target, row.state) for row in rows] == [(key, "missing"), (f"{QWEN3}.Qwen3RMSNorm", "installed")]
    assert hint in rows[0].why() and rows[1].instances == 9
    warnings = [r.getMessage() for r in caplog.records if r.name == "twinkle.kernel" and r.levelno == logging.WARNING]
    assert len(warnings) == 1 and hint in warnings[0] and "missing" in warnings[0]
    assert plan(model, {key: choice()}).rows[0].state == "missing"
    unkernelize(model)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("key", "hint"), INSIDE[:2])
def test_under_strict_it_is_an_error(qwen3: nn.Module, key: str, hint: str) -> None:
    refused(qwen3, {f"{QWEN3}.Qwen3RMSNorm": choice(), key: choice()}, "strict", key, "missing", hint, strict=True)


def test_a_wrong_default_entry_is_quiet_but_strict_sees_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, qwen3: nn.Module
) -> None:
    monkeypatch.setitem(DEFAULT_KERNEL_CONFIG, f"{QWEN3}.Qwen3Gone", KernelChoice("rms_norm", ("npu",)))
    kernelize(qwen3)
    row = report(qwen3).row("Qwen3Gone")
    assert row.state == "missing" and row.default
    assert [r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("twinkle")] == []
    unkernelize(qwen3)
    refused(qwen3, None, "strict", "Qwen3Gone", "missing", strict=True)
    unkernelize(qwen3)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "key",
    [
        nn.LayerNorm,
        nn.Module,
        "torch.nn.LayerNorm",
        "torch.nn.LayerNorm.forward",
        "torch.nn.functional.silu",
        "torch.nn.functional.cross_entropy",
        f"{QWEN3}.nn.Linear",
        f"{QWEN3}.nn.Linear.forward",
        f"{TOYS}.F.silu",
        f"{TOYS}.torch.nn.functional.silu",
    ],
    ids=str,
)
def test_a_target_that_belongs_to_torch(qwen3: nn.Module, key: Any) -> None:
    refused(qwen3, {key: choice()}, "belongs to torch", "every model of the process", "name the model's own class")


# --- two entries ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (modeling_qwen3.Qwen3RMSNorm, NORM),
        (NORM, NORM_FORWARD),
        (modeling_qwen3.Qwen3RMSNorm, NORM_FORWARD),
        (NORM_FORWARD, modeling_qwen3.Qwen3RMSNorm),
    ],
    ids=str,
)
def test_two_entries_on_one_site(qwen3: nn.Module, one: Any, other: Any) -> None:
    message = refused(qwen3, {one: choice(), other: choice()}, "two entries claim", ".forward", "keep one of them")
    for key in (one, other):
        assert (repr(key) if isinstance(key, str) else f"the class {NORM}") in message


def test_a_base_and_its_subclass_may_both_be_named_where_they_do_not_meet() -> None:
    model = nn.ModuleList([toys.ToyNorm(8), toys.OverridingNorm(8)])
    kernelize(model, {toys.ToyNorm: choice(), toys.OverridingNorm: choice()})
    rows = report(model).rows
    assert [(row.state, row.instances) for row in rows] == [("installed", 1), ("refused", 1)]
    unkernelize(model)
    both = nn.ModuleList([toys.Outer.InnerNorm(8)])
    refused(both, {toys.ToyNorm: choice(), f"{TOYS}.Outer.InnerNorm": choice()}, "two entries claim 0.forward")


def test_the_users_entry_wins_over_the_defaults(qwen3: nn.Module) -> None:
    kernelize(qwen3, {**DEFAULT_KERNEL_CONFIG, modeling_qwen3.Qwen3RMSNorm: choice()})
    rows = [row for row in report(qwen3).rows if row.target.endswith("Qwen3RMSNorm")]
    assert [(row.state, row.default) for row in rows] == [("overridden", True), ("installed", False)]
    assert NORM in rows[0].why() and rows[0].instances == 9
    unkernelize(qwen3)


# --- ops on the wrong kind of target, and backends that don't exist -------------------------------------------------


@pytest.mark.parametrize(
    ("key", "op", "words"),
    [
        (NORM, "rotary", "is a method, the op replaces a function"),
        (ROTARY, "rms_norm", "is a function, the op replaces a method"),
        (NORM, "swiglu", "has no children gate_proj/up_proj/down_proj"),
        (f"{QWEN3}.Qwen3MLP.forward", "rms_norm", "has children, an RMSNorm has none"),
        (f"{QWEN3}.Qwen3MLP.forward", "geglu", "the activation is silu, geglu computes gelu"),
        (f"{QWEN3}.Qwen3Attention.forward", "swiglu", "has no children"),
    ],
)
def test_an_op_that_does_not_fit_is_refused_with_the_reason(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, key: str, op: str, words: str
) -> None:
    kernelize(qwen3, {key: choice(op)})
    (row,) = report(qwen3).rows
    assert row.state == "refused" and words in row.why(), row.why()
    assert any(words in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    unkernelize(qwen3)
    refused(qwen3, {key: choice(op)}, "strict", key, "refused", words, strict=True)


def test_a_mistyped_backend_is_a_row_with_the_nearest(qwen3: nn.Module) -> None:
    mapping = {NORM: KernelChoice("rms_norm", ("lopback", "nobodys"))}
    kernelize(qwen3, mapping)
    (row,) = report(qwen3).rows
    assert row.state == "kept" and [tried.backend for tried in row.tried] == ["lopback", "nobodys"]
    assert "did you mean 'loopback'?" in row.why()
    unkernelize(qwen3)
    refused(qwen3, mapping, "strict", NORM, "kept", "did you mean 'loopback'?", strict=True)


def test_a_target_that_the_model_has_not_is_a_row_and_a_warning(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    mapping = {toys.ToyNorm: choice(), f"{TOYS}.apply_rope": choice("rotary")}
    kernelize(qwen3, mapping)
    assert [row.state for row in report(qwen3).rows] == ["unused", "unused"]
    assert "nothing in this model has an instance of it" in report(qwen3).rows[0].why()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "ToyNorm" in warnings[0] and "apply_rope" in warnings[0]
    unkernelize(qwen3)
    refused(qwen3, mapping, "strict", "ToyNorm", "unused", "leave the entry out for this model", strict=True)
