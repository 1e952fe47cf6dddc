"""Golden data: the same wherever they are made, and nothing that isn't what the index says is taken for them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED, PROFILE, ROOT
from twinkle.aten import Home, Profile, catalog
from twinkle.aten.harness import golden
from twinkle.aten.harness.cases import cases
from twinkle.aten.harness.fills import FILLS, FLOATING_ONLY, large, normal, special
from twinkle.aten.spec import OperatorSpec

elsewhere = pytest.mark.skipif(INTERPRETED or DEVICE != "cpu", reason="they are made on the CPU")


def program(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, ROOT / "script" / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


gen_golden, check_accuracy = program("gen_golden"), program("check_accuracy")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the golden data of one operator, the smallest."""
    assert gen_golden.main(["empty_strided", "--data", str(tmp_path)]) == 0
    return tmp_path


# --- what they hold ---------------------------------------------------------------------------------------------------


def test_every_operators_data_are_what_its_index_says_and_its_kernels_are_right(
    spec: OperatorSpec, chip: Profile, tmp_path: Path
) -> None:
    if INTERPRETED and spec.name != "clone":
        pytest.skip("the calls are those of the kernel level, where each operator's Triton kernel is interpreted")
    for part in golden.parts(spec):
        files = golden.generate(part, tmp_path)
        assert files == len(golden.read_index(part)) == len(list((tmp_path / part.name).iterdir())) > 0
    outcome = golden.check(spec, chip, tmp_path)
    assert outcome.problems == [] and outcome.state == "passed"


@elsewhere
@pytest.mark.multiprocess
def test_they_do_not_depend_on_the_vector_code(tmp_path: Path) -> None:
    """``gen_golden.py`` fails where a digest is another than that of the index."""
    command = [sys.executable, ROOT / "script" / "gen_golden.py", "--data", tmp_path]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = [part.name for name in catalog.names() for part in golden.parts(catalog.operator(name))]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == parts


@elsewhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_numbers_have_all_digits_and_about_a_normal_distribution(dtype: torch.dtype) -> None:
    made = normal("a name", 60000, dtype).double()
    assert abs(made.mean()) < 0.05 and 1.0 < made.std() < 1.3
    narrower = {torch.float64: torch.float32, torch.float32: torch.bfloat16, torch.float16: torch.bfloat16}
    rounded = made.to(narrower.get(dtype, torch.float8_e4m3fn)).double()
    assert (rounded != made).double().mean() > 0.3, "a narrower dtype would hold them too"


@elsewhere
def test_known_numbers() -> None:
    """These were once computed by hand from the definition; nothing may change them."""
    import hashlib

    stream = hashlib.shake_256(b"x").digest(32)
    four = [int.from_bytes(stream[i : i + 8], "little") & (2**23 - 1) for i in (0, 8, 16, 24)]
    assert normal("x", 1, torch.float32).item() == (sum(four) - 2 * (2**23 - 1)) / 2**22
    smallest = str(torch.finfo(torch.bfloat16).smallest_normal)
    assert set(map(str, special("y", 99, torch.bfloat16).tolist())) == {"nan", "inf", "-inf", "-0.0", smallest}
    assert set(special("y", 99, torch.bfloat16).view(torch.int16).tolist()) == {0x7FC0, 0x7F80, -0x80, -0x8000, 0x80}


@elsewhere
@pytest.mark.parametrize("name", sorted(set(FILLS) - set(FLOATING_ONLY)))
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.complex128])
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    made = FILLS[name]("a name", 5, dtype)
    assert made.shape == (5,) and made.dtype is dtype


@elsewhere
def test_the_largest_number_of_what_has_no_sign_or_two_parts() -> None:
    assert large("a name", 5, torch.bool).tolist() == [True] * 5
    assert set(large("a name", 50, torch.complex64).tolist()) == {
        torch.finfo(torch.float32).max,
        -torch.finfo(torch.float32).max,
    }


@elsewhere
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("size", [0, 1, 5, 250_000])
def test_every_size(fill: Any, size: int) -> None:
    made = fill("a name", size, torch.float32)
    assert made.shape == (size,) and made.dtype is torch.float32
    assert torch.equal(fill("a name", size, torch.float32).view(torch.int32), made.view(torch.int32))


def test_seeds_differ(spec: OperatorSpec) -> None:
    seen: dict[str, list[list[torch.Tensor]]] = {}
    for case in cases(spec, seeds=2):
        drawn = {name for name, d in case.described.items() if isinstance(d, dict) and "values" not in d}
        tensors = [v for n, v in zip(case.described, case.values(), strict=False) if n in drawn and v.numel() > 9]
        seen.setdefault(case.kept_in, []).append(tensors)
    for one, other in seen.values():
        assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- what is refused --------------------------------------------------------------------------------------------------

FILE = "gaps.int64.pt"


def damage_missing(folder: Path) -> None:
    (folder / FILE).unlink()


def damage_changed(folder: Path) -> None:
    calls = torch.load(folder / FILE)
    calls[0]["expected"] = torch.zeros(3)
    torch.save(calls, folder / FILE)


def damage_swapped(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / "gaps.bool.pt").read_bytes())


def damage_unreadable(folder: Path) -> None:
    (folder / FILE).write_bytes(b"no data")


def damage_foreign(folder: Path) -> None:
    (folder / "notes.txt").write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, f"{FILE} is missing; make it: python script/gen_golden.py"),
        (damage_changed, f"{FILE} is not what the index says; make it anew"),
        (damage_swapped, f"{FILE} is not what the index says; make it anew"),
        (damage_unreadable, f"{FILE} can't be read"),
        (damage_foreign, "notes.txt is no golden data of empty_strided; remove it, or name another folder"),
    ],
)
def test_damaged_data(damage: Any, message: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(data / "empty_strided")
    arguments = ["empty_strided", "--device", PROFILE, "--data", str(data)]
    assert check_accuracy.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1


def moved(tmp_path: Path, **changed: str) -> OperatorSpec:
    """``empty_strided``, its ``goldendata`` folder another one, files of it replaced."""
    right = catalog.operator("empty_strided")
    folder = tmp_path / "empty_strided"
    (folder / "goldendata").mkdir(parents=True)
    for file in ("inputs_spec.yaml", "index.json"):
        text = (right.home.folder / "goldendata" / file).read_text()
        (folder / "goldendata" / file).write_text(changed.get(file.partition(".")[0], text))
    return replace(right, home=Home(right.home.package, folder))


def test_a_case_that_was_changed_after_the_index(tmp_path: Path, data: Path, chip: Profile) -> None:
    text = (catalog.operator("empty_strided").home.folder / "goldendata" / "inputs_spec.yaml").read_text()
    changed = moved(tmp_path / "op", inputs_spec=text.replace("[64, 8, 2]", "[128, 8, 2]"))
    with pytest.raises(golden.GoldenError, match="5 of 31 files are not what the index says, first gaps.*write-index"):
        golden.generate(changed, tmp_path / "new")
    assert not (tmp_path / "new").exists(), "nothing is written"
    with pytest.raises(golden.GoldenError, match="gaps.float32.pt is not what the index says"):
        golden.check(changed, chip, data)
    golden.generate(changed, tmp_path / "new", write_index=True)
    assert golden.check(changed, chip, tmp_path / "new").state == "passed"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json is no index of golden data"),
        ("[]", "index.json is no index of golden data"),
        ('{"files": {}}', "the index has no digest of contiguous.bfloat16.pt; if inputs_spec.yaml or the reference"),
    ],
)
def test_a_wrong_index(index: str, message: str, tmp_path: Path, data: Path, chip: Profile) -> None:
    with pytest.raises(golden.GoldenError, match=message):
        golden.check(moved(tmp_path / "op", index=index), chip, data)


def test_no_index(tmp_path: Path, chip: Profile) -> None:
    spec = moved(tmp_path)
    golden.index_file(spec).unlink()
    with pytest.raises(golden.GoldenError, match="no index .*make it: python script/gen_golden.py --write-index"):
        golden.generate(spec, tmp_path)


# --- the programs -----------------------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_no_success(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ops.empty_strided.kernel import torch_level

    right: Any = torch_level.empty_strided_torch
    monkeypatch.setattr(torch_level, "empty_strided_torch", lambda *a, **k: right(*a, **k).unsqueeze(0))
    file = tmp_path / "found.json"
    arguments = ["empty_strided", "--device", PROFILE, "--data", str(data), "--json", str(file)]
    assert check_accuracy.main(arguments) == 1
    (outcome,) = json.loads(file.read_text())["outcomes"]
    assert outcome["ok"] is False and "shape" in outcome["problems"][0]


def test_an_absent_device_is_not_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_accuracy.main(["empty_strided", "--device", "p800", "--data", str(data)]) == 3
    assert "not run" in capsys.readouterr().out


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert gen_golden.main(["empty_strided", "--data", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        check_accuracy.main(["empty_strided", "--json", str(tmp_path / "none" / "found.json")])
    assert ended.value.code == 2 and "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("script", [gen_golden, check_accuracy])
def test_wrong_use(script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in ((["clon"], "did you mean 'clone'"), (["clone", "--device", "cpv"], "cpv")):
        with pytest.raises(SystemExit) as ended:
            script.main(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err
    monkeypatch.setattr(catalog, "names", list)
    with pytest.raises(SystemExit) as ended:
        script.main([])
    assert ended.value.code == 2 and "entry point of the group twinkle.aten_ops" in capsys.readouterr().err
