"""Every operator at every level; and that the levels notice what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import twinkle
from tests.aten.conftest import DEVICE, TRITON
from twinkle.aten import Profile, catalog, profile
from twinkle.aten.harness import framework_level, kernel_level, op_level
from twinkle.aten.harness.compare import memory_of, too_far
from twinkle.aten.harness.levels import LEVELS, as_table
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.poison import PATTERNS, poisoned
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.layout import plain


def test_the_kernel(spec: OperatorSpec, chip: Profile) -> None:
    outcome = kernel_level.run(spec, chip)
    assert outcome.problems == []
    assert outcome.state == "passed"
    ran = {level for level, found in outcome.facts.items() if found.endswith("cases")}
    parts = [(each, "" if each is spec else f" of {each.name}") for each in spec.parts]
    assert ran == {f"{level}{of}" for each, of in parts for level in each.kernels if level == "torch" or TRITON}


def test_the_operator(spec: OperatorSpec, chip: Profile) -> None:
    outcome = op_level.run(spec, chip)
    assert outcome.problems == []
    assert outcome.state == "passed"
    assert outcome.facts["level"] == ("triton" if TRITON and "triton" in spec.kernels else "torch")


@pytest.mark.multiprocess
@pytest.mark.parametrize("random", [False, True], ids=["the same bits", "random numbers"])
def test_a_model(random: bool, chip: Profile, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All operators at once: each is reached, and nothing changes, or the same seed gives the same model."""
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a model has too many elements for the interpreter
    specs = [catalog.operator(name) for name in catalog.names()]
    specs = [spec for spec in specs if spec.by_design is None]
    # A model with dropout in its attention doesn't call PyTorch's.
    specs = [spec for spec in specs if (Semantics.ROUNDS if random else Semantics.RANDOM) not in spec.semantics]
    outcome = started(specs[0], "framework", chip)
    framework_level.compare(outcome, specs, chip)
    assert outcome.problems == [] and outcome.state == "passed"
    assert outcome.facts["device"].startswith(DEVICE)
    assert all(outcome.facts[spec.name]["kernel"] > 0 for spec in specs)


@pytest.mark.skipif(DEVICE != "cpu", reason="what is said is the same on every device")
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"preset": "qwen33"}, "the process of the model .* failed: .*qwen33.*; model= is at silu/register.py:{line}"),
        pytest.param(
            {"hidden_act": "relu"},
            "the model never reached the kernel of silu; model= is at silu/register.py:{line}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_model_must_be_is_to_be_written_somewhere(
    model: dict[str, Any],
    problem: str,
    chip: Profile,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    silu = catalog.operator("silu")
    lines = (silu.home.folder / "register.py").read_text().splitlines()
    problem = problem.format(line=1 + next(i for i, line in enumerate(lines) if line.lstrip().startswith("model=")))
    outcome = framework_level.run(dataclasses.replace(silu, model=model), chip)
    assert outcome.state == "failed" and re.search(problem, outcome.problems[-1])


@pytest.mark.skipif(DEVICE != "cpu", reason="what is imported is the same on every device")
@pytest.mark.multiprocess
def test_another_ops_where_we_are_is_not_the_models(
    chip: Profile, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's process has the operators that this one has, also when only this one's path leads to them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(twinkle.__file__).parents[1]))
    (tmp_path / "ops.py").write_text("raise ImportError('another')")
    monkeypatch.chdir(tmp_path)
    spec = catalog.operator("silu")
    told, _ = framework_level.observe([spec], chip, dict(spec.model))
    assert told["operators"]["silu"]["kernel"] > 0


def test_one_mistake_is_one_line() -> None:
    """Which shows in every call, mostly; with other numbers."""
    calls = [f"torch add/{case}/float32/{seed}" for case in ("a", "b c") for seed in (0, 1)]
    problems = [f"{call}: {n}.5e-3 times the error; it is at add/kernel.py:12" for n, call in enumerate(calls)]
    outcome = Outcome("add", "kernel", "cpu", 5, [*problems, "no call reached the kernel"])
    text = plain(as_table([outcome.to_dict()], 200)).splitlines()
    assert [line.strip() for line in text[3:]] == [
        f"add: {problems[0]} (and of 3 other calls)",
        "add: no call reached the kernel",
    ]


def test_a_kernel_that_was_not_run_is_told_of_beside_what_passed() -> None:
    facts = {"triton": "not run: no GPU", "torch": "3 cases", "triton of add_backward": "not run: no GPU"}
    outcomes = [Outcome(name, "kernel", "cpu", 5, facts=facts).to_dict() for name in ("add", "mul")]
    *_, last = plain(
        as_table([*outcomes, Outcome("add", "op", "cpu", 1, facts={"kernel": 3}).to_dict()], 200)
    ).splitlines()
    assert last.strip() == "triton kernel of add, add_backward, mul: not run: no GPU"


def test_operators_are_grouped_by_what_a_model_must_be() -> None:
    specs = [catalog.operator(name) for name in catalog.names()]
    found = framework_level.groups([spec for spec in specs if spec.by_design is None])
    homes = {spec.name: i for i, (_, members) in enumerate(found) for spec in members}
    assert len(found) == 2 and homes["dropout"] != homes["scaled_dot_product_attention"] == homes["silu"]
    for model, members in found:
        assert all(spec.model.items() <= model.items() for spec in members)


@pytest.mark.parametrize("level", LEVELS)
def test_an_absent_device_is_not_run(level: str, clone: OperatorSpec) -> None:
    outcome = LEVELS[level](clone, profile("p800-kunlunxin"))
    assert outcome.state == "not run" and outcome.to_dict()["ok"] is None
    assert "torch_xmlir is not installed" in str(outcome.not_run)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_allocated_memory_is_poisoned(pattern: int) -> None:
    like = torch.ones(3, 2, device=DEVICE)
    with poisoned(pattern):
        made = (
            torch.empty(3, 2, device=DEVICE),
            torch.empty_like(like),
            torch.empty_strided((3, 2), (4, 1), device=DEVICE),
            like.new_empty(5),
            torch.empty(0, device=DEVICE),
        )
    assert all(bool((memory_of(tensor) == pattern).all()) for tensor in made)


# --- seeded faults ----------------------------------------------------------------------------------------------------


Kernel = Callable[..., Any]


def last_element_unwritten(kernel: Kernel, spec: OperatorSpec) -> Kernel:
    """The last element stays what it was; of an allocation, its memory isn't there; a number stays zero."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        written = Semantics.IN_PLACE in spec.semantics and Semantics.DETACHED not in spec.semantics
        before = args[0].clone() if written else None
        result = kernel(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return torch.float32 if isinstance(result, torch.dtype) else type(result)()
        if Semantics.ALLOCATES in spec.semantics:
            storage = result.untyped_storage()
            storage.resize_(max(storage.nbytes() - result.element_size(), 0))
            return result
        if before is None:
            before = torch.empty_like(result)
        if result.numel():
            result[(-1,) * result.dim()] = before[(-1,) * result.dim()]
        return result

    return faulty


def wrong_stride(kernel: Kernel, spec: OperatorSpec) -> Kernel:
    """Strides are taken the other way round, where that is possible; of one element, it is the next that is taken."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if isinstance(given[-1], (list, tuple)):
            given[-1] = given[-1][::-1]
        elif Semantics.METADATA in spec.semantics:
            given = [t.reshape(-1)[0] for t in given]
        else:
            tensors = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]
            place = max(spec.differentiable or tensors)
            t = given[place]
            beside = Semantics.HOST_READ in spec.semantics
            with contextlib.suppress(RuntimeError):
                given[place] = t.as_strided(t.shape, t.stride()[::-1], t.storage_offset() + beside)
        return kernel(*given, **kwargs)

    return faulty


def stale_output(kernel: Kernel, spec: OperatorSpec) -> Kernel:
    """The first result for arguments of one kind is given again; of metadata, which has but one kind, the first."""
    results: dict[str, Any] = {}

    def faulty(*args: Any, **kwargs: Any) -> Any:
        values = () if Semantics.METADATA in spec.semantics else (*args, *kwargs.values())
        kinds = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
        if str(kinds) not in results:
            results[str(kinds)] = kernel(*args, **kwargs)
        return results[str(kinds)]

    return faulty


class Noticed(Exception):
    pass


def noticed(
    level: Callable[[OperatorSpec, Profile], Outcome], spec: OperatorSpec, chip: Profile, what: str = ""
) -> bool:
    """Whether a level finds a problem of which something is said; what else it would find isn't waited for."""
    right = Outcome.check

    def check(outcome: Outcome, *checked: Any) -> None:
        right(outcome, *checked)
        if any(what in problem for problem in outcome.problems):
            raise Noticed(outcome.state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcome, "check", check)
        try:
            level(spec, chip)
        except Noticed as end:
            return str(end) == "failed"
    return False


@pytest.mark.parametrize("fault", [last_element_unwritten, wrong_stride, stale_output])
def test_a_faulty_kernel_is_noticed(
    spec: OperatorSpec,
    fault: Callable[[Kernel, OperatorSpec], Kernel],
    chip: Profile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = "triton" if TRITON and "triton" in spec.kernels else "torch"
    path, _, name = spec.kernels[level].path.partition(":")
    module = importlib.import_module(f"{spec.home.package}.{path}")
    monkeypatch.setattr(module, name, fault(getattr(module, name), spec))
    assert noticed(kernel_level.run, spec, chip)


def first_argument_written(kernel: Kernel) -> Kernel:
    """Its first element, by a write of which PyTorch learns nothing."""

    def faulty(self: torch.Tensor, **kwargs: Any) -> Any:
        result = kernel(self, **kwargs)
        memory = torch.empty(0, dtype=self.dtype, device=self.device).set_(self.untyped_storage())
        memory[int(self.storage_offset())] = 3
        return result

    return faulty


def memory_beside_written(kernel: Kernel) -> Kernel:
    """What lies behind the first argument's elements in memory, as by a store without a mask."""

    def faulty(self: torch.Tensor, **kwargs: Any) -> Any:
        result = kernel(self, **kwargs)
        torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.untyped_storage())[-1] = 77
        return result

    return faulty


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (first_argument_written, "the memory of an argument was written"),
        (memory_beside_written, "the memory of an argument was written"),
        (lambda kernel: lambda *args, **kwargs: None, "None, expected a tensor"),
    ],
)
def test_what_is_wrong_beside_the_elements_is_noticed(
    fault: Callable[[Kernel], Kernel], problem: str, chip: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ops.clone import SPEC
    from ops.clone.kernel import torch_level, triton_level

    monkeypatch.setattr(torch_level, "clone_torch", fault(torch_level.clone_torch))
    monkeypatch.setattr(triton_level, "clone_triton", fault(triton_level.clone_triton))  # it serves where it runs
    for level in (kernel_level, op_level):
        assert noticed(level.run, SPEC, chip, problem)


def test_nothing_is_noticed_where_nothing_is_wrong(chip: Profile, clone: OperatorSpec) -> None:
    few = dataclasses.replace(clone, kernels={"torch": clone.kernels["torch"]})
    assert not noticed(kernel_level.run, few, chip)


def test_a_kernel_that_calls_itself_is_noticed(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.clone import SPEC
    from ops.clone.kernel import torch_level

    monkeypatch.setattr(torch_level, "clone_torch", lambda x, memory_format: x.clone())
    monkeypatch.setattr("twinkle.aten.availability.triton_missing", lambda platform: "not asked for")
    outcome = op_level.run(SPEC, chip)
    assert outcome.state == "failed"
    assert any("served by ['delegated']" in problem for problem in outcome.problems)
    assert any("no call reached the kernel" in problem for problem in outcome.problems)


def test_natives_bits_are_right_also_where_they_are_no_numbers() -> None:
    """No two of which are equal. Complex numbers are judged by their bits."""
    for dtype in (torch.float32, torch.float64, torch.complex64):
        result = torch.tensor([1.0, torch.nan, torch.inf]).to(dtype)
        exact = torch.tensor([1.0, torch.nan, torch.inf]).to(torch.complex128 if dtype.is_complex else torch.float64)
        assert too_far(result, result.clone(), exact) is None
        assert too_far(result + 1, result, exact) is not None


def test_a_wrong_gradient_is_noticed(chip: Profile) -> None:
    right = catalog.operator("contiguous")
    wrong = dataclasses.replace(right, gradient=lambda kernel, values: (kernel(values), lambda grad: (grad * 2,)))
    outcome = op_level.run(wrong, chip)
    assert any("gradient: wrong" in problem for problem in outcome.problems)
    assert any("Jacobian mismatch" in problem for problem in outcome.problems)


def test_a_platform_can_have_a_kernel_of_its_own(chip: Profile, clone: OperatorSpec) -> None:
    """It comes before all others there, and isn't run elsewhere."""
    kernels = {**clone.kernels, chip.platform: clone.kernels["torch"], "kunlunxin": clone.kernels["torch"]}
    own = dataclasses.replace(clone, kernels=kernels)
    outcome = kernel_level.run(own, chip)
    assert outcome.state == "passed" and outcome.facts[chip.platform].endswith("cases")
    assert outcome.facts["kunlunxin"] == f"not run: it is kunlunxin's kernel, and this is {chip.platform}"
    with own.register_a1(platform=chip.platform) as registration:
        torch.ones(3, device=DEVICE).clone()
    assert registration.level == chip.platform and registration.counts.kernel == 1


def test_a_gradient_that_native_serves_is_noticed(chip: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite differences of native would say nothing about the kernel's gradient."""
    from twinkle.aten.serving import Serving

    refusal = Serving.refusal_this_time

    def refuse_gradients(self: Serving, values: list[Any]) -> str | None:
        wanted = torch.is_grad_enabled() and any(v.requires_grad for v in values if isinstance(v, torch.Tensor))
        return "gradients" if wanted else refusal(self, values)

    monkeypatch.setattr(Serving, "refusal_this_time", refuse_gradients)
    outcome = op_level.run(catalog.operator("contiguous"), chip)
    assert any("native served a call: {'gradients': 1}" in problem for problem in outcome.problems)
