"""The framework level: a transformers model with and without the operator's kernel, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from twinkle.aten.harness import places
from twinkle.aten.harness.compare import too_far
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec, Semantics

SECONDS = 600
"""A model's process takes some 20 s on two cores."""

FIRST = 2
"""So many tokens are the same whoever rounds."""


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """In a tiny model that calls the operator the loss, all gradients and the generated tokens have the same bits.

    Where the operator rounds in an order of its own, the loss and the gradients are judged by their distance to those
    of the model in fp64, and only the first tokens are the same: those that follow hang on a last bit sometimes.
    An operator whose random numbers aren't native's is compared with itself: the same seed, the same model.
    """
    outcome = started(spec, "framework", profile)
    if spec.by_design is not None:
        outcome.not_run = f"by design: {spec.by_design}"
    if outcome.not_run is not None:
        return outcome
    compare(outcome, [spec], profile)
    return outcome


def groups(specs: Sequence[OperatorSpec]) -> list[tuple[dict[str, Any], list[OperatorSpec]]]:
    """Models, as few as do, and the operators that each of them calls: settings that exclude each other are two."""
    found: list[tuple[dict[str, Any], list[OperatorSpec]]] = []
    for spec in sorted(specs, key=lambda spec: len(spec.model)):
        for model, members in found:
            if all(model.get(setting, value) == value for setting, value in spec.model.items()):
                model.update(spec.model)
                members.append(spec)
                break
        else:
            found.append((dict(spec.model), [spec]))
    return found


def compare(outcome: Outcome, specs: Sequence[OperatorSpec], profile: Profile) -> None:
    """Makes the checks of several operators at once, in models that call them; each must be reached by name."""
    outcome.facts = {"engine": "transformers"}
    for model, members in groups(specs):
        try:
            _compare(outcome, members, profile, model)
        except ModelError as error:
            *_, last = str(error).strip().splitlines() or ["it said nothing"]
            whose = "; ".join(places.of_declaration(spec, "model") for spec in members)
            outcome.check(f"the process of the model {model or 'qwen3'} failed: {last}; {whose}", False)
            outcome.facts["model's process"] = str(error)[-4000:]


def _compare(outcome: Outcome, specs: list[OperatorSpec], profile: Profile, model: dict[str, Any]) -> None:
    random = any(Semantics.RANDOM in spec.semantics for spec in specs)
    rounds = any(Semantics.ROUNDS in each.semantics for spec in specs for each in spec.parts)
    ours, our_numbers = observe(specs, profile, model)
    other, other_numbers = observe(specs if random else [], profile, model)
    if rounds and not random:
        _, truth = observe([], profile, {**model, "dtype": "float64"})
        outcome.check("gradients of other parameters", our_numbers.keys() == other_numbers.keys())
        for name, numbers in our_numbers.items():
            outcome.check(name, too_far(numbers, other_numbers[name], truth[name]))
        few = [[row[:FIRST] for row in found["tokens"]] for found in (ours, other)]
        outcome.check(f"the first {FIRST} tokens differ", few[0] == few[1])
    else:
        for what in ("loss", "gradients", "tokens"):
            outcome.check(f"{what} differ", ours[what] == other[what])
    outcome.check("the loss is not finite", ours["finite"])
    by_name = {spec.name: spec for spec in specs}
    for name, found in ours["operators"].items():
        never = f"the model never reached the kernel of {name}; {places.of_declaration(by_name[name], 'model')}"
        outcome.check(never, found["kernel"] > 0)
    outcome.facts |= {"device": ours["device"], **ours["operators"]}


class ModelError(RuntimeError):
    """A model's process failed; the message is what it said."""


Observed = tuple[dict[str, Any], dict[str, torch.Tensor]]


def observe(specs: list[OperatorSpec], profile: Profile, model: dict[str, Any]) -> Observed:
    """What a model does in a process of its own with operators registered: see ``harness.model_main.observe_model``.

    Returns:
        what that function returns; the loss and the gradients.
    """
    registrations = [
        {
            "package": "" if spec.home.is_script else spec.home.package,
            "folder": str(spec.home.folder),
            "dispatch_key": profile.dispatch_key,
            "platform": profile.platform,
        }
        for spec in specs
    ]
    task: dict[str, Any] = {"device": profile.device, "model": model, "registrations": registrations}
    command = [sys.executable, "-P", "-m", "twinkle.aten.harness.model_main"]  # nothing that lies in the current folder
    with tempfile.TemporaryDirectory() as folder:
        task["kept"] = str(Path(folder, "numbers.pt"))
        try:
            done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise ModelError(f"it did not end within {SECONDS} s") from None
        if done.returncode != 0:
            raise ModelError(done.stderr)
        return json.loads(done.stdout.splitlines()[-1]), torch.load(task["kept"])
