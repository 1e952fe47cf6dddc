"""Kernelize, call and undo from several threads at once."""

from __future__ import annotations

import sys
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from tests.support import toys
from tests.support.fragile import NORM, Doubled, fragile, loads, register
from tests.support.models import (
    clean_process,  # noqa: F401
    differences,
    installed,
    look,
    rows_of,
)
from tests.support.qwen3 import QWEN3, kernelized_qwen3, loopback, qwen3
from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.registry import KernelImpl
from twinkle.kernel.report import report
from twinkle.kernel.undo import patch, unkernelize


@pytest.fixture
def eager_switches():
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*functions):
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_calls_from_several_threads(eager_switches):
    model = kernelized_qwen3()
    inputs = presets.inputs(model)
    expected = model(**inputs).logits
    results = []
    in_threads(*[lambda: results.extend(model(**inputs).logits for _ in range(5))] * 4)
    assert len(results) == 20 and all(torch.equal(result, expected) for result in results)
    # A count may be lost between threads, a call never is.
    assert 0 < rows_of(model)["qwen3.Qwen3MLP.forward"].calls <= 42
    unkernelize(model)


def test_kernelize_and_undo_in_several_threads(eager_switches):
    rope = modeling_qwen3.apply_rotary_pos_emb
    models = [qwen3() for _ in range(4)]
    looks = [look(model) for model in models]
    problems = []

    def back_and_forth(model):
        for _ in range(8):
            kernelize(model, loopback())
            if installed(model) != QWEN3:
                problems.append(installed(model))
            problems.extend(unkernelize(model).not_undone)

    in_threads(*[lambda m=m: back_and_forth(m) for m in models])
    assert problems == [] and modeling_qwen3.apply_rotary_pos_emb is rope
    assert [differences(*pair) for pair in zip(looks, map(look, models), strict=True)] == [[]] * 4


def test_one_change_of_models_at_a_time():
    """Two models may share a function; while one is changed, another thread's kernelize and undo wait."""
    entered, leave, finished = threading.Event(), threading.Event(), threading.Event()

    def install(model, target, impl):
        patch(model, "mark", 1)
        entered.set()
        return int(leave.wait(30))

    slow, other = nn.Sequential(), qwen3()

    def kernelize_and_undo():
        assert entered.wait(30)
        kernelize(other, loopback())
        unkernelize(other)
        finished.set()

    def watch():
        assert entered.wait(30)
        waited = not finished.wait(0.5)
        leave.set()
        assert waited and finished.wait(30)

    choice = KernelChoice("rms_norm", ("loopback",), installer=install)
    in_threads(lambda: kernelize(slow, {"anything": choice}), kernelize_and_undo, watch)
    assert unkernelize(slow).patches == 1


@pytest.mark.usefixtures("own_registry")
def test_nobody_changes_a_model_that_is_being_planned():
    """What was planned for a model holds for it as it was seen then: other threads wait until it is applied."""
    planning, go_on, finished = threading.Event(), threading.Event(), threading.Event()

    def available():
        planning.set()
        return go_on.wait(30), None

    register(KernelImpl(loads(Doubled), available))
    model = toys.toy()

    def second():
        assert planning.wait(30)
        kernelize(model, {NORM: fragile("good")})
        finished.set()

    def watch():
        assert planning.wait(30)
        waited = not finished.wait(0.5)
        go_on.set()
        assert waited and finished.wait(30)

    in_threads(lambda: kernelize(model, {NORM: fragile()}), second, watch)
    assert [(row.backend, row.state, row.instances) for row in report(model).rows] == [("good", "installed", 4)]
    unkernelize(model)


def test_one_model_kernelized_by_several_threads(eager_switches):
    model = qwen3()
    before = look(model)
    for _ in range(5):
        in_threads(*[lambda: kernelize(model, loopback())] * 3)
        assert installed(model) == QWEN3
        assert unkernelize(model).not_undone == ()
        assert differences(before, look(model)) == []
