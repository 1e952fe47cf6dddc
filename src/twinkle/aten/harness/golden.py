"""Golden data: calls of an operator with what they must give, as files that were made on a CPU.

A file holds the calls of one case in one dtype, one for each seed: the tensors among the arguments and the reference's
result, each with its whole memory. ``goldendata/index.json`` in the operator's folder has the SHA-256 of each file's
content. Only the index belongs to the sources. The files are made from the case's name by integer arithmetic, so every
machine makes the same ones, and the index is what shows it. ``script/gen_golden.py`` makes them,
``script/check_accuracy.py`` runs the kernels beside them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from twinkle.aten.arguments import Arguments
from twinkle.aten.harness.cases import Case, cases, copied
from twinkle.aten.harness.compare import memory_of
from twinkle.aten.harness.kernel_level import Known, by_reference, compare
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.harness.poison import fill
from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec, Semantics

DATA = Path("out") / "golden"
"""Where the files are when nothing else is said: a folder for each operator, below the folder that we are in."""


REMEDY = "python script/gen_golden.py"
RENEW = f"if inputs_spec.yaml or the reference was changed: {REMEDY} --write-index"


class GoldenError(ValueError):
    """Files or index aren't what they should be; the message names the file and the remedy."""


def index_file(spec: OperatorSpec) -> Path:
    """Where the digests are."""
    return spec.home.folder / "goldendata" / "index.json"


def read_index(spec: OperatorSpec) -> dict[str, str]:
    """File name -> the digest of its content.

    Raises:
        GoldenError: there is no index, or it is none.
    """
    file = index_file(spec)
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): str(digest) for name, digest in listed["files"].items()}
    except FileNotFoundError:
        raise GoldenError(
            f"{spec.name}: no index of the golden data, {file}; make it: {REMEDY} --write-index"
        ) from None
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise GoldenError(f"{file} is no index of golden data: {type(error).__name__}: {error}") from None


def parts(spec: OperatorSpec) -> tuple[OperatorSpec, ...]:
    """The operators that have golden data of their own."""
    return spec.parts


def generate(spec: OperatorSpec, data: Path, *, write_index: bool = False) -> int:
    """Makes the files of an operator, one of the :func:`parts` of another, on the CPU.

    Args:
        data: the folder in which the operator's is made.
        write_index: the digests of what was made become the index; otherwise they must be those of the index.

    Returns:
        How many files there are.

    Raises:
        GoldenError: what is made isn't what the index says, or the folder has a file that isn't one of these. Nothing
            was written.
    """
    contents: dict[str, list[dict[str, Any]]] = {}
    listed: dict[str, list[Case]] = {}
    for case in cases(spec):
        contents.setdefault(case.kept_in, []).append(_call(spec, case))
        listed.setdefault(case.kept_in, []).append(case)
    digests = {name: _digest(spec, listed[name], calls) for name, calls in contents.items()}
    folder = data / spec.name
    if not write_index:
        _check_made(spec, digests)
    _check_foreign(spec, folder, set(digests))
    if write_index:
        text = json.dumps({"operator": spec.name, "files": dict(sorted(digests.items()))}, indent=1)
        index_file(spec).write_text(text + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for name, calls in contents.items():
        torch.save(calls, folder / name)
    return len(digests)


def check(spec: OperatorSpec, profile: Profile, data: Path) -> Outcome:
    """Runs an operator's kernels on a device beside its golden data.

    Raises:
        GoldenError: a file is missing, changed, foreign or can't be read.
    """
    outcome = started(spec, "golden", profile)
    if outcome.not_run is None:
        for each in parts(spec):
            compare(outcome, each, profile, list(read(each, data)))
    return outcome


def read(spec: OperatorSpec, data: Path) -> Iterator[Known]:
    """An operator's calls from its files, each of which is what the index says.

    Raises:
        GoldenError: see :func:`check`.
    """
    index, folder = read_index(spec), data / spec.name
    listed: dict[str, list[Case]] = {}
    for case in cases(spec):
        listed.setdefault(case.kept_in, []).append(case)
    unlisted = sorted(set(listed) ^ set(index))
    if unlisted:
        whose = "the index has no digest of" if unlisted[0] in listed else "inputs_spec.yaml has no case for"
        raise GoldenError(f"{spec.name}: {whose} {unlisted[0]}; {RENEW}")
    _check_foreign(spec, folder, set(index))
    for name, of_file in listed.items():
        calls = _load(folder / name)
        if _digest(spec, of_file, calls) != index[name]:
            raise GoldenError(f"{folder / name} is not what the index says; make it anew: {REMEDY}")
        for case, call in zip(of_file, calls, strict=True):
            values = functools.partial(case.values, tensors=call["arguments"])
            if Semantics.ROUNDS in spec.semantics:
                yield by_reference(spec, case.name, values)
            else:
                yield Known(case.name, values, functools.partial(_again, call["expected"]))


def _call(spec: OperatorSpec, case: Case) -> dict[str, Any]:
    named = zip(Arguments(spec.overload).names, case.values(), strict=True)
    arguments = {name: value for name, value in named if isinstance(value, torch.Tensor)}
    if Semantics.ROUNDS in spec.semantics:  # other digits on another machine: they are made where they are compared
        return {"arguments": arguments, "expected": None}
    expected = _again(by_reference(spec, case.name, case.values).expected())
    if isinstance(expected, torch.Tensor) and not _valued(spec):
        fill(expected, 0)
    return {"arguments": arguments, "expected": expected}


def _valued(spec: OperatorSpec) -> bool:
    """Whether there is one right result, to the bit; otherwise only its layout is kept."""
    return spec.judge is None and Semantics.ALLOCATES not in spec.semantics


def _again(expected: Any) -> Any:
    return copied(expected, "cpu") if isinstance(expected, torch.Tensor) else expected


def _digest(spec: OperatorSpec, of_file: list[Case], calls: list[dict[str, Any]]) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            found.update(f"{value!r};".encode())
            return
        layout = value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
        found.update(f"{layout};".encode())
        found.update(memory_of(value).numpy().tobytes())

    add(len(calls))
    for case, call in zip(of_file, calls, strict=True):
        found.update(json.dumps([case.name, str(case.dtype), case.described]).encode())
        for name, tensor in call["arguments"].items():
            found.update(name.encode())
            add(tensor)
        add(call["expected"])
    return found.hexdigest()


def _load(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        raise GoldenError(f"{file} is missing; make it: {REMEDY}")
    try:
        calls = torch.load(file, weights_only=True)
        return [{"arguments": call["arguments"], "expected": call["expected"]} for call in calls]
    except Exception as error:  # whatever PyTorch makes of a file that is none of its own
        raise GoldenError(f"{file} can't be read ({type(error).__name__}); make it anew: {REMEDY}") from error


def _check_made(spec: OperatorSpec, digests: dict[str, str]) -> None:
    index = read_index(spec)
    names = sorted(set(digests) | set(index))
    different = [name for name in names if digests.get(name) != index.get(name)]
    if different:
        text = f"{spec.name}: {len(different)} of {len(names)} files are not what the index says, first {different[0]}"
        raise GoldenError(f"{text}; {RENEW}; otherwise this PyTorch or CPU computes something else")


def _check_foreign(spec: OperatorSpec, folder: Path, known: set[str]) -> None:
    foreign = sorted({entry.name for entry in folder.iterdir()} - known) if folder.is_dir() else []
    if foreign:
        raise GoldenError(f"{folder / foreign[0]} is no golden data of {spec.name}; remove it, or name another folder")
