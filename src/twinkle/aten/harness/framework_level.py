"""The framework level: a transformers model with and without the operator's kernel, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec, Semantics

RANDOM_SETTINGS = {"attention_dropout": 0.1, "attn_implementation": "eager"}
"""With these the model draws random numbers by operators that can be replaced."""


def run(spec: OperatorSpec, profile: Profile) -> Outcome:
    """The loss, all gradients and the generated tokens have the same bits, and the kernel served calls of the model.

    An operator whose random numbers aren't native's is compared with itself: the same seed, the same model.
    """
    outcome = started(spec, "framework", profile)
    if outcome.not_run is not None:
        return outcome
    compare(outcome, [spec], profile)
    return outcome


def compare(outcome: Outcome, specs: list[OperatorSpec], profile: Profile) -> None:
    """Makes the checks of several operators at once; each must have been reached by name."""
    random = any(Semantics.RANDOM in spec.semantics for spec in specs)
    settings = RANDOM_SETTINGS if random else {}
    ours = _model(specs, profile, settings)
    other = _model(specs if random else [], profile, settings)
    for what in ("loss", "gradients", "tokens"):
        outcome.check(f"{what} differ", ours[what] == other[what])
    outcome.check("the loss is not finite", ours["finite"])
    for name, found in ours["operators"].items():
        outcome.check(f"{name}: the model never reached its kernel", found["kernel"] > 0)
    outcome.facts = {"engine": "transformers", "device": ours["device"], **ours["operators"]}


def _model(specs: list[OperatorSpec], profile: Profile, settings: dict[str, Any]) -> dict[str, Any]:
    registrations = [
        {
            "package": "" if spec.home.is_script else spec.home.package,
            "folder": str(spec.home.folder),
            "dispatch_key": profile.dispatch_key,
            "platform": profile.platform,
        }
        for spec in specs
    ]
    task = {"device": profile.device, "settings": settings, "registrations": registrations}
    command = [sys.executable, "-m", "twinkle.aten.harness.model"]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"the model's process failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
