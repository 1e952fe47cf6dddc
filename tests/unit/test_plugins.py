"""Third-party packages that bring ops and backends, found by their entry points."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle.commands import info, options
from twinkle.commands.console import CommandError
from twinkle.kernel import KernelChoice, plugins, registry
from twinkle.kernel.registry import KernelImpl, resolve_impl
from twinkle.kernel.report import plan

pytestmark = pytest.mark.usefixtures("own_registry")

PLUGIN = """
import sys
from twinkle.kernel.registry import KernelImpl, register_backend, register_op

def register():
    register_op("{op}", implementations={{"a": KernelImpl(lambda target: "theirs", lambda: (True, None))}})
    register_backend("rms_norm", "{op}_backend", KernelImpl(lambda target: "theirs", lambda: (True, None)))

def broken():
    register()
    raise RuntimeError("half way")

def depends():
    register_backend("{op}", "late", KernelImpl(lambda target: "late", lambda: (True, None)))

def leaves():
    sys.exit(3)

not_a_function = "x"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a distribution on the path: its module, and a dist-info folder with entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def put(name: str, op: str = "theirs", entries: str | None = None) -> None:
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(op=op))
        modules.append(name)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        if entries is None:
            entries = f"[{plugins.ENTRY_POINT_GROUP}]\n{name} = {name}:register\n"
        (info / "entry_points.txt").write_text(entries)

    yield put
    for name in modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture
def not_scanned(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had asked for plug-ins in this process."""
    monkeypatch.setattr(plugins, "_errors", None)


def entries(*lines: str) -> str:
    return "\n".join((f"[{plugins.ENTRY_POINT_GROUP}]", *lines, ""))


@pytest.mark.usefixtures("not_scanned")
def test_an_unknown_op_is_looked_for_in_plugins(install: Callable[..., None]) -> None:
    install("plugin_one")
    assert "plugin_one" not in sys.modules
    assert registry.get_op("theirs").name == "theirs"
    assert resolve_impl("theirs", ("a",)) == ("theirs", "a")
    assert resolve_impl("rms_norm", ("theirs_backend",)) == ("theirs", "theirs_backend")


@pytest.mark.usefixtures("not_scanned")
def test_a_known_op_does_not_import_plugins_but_a_plan_does(install: Callable[..., None]) -> None:
    from torch import nn

    install("plugin_two")
    registry.get_op("rms_norm")
    assert "plugin_two" not in sys.modules
    plan(nn.Linear(1, 1), {})
    assert "plugin_two" in sys.modules and "theirs_backend" in registry.backends_of("rms_norm")


@pytest.mark.usefixtures("not_scanned")
@pytest.mark.parametrize(
    "ask",
    [
        lambda: registry.backends_of("rms_norm"),
        lambda: (
            {"theirs_backend": 1} if isinstance(registry.get_impl("rms_norm", "theirs_backend"), KernelImpl) else {}
        ),
        lambda: registry.ops()["rms_norm"].implementations,
        lambda: [resolve_impl("rms_norm", ("theirs_backend",))[1]],
    ],
)
def test_whoever_asks_for_backends_first_sees_those_of_plugins(install: Callable[..., None], ask: Any) -> None:
    install("plugin_first")
    assert "theirs_backend" in ask()


def test_a_plugin_installed_later_is_seen_after_a_refresh(install: Callable[..., None], tmp_path: Path) -> None:
    os.utime(tmp_path, (1, 1))
    assert plugins.load_plugins(refresh=True) == {}
    install("plugin_three")
    os.utime(tmp_path, (1, 1))  # as on a file system whose clock is too coarse to show the change
    assert plugins.load_plugins() == {} and "theirs" not in registry._OPS
    assert plugins.load_plugins(refresh=True) == {} and "theirs" in registry._OPS
    assert plugins.load_plugins(refresh=True) == {}, "one that has registered is not called again"


def test_a_plugin_installed_later_is_seen_when_its_op_is_asked_for(install: Callable[..., None]) -> None:
    plugins.load_plugins()
    install("plugin_four")
    assert KernelChoice("theirs", ("a",)).op == "theirs"


@pytest.mark.usefixtures("not_scanned")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("bad = no_such_module:register", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad = plugin_x:no_such_name", "AttributeError"),
        ("bad = plugin_x:broken", "RuntimeError: half way"),
        ("bad = plugin_x:not_a_function", "plugin_x:not_a_function is a str, not a function that registers"),
        ("bad = plugin_x", "is a module, not a function that registers"),
        ("bad = not a name!", "raised"),
        ("bad = plugin_x:leaves", "SystemExit: 3"),
    ],
)
def test_a_broken_plugin_is_a_reason_and_leaves_nothing(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture, entry: str, words: str
) -> None:
    install("plugin_x", entries=entries(entry))
    install("plugin_good", op="good_one")
    known = set(registry._OPS)
    ((key, error),) = plugins.load_plugins().items()
    assert key[0] == "bad" and words in error.text and "plug-in bad" in error.text
    assert error.code == "broken-plugin"
    assert set(registry._OPS) == known | {"good_one"}, "the good one is there, of the broken one nothing is"
    assert "theirs_backend" not in registry.backends_of("rms_norm")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and entry.partition(" = ")[2] in warnings[0].getMessage()


@pytest.mark.usefixtures("not_scanned")
def test_each_of_two_broken_ones_of_one_name_has_its_own_reason(install: Callable[..., None]) -> None:
    install("plugin_y", entries=entries("mine = plugin_y:not_a_function"))
    install("plugin_z", entries=entries("mine = plugin_z:broken"))
    install("plugin_ok", op="theirs_too", entries=entries("mine = plugin_ok:register"))
    told = {plugin["value"]: plugin["error"] for plugin in info.gather()["plugins"] if plugin["name"] == "mine"}
    assert "plugin_y:not_a_function is a str" in told["plugin_y:not_a_function"]
    assert "RuntimeError: half way" in told["plugin_z:broken"]
    assert told["plugin_ok:register"] is None


@pytest.mark.usefixtures("not_scanned")
def test_who_asks_for_what_a_broken_one_would_bring_gets_its_reason(install: Callable[..., None]) -> None:
    install("plugin_x", entries=entries("bad = plugin_x:broken"))
    for ask in (
        lambda: options.parse_chain(["theirs_backend"]),
        lambda: registry.get_op("theirs"),
    ):
        with pytest.raises((ValueError, CommandError), match="unknown .*; plug-in bad raised RuntimeError: half way"):
            ask()


@pytest.mark.usefixtures("not_scanned")
def test_odd_names_do_no_harm(install: Callable[..., None]) -> None:
    install("plugin_x", entries=entries("bad-name! = plugin_x:register"))
    assert plugins.load_plugins() == {} and "theirs" in registry._OPS


@pytest.mark.usefixtures("not_scanned")
def test_metadata_that_cannot_be_read_hides_nobody_elses(install: Callable[..., None]) -> None:
    install("plugin_unreadable", entries="[twinkle.kernel_ops]\nthis line has no equals sign\n")
    install("plugin_good", op="good_one")
    plugins.load_plugins()
    assert "good_one" in registry._OPS


@pytest.mark.usefixtures("not_scanned")
@pytest.mark.parametrize("order", [("aa_base", "zz_user"), ("zz_base", "aa_user")])
def test_a_plugin_may_build_on_anothers_op(install: Callable[..., None], order: tuple[str, str]) -> None:
    base, user = order
    install(base, op="base_op")
    install(user, op="base_op", entries=entries(f"{user} = {user}:depends"))
    assert plugins.load_plugins() == {}
    assert set(registry.backends_of("base_op")) >= {"a", "late"}
