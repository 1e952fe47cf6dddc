"""``twinkle-kernel ops new``: what it makes works at once, and what is wrong with it later is said by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.aten.conftest import DEVICE, INTERPRETED, ROOT
from twinkle.aten import Home, RegistrationError, catalog, scaffold
from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import benchmark_cases, cases
from twinkle.aten.harness.time_limit import alarm
from twinkle.aten.scaffold import calls
from twinkle.aten.shipped import FOLDERS, shipped
from twinkle.aten.spec import OperatorSpec
from twinkle.cli import app

pytestmark = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="files are the same on every device")

MEAN = "mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"
WHERE = "where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"
ADD = "add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


def new(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", "new", *arguments])


def check(package: Path, level: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, package / "test" / f"{level}_level.py", "cpu"]
    wide = {**os.environ, "COLUMNS": "200"}  # the readline that pytest imports tells further processes of 80
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=wide)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["addmm", "clamp", "relu"])
def test_it_passes_its_checks_from_the_first_minute(name: str, tmp_path: Path) -> None:
    """Of shapes that fit together; with an argument that may be left out, but not with all others; and of ``relu``
    PyTorch has a kernel for sparse tensors, which calls it again on their values."""
    (tmp_path / "ops").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    schema = str(getattr(torch.ops.aten, name).default._schema)
    made = new(name, "--schema", schema, "--folder", str(tmp_path / "ops"))
    assert made.exit_code == 0, made.output
    assert f"python {tmp_path / 'ops' / name / 'example.py'} cpu" in made.stdout
    assert f'{name} = "ops.{name}.register:SPEC"' in (tmp_path / "pyproject.toml").read_text()
    for level in ("kernel", "op"):
        done = check(tmp_path / "ops" / name, level)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout


@pytest.mark.multiprocess
def test_what_is_wrong_is_said_by_name(tmp_path: Path) -> None:
    """A kernel that only calls the operator, which has no decomposition; one that is wrong; one that raises."""
    package = scaffold.make(scaffold.overload_of("add", ADD), tmp_path)
    done = check(package, "op")
    assert done.returncode == 1
    first, *others = [line.strip() for line in done.stdout.splitlines()[3:]]
    assert first.startswith("add: add/contiguous/float32/0, with gradients: served by ['delegated'], should be one of")
    text = " ".join((first, *others))
    assert "the kernel, which calls the operator itself, is at add/kernel/torch_level.py:12 (and of 95 other" in text
    assert len(others) <= 4, "one line for each kind of problem"
    kernel = package / "kernel" / "torch_level.py"
    kernel.write_text(kernel.read_text().replace("return decomposition", "return 1.001 * decomposition"))
    done = check(package, "kernel")
    assert done.returncode == 1 and "add: torch add/contiguous/float32/0: " in done.stdout
    assert "; the kernel is at add/kernel/torch_level.py:12" in " ".join(done.stdout.split())
    kernel.write_text(kernel.read_text().replace("return 1.001", "return missing"))
    done = check(package, "kernel")
    assert done.returncode == 1 and "the kernel raised NameError: name 'missing' is not defined" in done.stdout


@pytest.mark.parametrize(
    ("name", "schema"),
    [("gelu", None), ("add", ADD), ("mean", MEAN), ("layer_norm", None), ("baddbmm", None), ("where", WHERE)],
)
def test_it_is_as_the_linter_wants_it(name: str, schema: str | None, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    scaffold.make(scaffold.overload_of(name, schema), tmp_path / "ops")
    for command in (["check"], ["format", "--check"]):
        options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path / "ops")]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout


LAYER_NORM = str(torch.ops.aten.layer_norm.default._schema).removeprefix("aten::")


@pytest.mark.parametrize("directly", [False, True])
def test_a_derivative_made_of_the_operator_itself_ends(
    directly: bool, newly_made: Callable[[str], OperatorSpec]
) -> None:
    """Where PyTorch has no decomposition, kernel and derivative call the operator that they stand for."""
    spec = newly_made(LAYER_NORM)

    def work(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x = torch.arange(6.0).view(2, 3).cos().requires_grad_()
        (first,) = torch.autograd.grad((call(x, [3]) ** 3).sum(), x, create_graph=True)
        return [first.detach(), torch.autograd.grad((first**2).sum(), x)[0]]

    native = work(spec.overload)
    with spec.register_a1(platform="cpu") as registration, alarm(60):
        ours = work(spec.aten if directly else spec.overload)
        assert registration.counts.fallbacks["delegated"] >= 1 and registration.counts.kernel == 0
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, native, strict=True)) and native[1].any()


SHAPES: dict[str, tuple[dict[str, str], dict[str, str], tuple[str, ...]]] = {
    "relu.default": ({}, {}, ()),
    "add.Tensor": ({}, {}, ()),
    "layer_norm.default": ({}, {}, ()),
    "clamp.default": ({}, {}, ("min",)),
    "where.self": ({}, {"condition": "bool"}, ()),
    "gather.default": ({}, {"index": "int64"}, ()),
    "mm.default": ({"self": "ab", "mat2": "bc"}, {}, ()),
    "addmm.default": ({"self": "ab", "mat1": "ac", "mat2": "cb"}, {}, ()),
    "bmm.default": ({"self": "nab", "mat2": "nbc"}, {}, ()),
    "mv.default": ({"self": "ab", "vec": "b"}, {}, ()),
    "dot.default": ({"self": "a", "tensor": "a"}, {}, ()),
    "nll_loss.default": ({"self": "ab", "target": "a"}, {"target": "int64"}, ()),
}
"""Which sizes are equal, which tensors hold no floating-point numbers, and what else must be given."""


@pytest.mark.parametrize("name", SHAPES)
def test_what_fits_together_is_found(name: str, tmp_path: Path) -> None:
    """Every call in the lists that are made of it is one that PyTorch takes."""
    operator, _, which = name.partition(".")
    overload = getattr(getattr(torch.ops.aten, operator), which)
    found = calls.pattern_of(overload)
    assert (found.shapes, found.dtypes, found.given, found.refusal) == (*SHAPES[name], None)
    package = scaffold.make(overload, tmp_path)
    spec = replace(
        catalog.operator("clone"), schema=str(overload._schema).removeprefix("aten::"), home=Home("ops.clone", package)
    )
    listed = [*cases(spec, seeds=1), *benchmark_cases(spec, "quick")]
    assert len({case.name for case in listed}) > 10
    assert all(isinstance(Arguments(overload).call(overload, case.values()), torch.Tensor) for case in listed)


def test_cases_that_pytorch_refuses_are_told_of(tmp_path: Path) -> None:
    gather = scaffold.make(torch.ops.aten.gather.default, tmp_path) / "goldendata" / "inputs_spec.yaml"
    assert "  # No scalar, which PyTorch doesn't take: IndexError: Dimension out of range" in gather.read_text()
    product = scaffold.make(torch.ops.aten.mm.default, tmp_path) / "goldendata" / "inputs_spec.yaml"
    assert "  # No scalar: its tensors have other numbers of dimensions." in product.read_text()


@pytest.mark.multiprocess
def test_a_kernel_that_ignores_a_number_is_noticed(tmp_path: Path) -> None:
    package = scaffold.make(scaffold.overload_of("leaky_relu", None), tmp_path)
    kernel = package / "kernel" / "torch_level.py"
    kernel.write_text(kernel.read_text().replace("(self, negative_slope)\n", "(self, 0.01)\n"))
    done = check(package, "kernel")
    assert done.returncode == 1 and "leaky_relu: torch leaky_relu/other negative_slope/float32/0: " in done.stdout
    assert "leaky_relu/contiguous" not in done.stdout


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("addmm", {"beta": 0.25, "alpha": 0.25}),
        ("clamp", {"min": 0.25, "max": 0.25}),
        ("layer_norm", {"eps": 0.25, "cudnn_enable": False}),
        ("gather", {"sparse_grad": True}),
        ("silu", {}),
    ],
)
def test_each_argument_has_a_case_with_another_value(name: str, others: dict[str, Any], tmp_path: Path) -> None:
    package = scaffold.make(getattr(torch.ops.aten, name).default, tmp_path)
    listed = yaml.safe_load((package / "goldendata" / "inputs_spec.yaml").read_text())["cases"]
    made = {case["name"]: case["arguments"] for case in listed}
    found = {case: made[case][case.removeprefix("other ")] for case in made if case.startswith("other ")}
    assert found == {f"other {argument}": value for argument, value in others.items()}
    assert all(made["contiguous"].get(argument) != value for argument, value in others.items())


def test_conditions_leave_to_pytorch_what_it_refuses(tmp_path: Path) -> None:
    """``add`` takes tensors of two dtypes and of any number of dimensions; a product of matrices neither."""
    product = (scaffold.make(torch.ops.aten.mm.default, tmp_path) / "register.py").read_text()
    assert "        one_dtype((0, 1), lambda t: (t, beside(t, t.shape[1], 5))),\n" in product
    assert '        dimensions(0, "self", 2, lambda t: (t, beside(t, t.shape[1], 5))),\n' in product
    assert '        dimensions(1, "mat2", 2, lambda t: (beside(t, 3, t.shape[0]), t)),\n' in product
    total = (scaffold.make(torch.ops.aten.add.Tensor, tmp_path) / "register.py").read_text()
    assert "one_dtype" not in total and "dimensions" not in total


def test_where_no_call_is_found_the_line_to_write_is_named(tmp_path: Path) -> None:
    """``upsample_nearest2d`` wants four dimensions, and a size to come to."""
    package = scaffold.make(torch.ops.aten.upsample_nearest2d.default, tmp_path)
    text = (package / "goldendata" / "inputs_spec.yaml").read_text()
    assert "  # Write calls that the operator takes: no shapes were found with which it does. It said\n  # " in text
    assert text.count("???") == 2, "the size, in each case"
    (package / "goldendata" / "inputs_spec.yaml").write_text(text.replace("???", "[6, 8]"))
    done = check(package, "kernel")
    line = text.splitlines().index("  - name: contiguous") + 1
    assert done.returncode == 1, done.stderr
    assert f"the call is at upsample_nearest2d/goldendata/inputs_spec.yaml:{line}" in " ".join(done.stdout.split())


def test_a_view_is_no_new_tensor() -> None:
    with pytest.raises(RegistrationError, match="^t: it makes no new tensor, or several, or takes none"):
        scaffold.overload_of("t", None)


def test_silu_is_what_came_of_it(tmp_path: Path) -> None:
    """The worked example began with these very files: what nobody had to write is the same."""
    made = scaffold.make(scaffold.overload_of("silu", "aten::silu(Tensor self) -> Tensor"), tmp_path / "ops")
    kept = ["__init__.py", "example.py", "kernel/torch_level.py", "goldendata/inputs_spec.yaml"]
    kept += [f"test/{level}_level.py" for level in ("kernel", "op", "framework")]
    for file in kept:
        assert (made / file).read_text() == (ROOT / "ops" / "silu" / file).read_text(), file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["silo"], "silo: PyTorch has no aten::silo; did you mean 'silu'?"),
        (["__class__"], "__class__: PyTorch has no aten::__class__"),
        (["silu.out"], "silu.out: PyTorch has no aten::silu.out; did you mean"),
        (["add"], "add: pass one of its overloads as --schema:\n  add.Tensor(Tensor self, Tensor other"),
        (
            ["silu", "--schema", "silu(Tensor x) -> Tensor"],
            "has this schema; there are:\n  silu(Tensor self) -> Tensor",
        ),
        (
            ["item"],
            "it makes no new tensor, or several, or takes none by itself (begin with a copy of ops/copy_ or ops/item)",
        ),
        (["clone"], "clone: there is one already, and two can't be told apart: ops.clone.register:SPEC of "),
        (["silu", "--folder", "no/such"], "no folder no/such: make it first, or run this where it is"),
    ],
)
def test_wrong_use(arguments: list[str], message: str) -> None:
    result = new(*arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_nothing_is_written_over(tmp_path: Path) -> None:
    overload = torch.ops.aten.silu.default
    package = scaffold.make(overload, tmp_path)
    (package / "reference.py").write_text("mine")
    with pytest.raises(RegistrationError, match="silu: .*/silu is there already .remove it, or edit it"):
        scaffold.make(overload, tmp_path)
    assert (package / "reference.py").read_text() == "mine"


def test_whether_a_kernel_is_to_be_written_is_said_at_once(tmp_path: Path) -> None:
    made = new("mm", "--folder", str(tmp_path)).stdout
    kernel = tmp_path / "mm" / "kernel" / "torch_level.py"
    assert f"PyTorch takes mm apart no further: its kernel is to be written, in {kernel}." in made
    assert "takes mish apart" not in new("mish", "--folder", str(tmp_path)).stdout


def test_no_kernel_is_made_for_what_exists_in_torchscript_only(clone: OperatorSpec, tmp_path: Path) -> None:
    """No call of such an overload reaches the dispatcher, which raises for every question about it."""
    only = torch.ops.aten._unsafe_index.Tensor_hacked_twin
    schema = str(only._schema).removeprefix("aten::")
    made = new("_unsafe_index", "--schema", schema, "--folder", str(tmp_path))
    assert made.exit_code == 2 and "PyTorch's dispatcher doesn't know it: it exists in TorchScript only" in made.stderr
    assert "takes none by itself" in new("einsum", "--folder", str(tmp_path)).stderr, "einsum.sublist is another such"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RegistrationError, match="_unsafe_index: this PyTorch .* were written for: none") as error:
        replace(clone, schema=schema).register_a1(platform="cpu")
    assert error.value.code == "schema"


def test_a_built_package_has_the_files_where_they_are_looked_for() -> None:
    """Beside the code; a checkout has them elsewhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {there: f"twinkle/aten/{name}" for name, there in FOLDERS.items()} == included
    assert all(shipped(name) == ROOT / there for name, there in FOLDERS.items())
