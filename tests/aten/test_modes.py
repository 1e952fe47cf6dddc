"""Both ways to an operator, package and script mode, through import, registration and execution, each in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aten.conftest import DEVICE, INTERPRETED, ROOT
from twinkle.aten import Profile, catalog
from twinkle.aten.harness import packaging

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="the ways in are the same on every device"),
]

USES = {
    "_local_scalar_dense": "x.sum().item()",
    "clone": "x.clone()",
    "contiguous": "x.t().contiguous()",
    "copy_": "torch.zeros(3, 4).copy_(x)",
    "detach": "x.detach()",
    "dropout": "torch.nn.functional.dropout(x, 0.5)",
    "embedding": "torch.nn.functional.embedding(torch.tensor([2, 0]), x)",
    "empty_like": "torch.empty_like(x)",
    "empty_strided": "torch.empty_strided((3, 4), (1, 3))",
    "item": "x.sum().item()",
    "scaled_dot_product_attention": "torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)",
    "type_as": "x.type_as(torch.ones(1, dtype=torch.bfloat16))",
}
BY_DESIGN = ("detach_", "empty", "result_type")
ARGUMENTS = {
    "_local_scalar_dense": "x[1, 2]",
    "contiguous": "x.t()",
    "copy_": "torch.zeros(3, 4), x",
    "detach_": "x.clone()",
    "dropout": "x, 0.5, True",
    "embedding": "x, torch.tensor([2, 0])",
    "empty": "(3, 4)",
    "empty_strided": "(3, 4), (1, 3)",
    "item": "x[1, 2]",
    "result_type": "x, x.bool()",
    "scaled_dot_product_attention": "*[x[None, None]] * 3",
    "type_as": "x, x.double()",
}
"""Of a call of ``<operator>_aten``; ``x`` where nothing else is given."""
RESULTS = {
    "_local_scalar_dense": "6.0",
    "contiguous": "(4, 3) False",
    "detach": "(3, 4) True",
    "embedding": "(2, 4) False",
    "item": "6.0",
    "result_type": "torch.float32",
    "scaled_dot_product_attention": "(1, 1, 3, 4) False",
}
"""What it gives: a number, or a shape and whether it has the memory of ``x``; else a new tensor of that shape."""
IMPORTS = {
    "package": "from ops.{name} import register_a1\nfrom ops.{name}.register import {name}_aten",
    "script": "import register\nfrom register import register_a1, {name}_aten",
}
IMPORT = "print(register_a1.__self__.name)"
REGISTER = """
try:
    registration = register_a1(platform="cpu")
    print(registration.closed)
    registration.close()
except NotImplementedError as error:
    print(error.code)
"""
CALL = """
result = {name}_aten({arguments})
if isinstance(result, torch.Tensor):
    print(tuple(result.shape), result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
else:
    print(result)
"""
EXECUTE = """
counter = {{"n": 0}}
registration = register_a1(counter=counter, platform="cpu")
result = {use}
registration.close()
assert counter["n"] > 0 and registration.counts.kernel > 0, (counter, registration.counts)
"""
KERNEL = "print(sorted(n for n in sys.modules if n.endswith('kernel.torch_level') and 'backward' not in n))"


def run(code: str, *path: Path, **variables: str) -> str:
    """A process's output; folders first on its path."""
    places = os.pathsep.join(map(str, (*path, ROOT / "src", ROOT)))
    environment = {**os.environ, "PYTHONPATH": places, "TRITON_INTERPRET": "0", **variables}
    program = f"import sys\n{code}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", IMPORTS)
@pytest.mark.parametrize("name", [*USES, *BY_DESIGN])
def test_import_register_execute(name: str, mode: str) -> None:
    """The whole row of one operator in one mode: the import, the registration, the execution of its very own kernel."""
    path = [ROOT / "ops" / name] if mode == "script" else []
    steps = [
        IMPORTS[mode].format(name=name),
        IMPORT,
        REGISTER,
        "import torch\nx = torch.arange(12.0).view(3, 4)",
        CALL.format(name=name, arguments=ARGUMENTS.get(name, "x")),
        *([] if name in BY_DESIGN else [EXECUTE.format(use=USES[name])]),
        KERNEL,
    ]
    package = f"ops.{name}" if mode == "package" else f"_script_mode_{name}"
    registered = "by-design" if name in BY_DESIGN else "False"
    result = RESULTS.get(name, "(3, 4) False")
    assert run("\n".join(steps), *path) == f"{name}\n{registered}\n{result}\n['{package}.kernel.torch_level']\n"


def test_the_fifteen_have_their_rows() -> None:
    assert len({*USES, *BY_DESIGN}) == 15 and {*USES, *BY_DESIGN} <= set(catalog.names())


def test_two_operators_kernels_are_told_apart() -> None:
    """One in script mode, another in package mode, in one process: each runs its own kernel."""
    code = """
import register, torch
from ops.contiguous import register_a1
with register.register_a1(platform="cpu") as script, register_a1(platform="cpu") as package:
    x = torch.arange(12.0).view(3, 4)
    x.t().contiguous(), x.clone()
    print(script.operator, script.counts.kernel, package.operator, package.counts.kernel)
print(script._traffic.serving.function.__name__, package._traffic.serving.function.__name__)
"""
    assert run(code, ROOT / "ops" / "clone") == "clone 1 contiguous 1\nclone_torch contiguous_torch\n"


def test_a_foreign_kernel_package_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "torch_level.py").write_text("def clone_torch(*args, **kwargs): raise SystemExit('foreign')")
    (tmp_path / "reference.py").write_text("raise SystemExit('foreign')")
    execute = "import torch\nwith register_a1(platform='cpu') as r: torch.ones(2).clone()\nprint(r.counts.kernel)"
    assert run(f"from ops.clone import register_a1\n{execute}", tmp_path) == "1\n"
    assert run(f"from register import register_a1\n{execute}", tmp_path, ROOT / "ops" / "clone") == "1\n"


FOREIGN = {
    "empty": ("ops/__init__.py", "", "ModuleNotFoundError: No module named 'ops.{name}'"),
    "a module": ("ops.py", "", "ModuleNotFoundError: No module named 'ops.{name}'; 'ops' is not a package"),
    "broken": ("ops/__init__.py", "1 / 0", "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_ops_package_is_a_clear_error(kind: str, tmp_path: Path) -> None:
    file, content, error = FOREIGN[kind]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    code = """
from twinkle.aten import RegistrationError, catalog, install
from twinkle.aten.registration import active
for attempt in (lambda: catalog.operator("clone"), lambda: install(["clone"], platform="cpu")):
    try:
        attempt()
    except RegistrationError as error:
        print(error.code, error, active())
"""
    lines = run(code, tmp_path).splitlines()
    assert len(lines) == 2
    for line in lines:
        why = f"ops.clone.register can't be had from {tmp_path / file}: {error.format(name='clone')} ("
        assert line.startswith(f"foreign-ops clone: {why}")
        assert "another package ops may come first on sys.path; `twinkle-kernel info` shows which one" in line
        assert line.endswith(" []")


def test_a_foreign_ops_package_changes_nothing_in_script_mode(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("raise SystemExit('foreign')")
    execute = "import torch\nwith register_a1(platform='cpu') as r: torch.ones(2).clone()\nprint(r.counts.kernel)"
    assert run(f"from register import register_a1\n{execute}", tmp_path, ROOT / "ops" / "clone") == "1\n"


def test_a_foreign_folder_that_is_no_package_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "ops" / "clone").mkdir(parents=True)
    (tmp_path / "ops" / "clone" / "register.py").write_text("raise SystemExit('foreign')")
    code = "from twinkle.aten import catalog\nprint(catalog.operator('clone').home.folder)"
    assert run(code, tmp_path) == f"{ROOT / 'ops' / 'clone'}\n"


def test_info_says_which_package_was_found(tmp_path: Path) -> None:
    code = """
import json
from twinkle.commands.info import gather, parts
from twinkle.layout import laid_out, plain
facts = gather()
print(json.dumps(facts["operators"]))
print(plain(laid_out(parts(facts), 999)).splitlines()[-1])
"""
    found, text = run(code).splitlines()
    ours = str(ROOT / "ops" / "__init__.py")
    assert json.loads(found) == [{"name": "ops", "found": ours, "operators": catalog.names(), "error": None}]
    assert text == f"operators in the package ops, found at {ours}: {', '.join(catalog.names())}"
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("")
    found, text = run(code, tmp_path).splitlines()
    foreign = str(tmp_path / "ops" / "__init__.py")
    (package,) = json.loads(found)
    assert package["found"] == foreign and f"can't be had from {foreign}" in package["error"]
    first = catalog.names()[0]
    why = f"{first}: ops.{first}.register can't be had"
    assert text.startswith(f"operators in the package ops, found at {foreign}: {why}")


def test_a_second_script_mode_operator_is_a_clear_error() -> None:
    code = """
import register
from pathlib import Path
from twinkle.aten.home import spec_beside
try:
    spec_beside("__main__", Path({!r}))
except ImportError as error:
    print(error)
""".format(str(ROOT / "ops" / "contiguous"))
    assert (
        run(code, ROOT / "ops" / "clone") == "clone is in script mode in this process already, so contiguous can't be\n"
    )


@pytest.mark.parametrize("file", ["example.py", "test/kernel_level.py", "test/op_level.py"])
def test_the_files_that_are_run(file: str, chip: Profile) -> None:
    program = ROOT / "ops" / "empty_strided" / file
    for profile, code in (("cpu", 0), ("p800-kunlunxin", 3)):
        done = subprocess.run([sys.executable, program, profile], capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr + done.stdout
        header, *lines = done.stdout.splitlines()
        assert header.split() == ["operator", "level", "device", "state", "checks"]
        levels = ["kernel", "op", "framework"] if file == "example.py" else [Path(file).stem.partition("_")[0]]
        state = "passed" if code == 0 else "not run"
        assert [line.split()[:2] for line in lines[: len(levels)]] == [["empty_strided", level] for level in levels]
        assert all(state in line for line in lines[: len(levels)])
        notes = "".join(lines[len(levels) :])
        assert ("torch_xmlir is not installed" in notes) is bool(code)


def test_importing_an_operator_imports_no_triton() -> None:
    """Where a kernel is chosen that needs none."""
    code = "from ops.clone import register_a1\nregister_a1(platform='cpu')\n"
    assert run(f"{code}print('twinkle.aten.triton_kernels' in sys.modules)") == "False\n"


def test_a_broken_kernel_file_is_not_hidden(tmp_path: Path) -> None:
    """What an operator's own file raises is what the user sees, not that something wasn't found."""
    import shutil

    shutil.copytree(ROOT / "ops" / "clone", tmp_path / "clone")
    (tmp_path / "clone" / "kernel" / "torch_level.py").write_text("import a_package_that_is_missing")
    code = """
import register
try:
    register.register_a1(platform="cpu")
except ModuleNotFoundError as error:
    print(error)
from twinkle.aten.registration import active
print(active())
"""
    assert run(code, tmp_path / "clone") == "No module named 'a_package_that_is_missing'\n[]\n"


def test_the_packaging_program(tmp_path: Path) -> None:
    """The matrix that it computes has no empty cell; a device that isn't there is no success."""

    def done(*options: str) -> tuple[int, str]:
        command = [sys.executable, ROOT / "ops" / "test_packaging.py", *options]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        return found.returncode, found.stdout

    code, text = done("--imports-only", "clone", "empty")
    assert code == 0 and text.splitlines()[-1] == "4 cells, all passed"
    code, text = done("clone", "empty")
    assert code == 0 and text.splitlines()[-1] == "12 cells, all passed"
    assert text.count("package") == text.count("script") == 2
    code, text = done("--npu-e2e")
    assert code == 3 and text.startswith("not run: no ascend on this machine")


def test_a_broken_way_in_is_a_failed_cell(monkeypatch: pytest.MonkeyPatch, chip: Profile, tmp_path: Path) -> None:
    broken = tmp_path / "packaging_main.py"
    broken.write_text(packaging._MAIN.read_text(encoding="utf-8").replace('counter["n"] > 0', 'counter["n"] > 9999'))
    monkeypatch.setattr(packaging, "_MAIN", broken)
    found = packaging.way_in("clone", "script", chip, packaging.STAGES)
    assert (found["import"], found["register"]) == ("passed", "passed")
    assert found["execute"].startswith("failed: AssertionError: Counts(kernel=")


def test_the_matrix_is_of_all_operators(monkeypatch: pytest.MonkeyPatch, chip: Profile) -> None:
    monkeypatch.setattr(packaging, "way_in", lambda name, mode, chip, stages: dict.fromkeys(stages, "passed"))
    found = packaging.matrix(chip, packaging.STAGES)
    assert set(found) == {(name, mode) for name in catalog.names() for mode in ("package", "script")}
    assert all(list(row) == ["import", "register", "execute"] for row in found.values())
