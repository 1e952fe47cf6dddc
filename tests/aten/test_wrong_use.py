"""What programs and authors of operators get wrong: one clear message each, and nothing is changed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.aten.conftest import DEVICE, INTERPRETED, ROOT
from twinkle.aten import Home, Kernel, NotRegistrableError, RegistrationError, Semantics, catalog, install
from twinkle.aten.registration import active
from twinkle.aten.spec import OperatorSpec
from twinkle.commands.ops import operator_facts
from twinkle.reasons import Reason

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="what is wrong is wrong on every device")

# --- handles ----------------------------------------------------------------------------------------------------------

COPIES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps, lambda handle: copy.deepcopy([handle])]


@pytest.mark.parametrize("several", [False, True])
def test_a_closed_handle_is_not_entered(several: bool, clone: OperatorSpec) -> None:
    handle = install(["clone"], platform="cpu") if several else clone.register_a1(platform="cpu")
    assert not handle.closed
    with handle:
        assert not handle.closed
    assert handle.closed
    with pytest.raises(RegistrationError, match="it isn't made again by entering it .register anew.") as error:
        handle.__enter__()
    assert error.value.code == "closed" and active() == []


def test_an_operator_that_is_named_twice_is_one() -> None:
    with install(["clone", "copy_", "clone"], platform="cpu") as installed:
        assert list(installed.registrations) == ["clone", "copy_"]


def test_an_operator_that_was_made_but_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ops

    made = tmp_path / "brandnew" / "__init__.py"
    made.parent.mkdir()
    made.touch()
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(tmp_path)])
    with pytest.raises(RegistrationError, match="^brandnew: no such operator; known: ") as error:
        catalog.operator("brandnew")
    assert f"({made} is there, but no entry point names it: pip install -e . --no-deps)" in str(error.value)
    with pytest.raises(RegistrationError, match=r"^clon: .*did you mean 'clone'\?$"):
        catalog.operator("clon")


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("several", [False, True])
def test_a_handle_has_no_copies(copied: Callable[[Any], Any], several: bool, clone: OperatorSpec) -> None:
    with install(["clone"], platform="cpu") if several else clone.register_a1(platform="cpu") as handle:
        with pytest.raises(TypeError, match="(Registration|Installation) of clone.*belongs to this process and can't"):
            copied(handle)
        assert len(active()) == 1


@pytest.mark.parametrize(
    "error", [RegistrationError("clone", Reason("no-device", "none", "buy one")), NotRegistrableError("empty", "no")]
)
def test_a_workers_exception_reaches_its_parent(error: Any) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (type(error), str(error), error.code)


# --- several operators at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", [3, None, [3], b"clone", {"clone": "auto"}, object(), ["clone", None]])
def test_operators_are_names(operators: Any) -> None:
    with pytest.raises(
        RegistrationError, match="install: operators are a list of names, 'all' or 'auto', not"
    ) as error:
        install(operators, platform="cpu")
    assert error.value.code == "bad-argument" and active() == []


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ("All", "install: 'All' is no operator .did you mean 'all' itself"),
        (["all"], "install: 'all' is no operator, and a list holds only those .did you mean 'all' itself"),
        (
            "clone,contiguous",
            r"install: .* is one name, and no operator's .several are a list: \['clone', 'contiguous'\]",
        ),
        (["clone", "copy_ silu"], r"install: 'copy_ silu' is .* list: \['copy_', 'silu'\]"),
        ("clon", "clon: no such operator; known: .*did you mean 'clone'"),
        ([], "install: no operator is named"),
        ("", "no operator is named"),
    ],
)
def test_what_was_meant_is_said(operators: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        install(operators, platform="cpu")
    assert active() == []


@pytest.mark.parametrize("operators", [("clone",), {"clone"}, {"clone": 1}.keys()])
def test_any_collection_of_names_will_do(operators: Any) -> None:
    with install(operators, platform="cpu") as installed:
        assert list(installed.registrations) == ["clone"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platform": 0}, "clone: a platform's name is a string, not 0"),
        ({"platform": []}, "clone: a platform's name is a string, not .."),
        ({"platform": "cpu", "modes": {3: "auto"}}, "3: has a mode but isn't installed; installed: clone"),
        ({"platform": "cpu", "modes": {"clone": 3}}, "clone: unknown mode 3; known: auto"),
        ({"platform": "cpu", "modes": "auto"}, "install: modes is a mapping of operators to modes, not 'auto'"),
    ],
)
def test_other_arguments_of_another_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        install(["clone"], **options)
    assert active() == []


# --- what an operator's author writes ---------------------------------------------------------------------------------

RIGHT = Kernel("kernel.torch_level:clone_torch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "clone"}, "the schema 'clone' is not as PyTorch prints it"),
        ({"schema": "aten::clone(Tensor self) -> Tensor"}, "is not as PyTorch prints it, without aten::"),
        ({"kernels": {}}, "no kernel 'torch', which serves where none of the others does: none"),
        ({"kernels": {"triton": RIGHT}}, "no kernel 'torch', .*: triton"),
        ({"kernels": {"torch": RIGHT, "trition": RIGHT}}, "no machine would run the kernel 'trition'; .*mean 'triton'"),
        ({"kernels": {"torch": Kernel("clone_torch")}}, "'clone_torch' is not the path of a function"),
        ({"kernels": {"torch": replace(RIGHT, with_pullback="x")}}, "'x' is not the path of a function"),
        ({"reference": "reference.py"}, "'reference.py' is not a path: 'reference:clone_reference'"),
        ({"judge": "judge"}, "'judge' is not a path"),
        ({"gradient": None}, "no gradient for its kernels triton, torch: gradient=, pullback= or"),
    ],
)
def test_a_declaration_that_says_nothing_usable(change: dict[str, Any], message: str, clone: OperatorSpec) -> None:
    with pytest.raises(RegistrationError, match=f"clone: its OperatorSpec can't be used: .*{message}") as error:
        replace(clone, **change)
    assert error.value.code == "bad-spec"


def test_what_has_no_gradient_needs_no_rule_for_it(clone: OperatorSpec) -> None:
    assert replace(clone, gradient=None, semantics=Semantics.METADATA).gradient is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("kernel.torch_levl:clone_torch", r"there is no file .*/ops/clone/kernel/torch_levl.py; .*mean 'torch_level'"),
        ("kernl.torch_level:clone_torch", r"there is no file .*/ops/clone/kernl/torch_level.py"),
        ("kernel.torch_level:clone_toch", r"no clone_toch in .*/kernel/torch_level.py; did you mean 'clone_torch'"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, message: str, clone: OperatorSpec) -> None:
    wrong = replace(clone, kernels={"torch": Kernel(path)})
    with pytest.raises(RegistrationError, match=f"clone: '{path}': {message}") as error:
        wrong.register_a1(platform="cpu")
    assert error.value.code == "bad-spec" and active() == []


def test_what_a_kernel_fails_to_import_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there; what it needs isn't."""
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "kernel.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        Home("lacking", tmp_path / "lacking").load("kernel:anything")


def test_an_authors_mistake_is_not_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """That another folder called ``ops`` comes first would be the wrong hint."""

    def broken(module: str) -> Any:
        raise RegistrationError("clone", Reason("bad-spec", "no gradient"))

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(RegistrationError, match="^clone: no gradient$") as error:
        catalog.operator("clone")
    assert error.value.code == "bad-spec"


SILU = "ops.silu.register:SPEC"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"mine": SILU},
            "^mine: ops.silu.register:SPEC is the OperatorSpec of silu, which its entry point calls mine$",
        ),
        ({"silu": SILU, " silu": "theirs:SPEC"}, "^silu: several entry points of that name: ops.silu.*, theirs:SPEC "),
        ({"silu": SILU, " silu": SILU}, None),
        ({"mine": "leaves:SPEC"}, "^mine: leaves can't be had from .*leaves.py: SystemExit: 3"),
    ],
)
def test_entry_points_that_mean_something_else(
    entries: dict[str, str], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in two distributions is fine where it means one thing, as of a package that is installed twice."""
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    found = [EntryPoint(name.strip(), value, catalog.GROUP) for name, value in entries.items()]
    monkeypatch.setattr(catalog.metadata, "entry_points", lambda group: found)
    name = found[0].name
    if message is None:
        assert catalog.operator(name).name == name
    else:
        with pytest.raises(RegistrationError, match=message):
            catalog.operator(name)


def test_a_kernel_that_cannot_be_imported_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clone: OperatorSpec
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    broken = replace(clone, home=Home.of("brokenhome.register", str(tmp_path / "register.py")))
    broken = replace(broken, kernels={"torch": Kernel("broken:clone_torch")})
    monkeypatch.syspath_prepend(tmp_path.parent)
    monkeypatch.setitem(sys.modules, "brokenhome", types.ModuleType("brokenhome"))
    sys.modules["brokenhome"].__path__ = [str(tmp_path)]
    right = catalog.operator
    monkeypatch.setattr(catalog, "operator", lambda name: broken if name == "clone" else right(name))
    facts = operator_facts()["operators"]
    assert facts["clone"]["error"] == "clone: loading it raised ZeroDivisionError: division by zero"
    assert [name for name, found in facts.items() if found["error"]] == ["clone"]


# --- an operator's own files ------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize("file", ["example.py", "test/kernel_level.py"])
def test_files_that_are_run_by_themselves_say_it_in_a_line(file: str) -> None:
    command = [sys.executable, ROOT / "ops" / "clone" / file, "cpx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    *_, line = done.stderr.splitlines()
    assert "error: unknown device profile 'cpx'; known: " in line and line.endswith("did you mean 'cpu'?")
    assert "Traceback" not in done.stderr
