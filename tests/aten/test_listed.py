"""Lists of an operator's calls: whatever is wrong in one is said by file, case and field, before anything is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle.aten import Home, RegistrationError, catalog, install
from twinkle.aten.harness.cases import benchmark_cases, cases
from twinkle.aten.harness.listed import InputsError
from twinkle.aten.registration import active
from twinkle.aten.spec import OperatorSpec

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="files are the same on every device")

TENSOR: dict[str, Any] = {"shape": [3]}
CASE: dict[str, Any] = {"name": "a", "arguments": {"self": TENSOR}}
INPUTS: dict[str, Any] = {"operator": "clone", "seeds_per_case": 1, "dtypes": ["float32"], "cases": [CASE]}
TIMED_CASE: dict[str, Any] = {"name": "a", "dtypes": ["float32"]}
TIMED_CASE |= {size: {"self": TENSOR} for size in ("accelerator", "cpu", "quick")}


def listing(folder: Path, inputs: object = INPUTS, timed: object = None) -> OperatorSpec:
    """An operator with other lists."""
    (folder / "goldendata").mkdir()
    for file, content in (("goldendata/inputs_spec.yaml", inputs), ("benchmark.yaml", timed)):
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (folder / file).write_text(text)
    spec = catalog.operator("clone")
    return replace(spec, home=Home(spec.home.package, folder))


def self_is(**tensor: Any) -> dict[str, Any]:
    return case_is(arguments={"self": {**TENSOR, **tensor}})


def case_is(**case: Any) -> dict[str, Any]:
    return {**INPUTS, "cases": [{**CASE, **case}]}


def without(found: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != field}


WRONG: list[tuple[object, str]] = [
    ("a: [", "inputs_spec.yaml is no YAML: while parsing .*line 1"),
    ("- a", "inputs_spec.yaml: a list of calls is a mapping of operator, seeds_per_case, dtypes, cases, not ..a.."),
    ({**INPUTS, "operator": "copy_"}, "it lists calls of 'copy_', and this is clone"),
    (without(INPUTS, "operator"), "the field 'operator' is missing: a word"),
    (without(INPUTS, "cases"), "the field 'cases' is missing: a list of cases"),
    ({**INPUTS, "cases": []}, "cases is a list of cases, not .."),
    ({**INPUTS, "cases": "all"}, "cases is a list of cases, not 'all'"),
    ({**INPUTS, "seeds_per_case": True}, "seeds_per_case is a whole number, 1 or more, not True"),
    ({**INPUTS, "seeds": 3}, "unknown field 'seeds'; known: .*"),
    ({**INPUTS, 3: 3}, "unknown field 3; known"),
    ({**INPUTS, "cases": ["a"]}, "case 1: a case is a mapping of name, arguments, dtypes, gradient, not 'a'"),
    ({**INPUTS, "cases": [CASE, without(CASE, "arguments")]}, "case 2: the field 'arguments' is missing: a mapping"),
    (case_is(dtypes=["flot32"]), r"case 1 \(a\): no torch.dtype 'flot32'; did you mean 'float32'"),
    (case_is(dtypes="float32"), "case 1: dtypes is a list of names, not 'float32'"),
    (without(INPUTS, "dtypes"), "neither the case nor the file says its dtypes"),
    (case_is(gradient="yes"), "case 1: gradient is true or false, not 'yes'"),
    (case_is(name=3), "case 1: name is a word of letters, .*, not 3"),
    (case_is(name="../../a"), "case 1: name is a word of letters, .*, not '../../a'"),
    ({**INPUTS, "cases": [CASE, CASE]}, "case 2: another case has the name 'a'"),
    ("operator: clone\noperator: clone\n", "inputs_spec.yaml is no YAML: 'operator' is there twice"),
    ("operator: 2020-13-41\n", "inputs_spec.yaml is no YAML: month must be in 1..12"),
    (case_is(arguments={"slef": TENSOR}), "clone has no argument 'slef'; did you mean 'self'"),
    (case_is(arguments={}), "the argument 'self' is missing, which has no default"),
    (case_is(arguments={"self": [3]}), "self: a tensor is a mapping of shape, strides, offset, dtype, values, not .3."),
    (case_is(arguments={"self": {"shap": [3]}}), "self: unknown field 'shap'; known: .*did you mean 'shape'"),
    (case_is(arguments={"self": TENSOR, "memory_format": TENSOR}), "memory_format is no tensor but of the type Memo"),
    (case_is(arguments={"self": TENSOR, "memory_format": "chanels_last"}), "did you mean 'channels_last'"),
    (self_is(shape=[3, -1]), "shape is a list of whole numbers, 0 or more, not .3, -1."),
    (self_is(strides=[1, 1]), "strides are as many as sizes: .1, 1., and shape .3."),
    (self_is(offset=-1), "offset is a whole number, 0 or more, not -1"),
    (self_is(dtype="float3"), "no torch.dtype 'float3'"),
    (self_is(values="nromal"), "no values 'nromal'; known: .*did you mean 'normal'"),
    (
        self_is(values="special", dtype="int8"),
        "values 'special' are there for floating-point dtypes only, not for int8",
    ),
]
"""Every line of a file can be wrong in some way."""


@pytest.mark.parametrize(("inputs", "message"), WRONG)
def test_wrong_inputs_are_said_by_name(inputs: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputsError, match=f"^{tmp_path}.*{message}") as error:
        next(cases(listing(tmp_path, inputs)))
    assert not any(raw in str(error.value) for raw in ("Error", "object", "module")), "no text of Python's own"


def test_what_may_be_left_out_or_empty(tmp_path: Path) -> None:
    arguments = {"self": {**TENSOR, "strides": None, "values": None}, "memory_format": None}
    (case,) = cases(listing(tmp_path, case_is(arguments=arguments)))
    assert case.values()[0].shape == (3,) and case.gradient is False


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (without(TIMED_CASE, "quick"), "case 1: the field 'quick' is missing: a mapping"),
        (without(TIMED_CASE, "dtypes"), "case 1: the field 'dtypes' is missing: a list of names"),
        ({**TIMED_CASE, "cpu": {"x": TENSOR}}, r"case 1 \(a\), cpu: clone has no argument 'x'"),
        ({**TIMED_CASE, "accelerator": {"self": {"shape": 3}}}, "case 1 .*accelerator: self: shape is a list of whole"),
    ],
)
def test_wrong_timed_calls_are_said_by_name(case: object, message: str, tmp_path: Path) -> None:
    """Whatever size is asked for."""
    spec = listing(tmp_path, timed={"operator": "clone", "cases": [case]})
    with pytest.raises(InputsError, match=f"^{tmp_path}/benchmark.yaml, {message}"):
        next(benchmark_cases(spec, "quick"))


def test_a_wrong_list_ends_a_benchmark_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.aten import main

    wrong, right = listing(tmp_path, timed={"operator": "clone"}), catalog.operator
    monkeypatch.setattr(catalog, "operator", lambda name: wrong if name == "clone" else right(name))
    with pytest.raises(SystemExit) as end:
        main(["--quick", "--op", "item", "--op", "clone"])
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "[1/2]" not in shown.err, "nothing was timed"
    assert shown.err.splitlines()[-1].endswith("benchmark.yaml: the field 'cases' is missing: a list of cases")


def test_auto_says_it_as_install_says_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = listing(tmp_path, timed={"operator": "clone"})
    monkeypatch.setattr(catalog, "names", lambda: ["clone"])
    monkeypatch.setattr(catalog, "operator", lambda name: wrong)
    with pytest.raises(RegistrationError, match="clone: .*benchmark.yaml: the field 'cases' is missing") as error:
        install("auto", platform="cpu")
    assert error.value.code == "bad-inputs" and active() == []
