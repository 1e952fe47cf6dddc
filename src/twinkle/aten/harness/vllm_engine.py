"""The framework level in a real vLLM: the same prompts with and without the operators, in all of its processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twinkle.aten.harness.framework_level import FIRST
from twinkle.aten.harness.outcome import Outcome, started
from twinkle.aten.profiles import Profile
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.engines import activation
from twinkle.engines.merged import merged
from twinkle.engines.vllm import PREFIX

PRESETS = ("llama", "qwen3")
TOKENS = 16
PROMPTS = [[(7 * row + 13 * place) % 250 + 3 for place in range(5 + 3 * row)] for row in range(4)]
"""Of different lengths, so that they share no layout."""

EAGER = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "seed": 0}
"""As few tokens as do; and a share of the memory that leaves others theirs."""
SHARE = {"gpu_memory_utilization": 0.2}

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; there is no more to hold
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions that our own program sends to its own workers
    "PYTHONSAFEPATH": "1",  # the folder of that program holds modules with everyday names
}

_MAIN = Path(__file__).with_name("vllm_main.py")


def missing() -> str | None:
    """None where vLLM can be started from this environment, else what to do."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed in this environment: make test-vllm makes one that has it, for the CPU"
    return None


def make_model(preset: str, folder: Path) -> Path:
    """Saves a tiny model with random weights as vLLM reads it; without a tokenizer, since prompts are numbers."""
    import torch

    from twinkle import presets

    torch.manual_seed(0)
    presets.build(preset, head_dim=32).save_pretrained(folder / preset)  # vLLM has no attention for narrower heads
    return folder / preset


def generate(
    model: Path,
    *,
    wishes: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] = EAGER,
    environment: Mapping[str, str] | None = None,
    look: bool = False,
    kill: bool = False,
    seconds: float = 900,
) -> dict[str, Any]:
    """Has vLLM generate tokens, in processes of its own.

    Args:
        model: a folder, see :func:`make_model`.
        wishes: the variables of :mod:`twinkle.engines.activation`; none of the caller's own are passed on.
        settings: of ``vllm.LLM``.
        environment: further variables.
        look, kill: see ``vllm_main.py``.
        seconds: after so long it counts as hanging.

    Returns:
        ``tokens`` by prompt, vLLM's ``version``, ``modules`` of ours in each worker, and ``log``.

    Raises:
        RuntimeError: vLLM failed; the message ends with its log's.
    """
    task = {
        "model": str(model),
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "settings": {**SHARE, **settings},
        "look": look,
        "kill": kill,
    }
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    done = subprocess.run(
        [sys.executable, str(_MAIN)],
        input=json.dumps(task),
        env={**own, **OFFLINE, **(environment or {}), **(wishes or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    told: list[str] = []
    said: list[str] = []
    for line in done.stdout.splitlines():
        (told if line.startswith('{"tokens"') else said).append(line)
    if not told or (done.returncode != 0) is not kill:
        raise RuntimeError(f"vLLM's process ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return {**json.loads(told[-1]), "log": "\n".join([*said, done.stderr])}


def run(specs: Sequence[OperatorSpec], profile: Profile) -> list[Outcome]:
    """All operators together in one vLLM for each tiny model: identical tokens, and served in a worker process.

    An operator that vLLM never calls on this platform is not run; one that it calls, but never with what the kernel
    takes, has failed. Where one rounds in an order of its own, only the first tokens are the same.
    """
    outcomes = {spec.name: started(spec, "framework", profile) for spec in specs}
    why_not = missing()
    for spec in specs:
        never = spec.by_design or spec.caution
        reason = f"by design: {never}" if never else why_not
        outcomes[spec.name].not_run = outcomes[spec.name].not_run or reason
    chosen = [spec for spec in specs if outcomes[spec.name].not_run is None]
    for preset in PRESETS if chosen else ():
        # Most of a run is waiting for processes to start, so two take little longer than one.
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as both:
            model = make_model(preset, Path(folder))
            reports = Path(folder, "reports")
            native = both.submit(generate, model)
            injected = both.submit(generate, model, wishes=wishes(chosen, profile, reports))
            found = native.result(), injected.result()
            facts = merged(reports)
        compare(outcomes, chosen, preset, found, facts)
    for spec in chosen:
        outcome = outcomes[spec.name]
        if not any(outcome.facts[preset] for preset in PRESETS):
            outcome.not_run = "vLLM never calls it here"
    return list(outcomes.values())


def wishes(specs: Sequence[OperatorSpec], profile: Profile, folder: Path) -> dict[str, str]:
    """The environment that activates operators on a chip, where an error stops the engine."""
    return {
        activation.OPERATORS: ",".join(spec.name for spec in specs),
        activation.PLATFORM: profile.name,
        activation.FOLDER: str(folder),
        activation.ON_ERROR: "stop",
    }


def compare(
    outcomes: Mapping[str, Outcome],
    specs: Sequence[OperatorSpec],
    preset: str,
    runs: tuple[dict[str, Any], dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """Makes the checks of one model.

    Args:
        outcomes: of each operator; what is found is noted there.
        specs: the operators that were activated.
        preset: the model.
        runs: what :func:`generate` gave without and with them.
        facts: what :func:`twinkle.engines.merged.merged` says of the latter.
    """
    inexact = any(spec.semantics & (Semantics.ROUNDS | Semantics.RANDOM) for spec in specs)
    native, injected = ([row[: FIRST if inexact else TOKENS] for row in found["tokens"]] for found in runs)
    workers = [process["process"] for process in facts["processes"] if "Worker" in process["role"]]
    for spec in specs:
        outcome = outcomes[spec.name]
        everywhere = facts["operators"].get(spec.name, {"processes": {}})["processes"]
        found = {process: of for process, of in everywhere.items() if process in workers}
        outcome.facts |= {"engine": f"vllm {runs[1]['version']}", preset: found}
        outcome.check(f"{preset}: not activated everywhere", "; ".join(facts["problems"]) or None)
        outcome.check(f"{preset}: no worker left a record", bool(workers))
        outcome.check(f"{preset}: tokens differ", native == injected)
        if found:
            outcome.check(f"{preset}: no call reached its kernel", any(of["kernel"] for of in found.values()))
