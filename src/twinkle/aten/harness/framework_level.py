"""The framework level: a transformers model with and without the operator's kernel, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec, Semantics


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """In a tiny model that calls the operator the loss, all gradients and the generated tokens have the same bits.

    An operator whose random numbers aren't native's is compared with itself: the same seed, the same model.
    """
    outcome = started(spec, "framework", profile)
    if spec.by_design is not None:
        outcome.not_run = f"by design: {spec.by_design}"
    if outcome.not_run is not None:
        return outcome
    compare(outcome, [spec], profile)
    return outcome


def compare(outcome: Outcome, specs: list[OperatorSpec], profile: Profile) -> None:
    """Makes the checks of several operators at once, in a model that calls them all; each must be reached by name."""
    random = any(Semantics.RANDOM in spec.semantics for spec in specs)
    model: dict[str, Any] = {}
    for spec in specs:
        model |= spec.model
    ours = observe(specs, profile, model)
    other = observe(specs if random else [], profile, model)
    for what in ("loss", "gradients", "tokens"):
        outcome.check(f"{what} differ", ours[what] == other[what])
    outcome.check("the loss is not finite", ours["finite"])
    for name, found in ours["operators"].items():
        outcome.check(f"{name}: the model never reached its kernel", found["kernel"] > 0)
    outcome.facts = {"engine": "transformers", "device": ours["device"], **ours["operators"]}


def observe(specs: list[OperatorSpec], profile: Profile, model: dict[str, Any]) -> dict[str, Any]:
    """What a model does in a process of its own with operators registered: see ``harness.model.observe_model``."""
    registrations = [
        {
            "package": "" if spec.home.is_script else spec.home.package,
            "folder": str(spec.home.folder),
            "dispatch_key": profile.dispatch_key,
            "platform": profile.platform,
        }
        for spec in specs
    ]
    task = {"device": profile.device, "model": model, "registrations": registrations}
    command = [sys.executable, "-m", "twinkle.aten.harness.model"]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"the model's process failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
