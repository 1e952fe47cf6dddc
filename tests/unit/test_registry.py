"""What exists: registering, choosing and resolving ops and backends, and third-party packages that bring them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, registry
from twinkle.kernel.registry import KernelImpl, lazy_import, register_backend, register_op, resolve_impl
from twinkle.reasons import Reason

pytestmark = pytest.mark.usefixtures("own_registry")


def available() -> tuple[bool, str | None]:
    return True, None


def unavailable() -> tuple[bool, str | None]:
    return False, "no such chip"


def impl(load: Callable[..., Any] = lambda target: "kernel", available: Any = available, **options: Any) -> KernelImpl:
    return KernelImpl(load, available, **options)


def never(*args: Any) -> Any:
    raise AssertionError("asked although it need not be")


def boom(*args: Any) -> Any:
    raise RuntimeError("boom\nwith a second line")


# --- registering ----------------------------------------------------------------------------------------------------


def test_an_op_can_be_registered_once() -> None:
    first = impl()
    definition = register_op("mine", implementations={"a": first})
    assert definition.name == "mine" and registry.get_op("mine") is definition
    assert registry.get_impl("mine", "a") is first
    with pytest.raises(ValueError, match=r"'mine' is already registered.*register_backend\('mine', …\)"):
        register_op("mine", implementations={})
    assert registry.get_op("mine") is definition


def test_an_existing_op_of_ours_is_not_replaced() -> None:
    before = registry.get_op("rms_norm").implementations.copy()
    with pytest.raises(ValueError, match="already registered"):
        register_op("rms_norm", implementations={"a": impl()})
    assert registry.get_op("rms_norm").implementations == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "non-empty string, got ''"),
        ({"name": 3}, "non-empty string, got 3"),
        ({"implementations": None}, "op 'x': implementations must map backend names to KernelImpl, got None"),
        ({"implementations": [impl()]}, "must map backend names"),
        ({"implementations": {"a": lambda target: None}}, "op 'x', backend 'a': expected a KernelImpl"),
        ({"implementations": {"": impl()}}, "op 'x': a backend's name must be a non-empty string, got ''"),
        ({"implementations": {1: impl()}}, "non-empty string, got 1"),
        ({"installer": "put"}, r"op 'x': installer must be callable as installer\(model, target, impl\), got 'put'"),
    ],
)
def test_register_op_validates(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_op(**{"name": "x", "implementations": {}, **arguments})
    assert "x" not in registry.ops()


@pytest.mark.parametrize("broken", [{"load": "x"}, {"available": None}, {"available": True}, {"accepts": "x"}])
def test_an_implementation_is_made_of_callables(broken: dict[str, Any]) -> None:
    name = next(iter(broken))
    with pytest.raises(ValueError, match=rf"KernelImpl\({name}=…\) must be callable"):
        KernelImpl(**{"load": len, "available": available, **broken})


def test_a_backend_can_be_added_once() -> None:
    register_op("mine", implementations={"a": impl()})
    added = impl()
    register_backend("mine", "b", added)
    assert registry.backends_of("mine")[:2] == ("a", "b") and registry.get_impl("mine", "b") is added
    with pytest.raises(ValueError, match=r"'mine' already has a backend 'a'; register yours under a name of its own"):
        register_backend("mine", "a", impl())
    with pytest.raises(ValueError, match=r"unknown op 'mien'.*mine.*did you mean 'mine'\?"):
        register_backend("mien", "c", impl())
    with pytest.raises(ValueError, match="expected a KernelImpl, got 'x'"):
        register_backend("mine", "c", "x")  # type: ignore[arg-type]
    assert registry.backends_of("mine")[:2] == ("a", "b")


# --- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "backends", "message"),
    [
        ("rms_nrom", ("npu",), r"unknown op 'rms_nrom'; known: .*swiglu.*; did you mean 'rms_norm'\?"),
        ("RMS_Norm", ("npu",), r"did you mean 'rms_norm'\?"),
        ("zzz", ("npu",), r"unknown op 'zzz'; known: add_rms_norm, .*swiglu$"),
        (None, ("npu",), "an op is named by a string, got None"),
        (["rms_norm"], ("npu",), "named by a string"),
        ("rms_norm", "npu", r"backends must be a non-empty tuple of names, got 'npu'; write backends=\('npu',\)"),
        ("rms_norm", "", "got ''; registered for this op: .*liger"),
        ("rms_norm", (), r"got \(\); registered for this op: .*liger"),
        ("rms_norm", None, "got None; registered for this op"),
        ("rms_norm", {"npu"}, r"got \{'npu'\}; registered"),
        ("rms_norm", (None,), "registered for this op"),
        ("rms_norm", ("npu", ""), "registered for this op"),
        ("rms_norm", b"npu", "registered for this op"),
    ],
)
def test_a_wrong_choice_is_an_error_that_names_the_right_one(op: Any, backends: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelChoice(op, backends)


def test_a_choice_keeps_its_backends_as_a_tuple_and_is_a_value() -> None:
    choice = KernelChoice("rms_norm", ["npu", "liger"])  # type: ignore[arg-type]
    assert choice.backends == ("npu", "liger") and choice == KernelChoice("rms_norm", ("npu", "liger"))
    assert hash(choice) == hash(KernelChoice("rms_norm", ("npu", "liger")))
    with pytest.raises(AttributeError):
        choice.op = "swiglu"  # type: ignore[misc]


@pytest.mark.parametrize("installer", ["install", 3, ()])
def test_a_choice_refuses_an_installer_that_cannot_be_called(installer: Any) -> None:
    with pytest.raises(ValueError, match=r"KernelChoice\(op='rms_norm'\): installer must be callable"):
        KernelChoice("rms_norm", ("npu",), installer=installer)


def test_a_choice_may_name_a_backend_that_nobody_has_registered(own_registry: None) -> None:
    # A vendor's wheel may bring it; until then it is a reason.
    assert KernelChoice("rms_norm", ("somebodys",)).backends == ("somebodys",)
    reason = registry.get_impl("rms_norm", "somebodys")
    assert isinstance(reason, Reason) and reason.code == "not-registered"
    assert reason.hint and reason.hint.startswith("registered: npu, triton, liger, torch, inductor")
    registry.register_op("bare", implementations={})
    assert isinstance(without := registry.get_impl("bare", "npu"), Reason) and without.hint is None
    assert str(registry.get_impl("rms_norm", "lgier")) == (
        "backend lgier is not registered for op rms_norm (did you mean 'liger'?)"
    )


# --- resolving ------------------------------------------------------------------------------------------------------


def test_the_first_that_loads_wins_and_later_ones_are_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    register_op(
        "mine",
        implementations={
            "away": impl(never, unavailable),
            "raises": impl(never, boom),
            "unloadable": impl(boom),
            "empty": impl(lambda target: None),
            "good": impl(lambda target: ("kernel", target)),
            "later": impl(never, never),
        },
    )
    caplog.set_level(logging.DEBUG, "twinkle.kernel")
    chain = ("nowhere", "away", "raises", "unloadable", "empty", "good", "later")
    assert resolve_impl("mine", chain, target="t") == (("kernel", "t"), "good")
    assert [record.getMessage() for record in caplog.records] == [
        "mine: nowhere: backend nowhere is not registered for op mine "
        "(registered: away, raises, unloadable, empty, good, later)",
        "mine: away: no such chip",
        "mine: raises: available() raised RuntimeError: boom",
        "mine: unloadable: load() raised RuntimeError: boom",
        "mine: empty: load() returned None",
    ]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize(("warn", "level"), [(True, logging.WARNING), (False, logging.DEBUG)])
def test_without_any_there_is_none(caplog: pytest.LogCaptureFixture, warn: bool, level: int) -> None:
    register_op("mine", implementations={"away": impl(never, unavailable), "unloadable": impl(boom)})
    caplog.set_level(logging.DEBUG, "twinkle.kernel")
    assert resolve_impl("mine", ("away", "unloadable", "nowhere"), warn=warn) == (None, None)
    assert [record.levelno for record in caplog.records] == [level] * 3


@pytest.mark.parametrize("backends", ["npu", "", (), None])
def test_resolving_checks_the_chain(backends: Any) -> None:
    with pytest.raises(ValueError, match=r"resolve_impl\('rms_norm'\): backends must be a non-empty tuple of names"):
        resolve_impl("rms_norm", backends)


def test_resolving_an_unknown_op_is_an_error() -> None:
    with pytest.raises(ValueError, match="did you mean 'swiglu'"):
        resolve_impl("swigul", ("npu",))


class _Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [ImportError("x"), OSError("x.so"), FileNotFoundError(), ValueError(), KeyError("k")])
def test_whatever_is_raised_is_a_reason(error: Exception) -> None:
    register_op("mine", implementations={"a": impl(never, _Raises(error)), "b": impl(_Raises(error)), "c": impl()})
    assert resolve_impl("mine", ("a", "b", "c")) == ("kernel", "c")
    reason = registry.availability(registry.get_impl("mine", "a"))  # type: ignore[arg-type]
    assert reason is not None and type(error).__name__ in reason.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_is_no_reason(error: BaseException) -> None:
    register_op("mine", implementations={"a": impl(never, _Raises(error)), "b": impl(_Raises(error))})
    for backend in ("a", "b"):
        with pytest.raises(type(error)):
            resolve_impl("mine", (backend,))


@pytest.mark.parametrize("answer", [True, None, (), (True,), (True, 1, 1), "ok", ("yes", None), (None, ""), [True, ""]])
def test_a_rubbish_answer_is_a_reason_that_shows_it(answer: Any) -> None:
    reason = registry.availability(impl(available=lambda: answer))
    assert reason is not None and reason.code == "not-available"
    assert repr(answer) in reason.text and "(True, None) or (False, reason)" in reason.text


def test_a_no_without_a_reason_says_so() -> None:
    assert str(registry.availability(impl(available=lambda: (False, None)))) == "available() said no, without a reason"
    reason = Reason("driver", "driver 1 found, 2 wanted", "update it")
    assert registry.availability(impl(available=lambda: (False, reason))) is reason


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda target: (target,), ("t",)),
        (lambda target, site: (target, site), ("t", "s")),
        (lambda target, site=None: (target, site), ("t", "s")),
        (lambda *args: args, ("t", "s")),
        (lambda target, *args: (target, *args), ("t", "s")),
        (lambda target, cls=int: (target, cls), ("t", int)),  # the usual way to bind a loop's variable
        (lambda target, **options: (target, options), ("t", {})),
    ],
    ids=["target", "site", "site-default", "args", "target-args", "bound-default", "kwargs"],
)
def test_load_gets_the_site_when_it_asks_for_it(load: Callable[..., Any], expected: Any) -> None:
    assert registry.load_impl(impl(load), "t", "s") == expected


def test_a_lazy_load_is_asked_for_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def one(target): return target\ndef two(target, site): return target, site\n"
    (tmp_path / "lazy_loads.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.load_impl(impl(lazy_import("lazy_loads:one")), "t", "s") == "t"
    assert registry.load_impl(impl(lazy_import("lazy_loads:two")), "t", "s") == ("t", "s")
    missing = registry.load_impl(impl(lazy_import("lazy_loads:three")), "t", "s")
    assert isinstance(missing, Reason) and missing.code == "load-failed" and "three" in missing.text
    sys.modules.pop("lazy_loads")


def test_lazy_imports_of_one_thing_are_equal() -> None:
    assert lazy_import("a:b") == lazy_import("a:b") and hash(lazy_import("a:b")) == hash(lazy_import("a:b"))
    assert lazy_import("a:b") != lazy_import("a:c") and lazy_import("a:b") != "a:b"
    assert repr(lazy_import("a:b")) == "lazy_import('a:b')"


class Unhashable:
    """An availability function as an object that can be compared and so not be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> tuple[bool, str]:
        self.asked += 1
        return False, "not here"


def test_each_backend_is_asked_once_per_call() -> None:
    ask = Unhashable()
    for op in ("first", "second"):
        register_op(op, implementations={"a": impl(never, ask)})
    answers = registry.AskedOnce()
    for _ in range(3):
        assert str(answers.impl_of("first", "a")) == str(answers.impl_of("second", "a")) == "not here"
    assert ask.asked == 1
    assert str(registry.AskedOnce().impl_of("first", "a")) == "not here" and ask.asked == 2


def test_the_default_mapping_names_known_ops_only() -> None:
    for key, choice in DEFAULT_KERNEL_CONFIG.items():
        assert choice.op in registry.ops(), key
