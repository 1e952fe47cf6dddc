"""Operators that the environment asks for, in processes that somebody else starts, forks and kills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.engines.conftest import Carry
from tests.support.engine_processes import PROCESSES, ROOT, run_python
from twinkle.aten.registration import active
from twinkle.cli import app
from twinkle.engines import activation
from twinkle.engines.merged import merged
from twinkle.engines.tallies import OTHERS, REASONS, create, read


def counts_of(facts: dict[str, Any], operator: str, role: str) -> dict[str, Any]:
    """Of the only process of that role."""
    (found,) = (of for label, of in facts["operators"][operator]["processes"].items() if label.split()[0] == role)
    return found


# --- whole processes --------------------------------------------------------------------------------------------------


def test_spawned_forked_and_killed_processes_have_told_all(tmp_path: Path) -> None:
    """The killed one got the signal in the middle of its work, after 7 calls."""
    program = ("tests/support/engine_processes.py", *PROCESSES)
    done = run_python(*program, OPS="clone,silu", PLATFORM="cpu", REPORT_DIR=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = merged(tmp_path)
    assert facts["problems"] == []
    assert [process["process"].split()[0] for process in facts["processes"]].count("MainProcess") == 1
    by_role = {process["role"]: process for process in facts["processes"]}
    assert set(by_role) == {"MainProcess", "Spawned", "Forked", "Killed"}
    for role, calls in (("MainProcess", 3), ("Spawned", 5), ("Forked", 6), ("Killed", 7)):
        of = counts_of(facts, "clone", role)
        assert (of["kernel"], of["fallbacks"], of["errors"]) == (calls, {"empty": 1}, 0), role
        record = by_role[role]
        assert record["operators"]["clone"] == {"level": "torch", "keys": ("CPU",), "mode": "auto"}
        assert record["asked"]["TWINKLE_A1_OPS"] == "clone,silu" and record["platform"] == "cpu"
        assert record["versions"]["torch"] == torch.__version__ and record["error"] is None
        assert record["parent"] == (by_role["MainProcess"]["pid"] if role != "MainProcess" else os.getpid())
    assert facts["operators"]["clone"]["kernel"] == 3 + 5 + 6 + 7
    assert facts["operators"]["silu"] == {
        "kernel": 0, "fallbacks": {}, "errors": 0, "bypassed": [], "processes": {},
    }  # fmt: skip


def test_without_the_variables_nothing_is_there() -> None:
    code = "import sys; from twinkle.engines.vllm import register; register(); print(sorted(sys.modules))"
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = {name for name in eval(done.stdout) if name.partition(".")[0] in ("twinkle", "torch", "ops")}
    assert loaded == {"twinkle", "twinkle.engines", "twinkle.engines.vllm"}


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (
            {"PLATFORM": "cpu", "REPORT_DIR": "out"},
            "TWINKLE_A1_PLATFORM, TWINKLE_A1_REPORT_DIR: set, but TWINKLE_A1_OPS is not, so that no operator is "
            "activated",
        ),
        ({"OP": "clone"}, "TWINKLE_A1_OP is no variable of ours; did you mean 'TWINKLE_A1_OPS'?"),
        (
            {"OPS": "", "ONERROR": "stop"},
            "TWINKLE_A1_ONERROR is no variable of ours; did you mean 'TWINKLE_A1_ON_ERROR'?",
        ),
        ({"OPS": "", "PLATFORM": "cpu", "REPORT_DIR": "out"}, None),
    ],
)
def test_wishes_that_nobody_carries_out_cost_one_warning(
    wishes: dict[str, str], said: str | None, tmp_path: Path
) -> None:
    """One for the run, in whose processes the plug-in is called twice each. PyTorch isn't imported for it."""
    code = (
        "import subprocess, sys; from twinkle.engines.vllm import register; register(); register(); "
        "print('torch' in sys.modules, flush=True); "
        "len(sys.argv) > 2 or subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[1], 'child'])"
    )
    done = run_python("-c", code, code, **wishes)
    assert done.returncode == 0 and done.stdout.split() == ["False", "False"], done.stderr
    assert done.stderr.splitlines() == ([] if said is None else [said])


FAILING = {
    "a file is in its place": "touch {folder}; exec {command} Spawned",
    "it is read-only": "mkdir {folder}; mount -t tmpfs -o ro tmpfs {folder}; exec {command}",
    "it is full": "mkdir {folder}; mount -t tmpfs -o size=4k tmpfs {folder}; exec {command}",
}


@pytest.mark.parametrize("why", FAILING)
def test_a_folder_that_fails_costs_one_warning(why: str, tmp_path: Path) -> None:
    script = FAILING[why]
    if "mount" in script:
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
            pytest.skip("this user can't mount a file system of its own")
        unshare = ["unshare", "-rm"]
    else:
        unshare = []
    folder = tmp_path / "reports"
    command = f"{sys.executable} {ROOT / 'tests/support/engine_processes.py'}"
    shell = [*unshare, "sh", "-c", script.format(folder=folder, command=command)]
    done = run_python(shell=shell, OPS="clone", PLATFORM="cpu", REPORT_DIR=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no report of the operators") == 1 and str(folder) in done.stderr
    assert len(done.stderr.splitlines()) == 1, "the run has no other trouble"
    assert json.loads(done.stdout) == {"kernel": 3, "fallbacks": {"empty": 1}}, "counted in memory all the same"
    assert folder.is_file() or not folder.exists() or list(folder.iterdir()) == []


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"OPS": "clon", "PLATFORM": "cpu"}, "no such operator; known: .*did you mean 'clone'"),
        ({"OPS": "clone"}, "TWINKLE_A1_PLATFORM is not; on this machine it can be cpu"),
        (
            {"OPS": "clone", "PLATFORM": "cppu"},
            "PLATFORM: unknown platform 'cppu'.*nor is it a device profile",
        ),
        ({"OPS": "clone", "PLATFORM": "kunlunxin"}, "the package torch_xmlir is not installed"),
        ({"OPS": "clone", "PLATFORM": "no/such.yaml"}, "PLATFORM: no such device profile: no/such.yaml"),
        ({"OPS": " , ", "PLATFORM": "cpu"}, "names no operator"),
        ({"OPS": "all,clone", "PLATFORM": "cpu"}, "all, or names of operators, not both"),
        ({"OPS": "auto", "PLATFORM": "cpu"}, "would measure in every process"),
        (
            {"OPS": "All", "PLATFORM": "cpu"},
            "'All' is no operator, and a list holds only those .did you mean 'all' itself",
        ),
        ({"OPS": "clone,empty", "PLATFORM": "cpu"}, "empty is not registered, by design"),
        ({"OPS": "clone", "PLATFORM": "cpu", "ON_ERROR": "stopp"}, "report or stop, not 'stopp'; did you mean 'stop'"),
    ],
)
def test_an_error_is_reported_and_the_process_goes_on(
    wishes: dict[str, str], words: str, carry_out: Carry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = carry_out(**wishes, REPORT_DIR=tmp_path)
    assert found.installation is None and active() == []
    (said,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert re.search(words, said.getMessage()), said.getMessage()
    facts = merged(tmp_path)
    assert len(facts["problems"]) == 1 and re.search(words, facts["problems"][0])
    assert CliRunner().invoke(app, ["ops", "report", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("stop", ["stop", "Stop", " STOP "])
def test_an_error_stops_the_process_where_that_is_asked_for(stop: str, carry_out: Carry, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did you mean 'clone'"):
        carry_out(OPS="clon", PLATFORM="cpu", ON_ERROR=stop, REPORT_DIR=tmp_path)
    assert "did you mean 'clone'" in merged(tmp_path)["problems"][0], "the record was written before"


def test_a_device_profile_names_the_platform_and_the_modes(carry_out: Carry, tmp_path: Path) -> None:
    chip = tmp_path / "mychip.yaml"
    chip.write_text("name: mychip\nplatform: cpu\ndevice: cpu\ndispatch_key: CPU\nmodes: {clone: native}\n")
    carry_out(OPS="clone, copy_", PLATFORM=chip, REPORT_DIR=tmp_path / "reports")
    torch.ones(3).clone()
    (process,) = merged(tmp_path / "reports")["processes"]
    assert process["platform"] == "cpu"
    assert {name: of["mode"] for name, of in process["operators"].items()} == {"clone": "native", "copy_": "auto"}
    assert merged(tmp_path / "reports")["operators"]["clone"]["fallbacks"] == {"native-mode": 1}


@pytest.mark.parametrize("names", ["clone,copy_", " clone , copy_,", "clone copy_"])
def test_names_have_commas_or_spaces_between(names: str, carry_out: Carry) -> None:
    carried = carry_out(OPS=names, PLATFORM="cpu")
    assert carried.installation is not None and list(carried.installation.registrations) == ["clone", "copy_"]


def test_an_operator_that_comes_along_is_told_too(carry_out: Carry, tmp_path: Path) -> None:
    carry_out(OPS="embedding", PLATFORM="cpu", REPORT_DIR=tmp_path)
    weight = torch.ones(5, 4, requires_grad=True)
    torch.nn.functional.embedding(torch.tensor([1, 2]), weight).sum().backward()
    operators = merged(tmp_path)["operators"]
    assert operators["embedding"]["kernel"] == 1 and operators["embedding_dense_backward"]["kernel"] == 1


def test_what_was_compiled_is_told_although_nothing_calls_us(
    carry_out: Carry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "GLANCE_SECONDS", 0.01)
    carry_out(OPS="clone,silu", PLATFORM="cpu", REPORT_DIR=tmp_path)
    torch.ones(3).clone()
    assert not merged(tmp_path)["processes"][0]["compiled"]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    until = time.monotonic() + 10
    while not (facts := merged(tmp_path))["processes"][0]["compiled"] and time.monotonic() < until:
        time.sleep(0.01)
    (process,) = facts["processes"]
    assert process["compiled"]
    assert facts["operators"]["silu"]["bypassed"] == [process["process"]]
    assert facts["operators"]["clone"]["bypassed"] == []
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", "report", str(tmp_path)]).output
    assert f"silu: {process['process']}" in text.partition("Bypassed")[2]


AHEAD_OF_TIME = """
import sys
import torch
from twinkle.engines.vllm import register

def work(x):
    return x.clone() * 2

if sys.argv[1] == "save":
    torch.compile(work, fullgraph=True).aot_compile(((torch.ones(8),), {})).save_compiled_function(sys.argv[2])
else:
    register()
    with open(sys.argv[2], "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    assert torch.equal(loaded(torch.ones(8)), torch.full((8,), 2.0))
    from twinkle.aten.registration import active
    print([made.counts.compiled for made in active()], "stats" in torch._dynamo.utils.counters)
"""


LATER = """
    from ops.clone import register_a1
    print(register_a1(platform="cpu").compiled_before)
"""


@pytest.mark.slow
def test_code_that_an_earlier_process_compiled_is_noticed_too(tmp_path: Path) -> None:
    """An engine's warm start: no tracer runs in this process."""
    if not hasattr(torch.compile(lambda x: x, fullgraph=True), "aot_compile"):
        pytest.skip(f"PyTorch {torch.__version__} can't save what it compiled")
    saved = run_python("-c", AHEAD_OF_TIME, "save", str(tmp_path / "work"))
    assert saved.returncode == 0, saved.stderr
    loaded = run_python("-c", AHEAD_OF_TIME, "load", str(tmp_path / "work"), OPS="clone", PLATFORM="cpu")
    assert loaded.stdout.split() == ["[True]", "False"], loaded.stderr
    later = run_python("-c", AHEAD_OF_TIME.replace("    register()\n", "") + LATER, "load", str(tmp_path / "work"))
    assert later.stdout.splitlines()[-1] == "True" and "something was compiled before its kernel" in later.stderr


# --- counts in files --------------------------------------------------------------------------------------------------


def test_threads_lose_no_call(tmp_path: Path) -> None:
    counts = create(tmp_path / "x.counts", ["a", "clone"])["clone"]

    def work() -> None:
        for number in range(20_000):
            counts.kernel += 1
            counts.fall_back(f"reason {number % 5}")

    threads = [threading.Thread(target=work) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    seen = read(tmp_path / "x.counts")
    assert list(seen) == ["a", "clone"] and (seen["a"].kernel, seen["a"].fallbacks) == (0, {})
    assert seen["clone"].kernel == 80_000
    assert seen["clone"].fallbacks == {f"reason {number}": 16_000 for number in range(5)}


def test_more_reasons_than_there_is_room_for_are_counted_together(tmp_path: Path) -> None:
    counts = create(tmp_path / "x.counts", ["clone"])["clone"]
    for _ in range(2):
        for number in range(REASONS + 9):
            counts.fall_back(f"reason {number}")
    seen = read(tmp_path / "x.counts")["clone"].fallbacks
    assert seen == {**{f"reason {number}": 2 for number in range(REASONS - 1)}, OTHERS: 20}


def test_files_that_cannot_be_read_hide_no_others(carry_out: Carry, tmp_path: Path) -> None:
    carry_out(OPS="clone", PLATFORM="cpu", REPORT_DIR=tmp_path)
    torch.ones(3).clone()
    (good,) = tmp_path.glob("*.counts")
    (record,) = tmp_path.glob("*.json")
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    for name, content in (("short", good.read_bytes()[:-1]), ("foreign", b"x" * 100)):
        (tmp_path / f"{name}.json").write_text(record.read_text())
        (tmp_path / f"{name}.counts").write_bytes(content)
    (tmp_path / "alone.json").write_text(record.read_text())
    (tmp_path / "killed.counts").write_bytes(good.read_bytes())
    facts = merged(tmp_path)
    assert facts["operators"]["clone"]["kernel"] == 1 and len(facts["processes"]) == 4
    assert sorted(problem.partition(":")[0] for problem in facts["problems"]) == [
        "a.json", "alone.counts", "b.json", "foreign.counts", "killed.counts", "short.counts",
    ]  # fmt: skip


def test_a_record_of_another_version_can_be_read(carry_out: Carry, tmp_path: Path) -> None:
    carry_out(OPS="clone", PLATFORM="cpu", REPORT_DIR=tmp_path)
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    del record["left_out"]
    file.write_text(json.dumps({**record, "what comes later": 1}))
    assert merged(tmp_path)["problems"] == []


def test_two_machines_may_use_the_same_numbers(carry_out: Carry, tmp_path: Path) -> None:
    carry_out(OPS="clone", PLATFORM="cpu", REPORT_DIR=tmp_path)
    torch.ones(3).clone()
    (record,) = tmp_path.glob("*.json")
    (tmp_path / "other.json").write_text(record.read_text().replace('"host": "', '"host": "other-'))
    (tmp_path / "other.counts").write_bytes(record.with_suffix(".counts").read_bytes())
    clone = merged(tmp_path)["operators"]["clone"]
    assert clone["kernel"] == 2 and len(clone["processes"]) == 2
    assert any(f"MainProcess {os.getpid()} on other-" in label for label in clone["processes"])


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(carry_out: Carry, tmp_path: Path) -> None:
    def report(*arguments: str) -> Any:
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["ops", "report", *arguments])

    carry_out(OPS="clone,silu", PLATFORM="cpu", REPORT_DIR=tmp_path)
    torch.ones(3).clone()
    torch.ones(0).clone()
    result = report(str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert f"clone MainProcess {os.getpid()} 1 1 0 empty 1" in lines
    assert lines[lines.index("Never called") + 1] == "silu"
    assert json.loads(report(str(tmp_path), "--json").stdout) == json.loads(json.dumps(merged(tmp_path)))
    (tmp_path / "empty").mkdir()
    assert report(str(tmp_path / "empty")).exit_code == 3
    missing = report(str(tmp_path / "missing"))
    assert missing.exit_code == 2 and "TWINKLE_A1_REPORT_DIR" in missing.stderr
