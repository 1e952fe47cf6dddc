"""Precision of a training step of Qwen3.5, dense and MoE, with flash-linear-attention against PyTorch, in bf16.

It needs an NVIDIA GPU or an Ascend NPU and the library; elsewhere it is collected and not run:

    export TWINKLE_PRECISION_JSON=tests/transformers/results/qwen35_fla_precision_cuda.json
    python -m pytest tests/transformers/test_qwen35_fla_bwd_precision.py

The file that it writes then has the differences. Those that are committed are judged here on any machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import statistics
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from twinkle import presets
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.fla import library, npu
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used
from twinkle.platforms import platform_of

DEVICE = next((kind for kind in library.DEVICES if platform_of(kind) is not None), None)
CAN_TRAIN, WHY_NOT = library.available()
RESULT = "TWINKLE_PRECISION_JSON"

LIMITS = {"loss": 5e-3, "logits": 2e-2, "gradients": 5e-3, "total": 0.25}
"""Of the loss's difference, of the mean difference of all logits and of all gradients, and of the relative difference
of the total norm of the gradients. They are those that such a comparison of this model is published with. Gradients are
judged one by one beside them, by :data:`USED`: a mean over all of them hides one that is wrong."""

USED = "allowed error used"
"""Tensor -> how much of it, by the judgement of every kernel here: beside PyTorch's own error in bf16. What counts is
the median over lengths and seeds."""

PACKAGES = ("torch", "transformers", "triton", "flash-linear-attention")

MODELS = {"qwen3_5": "dense", "qwen3_5_moe": "MoE"}
LENGTHS, SEEDS = (64, 256), (0, 1)

COMMITTED = sorted((Path(__file__).parent / "results").glob("qwen35_fla_precision_*.json"))
PAGES = [Path(__file__).parents[2] / "docs" / language / "ops.md" for language in ("en", "zh")]


class Routing:
    """The experts of each token, which are those of the first run in all runs.

    Else rounding alone decides about some, and results differ by whole experts: that says nothing about a kernel.
    """

    def __init__(self) -> None:
        self.chosen: list[torch.Tensor] = []

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[None]:
        known = iter(self.chosen.copy())

        def choose(router: Any, args: Any, output: Any) -> Any:
            logits, _, index = output
            if (chosen := next(known, None)) is None:
                self.chosen.append(index)
                return output
            scores = logits.float().softmax(-1).gather(-1, chosen)
            return logits, (scores / scores.sum(-1, keepdim=True)).to(logits.dtype), chosen

        routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
        hooks = [router.register_forward_hook(choose) for router in routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def step(model: Any, given: dict[str, torch.Tensor], backend: str, routing: Routing) -> dict[str, Any]:
    """Loss, logits and gradients with the gated delta-nets by a backend."""
    kernelize(model, {"fla": KernelChoice("fla", (backend,))}, strict=True)
    model.zero_grad(set_to_none=True)
    with routing.of(model):
        outputs = model(**given)
    loss = presets.loss(outputs)
    loss.backward()
    row = report(model).row("fla")
    assert (row.backend, row.fallbacks, row.errors) == (backend, {}, 0) and row.calls
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    unkernelize(model)
    return {"loss": loss.item(), "logits": outputs.logits.detach().float(), "gradients": gradients}


def total(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    gradients = [(ours["gradients"][name] - g).abs().flatten() for name, g in theirs["gradients"].items()]
    norms = total(ours["gradients"]), total(theirs["gradients"])
    return {
        "loss": abs(ours["loss"] - theirs["loss"]),
        "logits": float((ours["logits"] - theirs["logits"]).abs().mean()),
        "gradients": float(torch.cat(gradients).mean()),
        "gradients, the worst parameter": float(max(gradient.mean() for gradient in gradients)),
        "total": abs(norms[0] - norms[1]) / norms[1],
    }


def used_by_tensor(ours: dict[str, Any], theirs: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """How much of the allowed error: results are in bf16, the right ones in fp32."""
    kernel, original, exact = ({"logits": one["logits"], **one["gradients"]} for one in (ours, theirs, right))
    return {
        name: round(allowed_error_used(kernel[name].bfloat16(), original[name].bfloat16(), exact[name]), 4)
        for name in exact
    }


def what(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["length"], row["seed"]


def note(found: dict[str, Any]) -> None:
    """Writes a result to the file that the environment names, if any, in the place of an older one."""
    if path := os.environ.get(RESULT):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else []
        rows = [*(row for row in known if what(row) != what(found)), found]
        file.write_text(json.dumps(rows, indent=1) + "\n")


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """What is missing in a result file, or beyond the limits."""
    wanted = {(f"Qwen3.5 {kind}", *rest) for kind, *rest in itertools.product(MODELS.values(), LENGTHS, SEEDS)}
    found = [f"{one} is missing" for one in sorted(wanted - set(map(what, rows)))]
    for row, name in itertools.product(rows, LIMITS):
        value = row["fla to torch"][name]
        if not value <= LIMITS[name]:
            found.append(f"{what(row)}: {name} {value:.2g}")
    return found + [
        f"{tensor}: {share:.2g} of the allowed error" for tensor, share in medians(rows).items() if not share <= 1
    ]


def medians(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Model and tensor -> the share of the allowed error in the median of its steps."""
    used: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name, share in row[USED].items():
            used.setdefault((row["model"], name), []).append(share)
    return {tensor: statistics.median(shares) for tensor, shares in used.items()}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_are_whole_and_within_the_limits(path: Path) -> None:
    assert problems(json.loads(path.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_the_documentation_says_what_was_found(page: Path) -> None:
    """The largest differences of the H200's steps, each before its limit; the largest shares of the allowed error."""
    rows = json.loads((Path(__file__).parent / "results" / "qwen35_fla_precision_cuda.json").read_text())
    largest = [(f"{max(row['fla to torch'][name] for row in rows):.2g}", f"{LIMITS[name]:g}") for name in LIMITS]
    shares = max(medians(rows).values()), max(share for row in rows for share in row[USED].values())
    expected = [number for pair in largest for number in pair] + [f"{share:.2f}" for share in shares]
    (line,) = re.findall("Triton 3.7.1(?:.(?!Triton 3.7.1))+?test_qwen35", page.read_text(encoding="utf-8"), re.DOTALL)
    found = re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", line)
    assert [number for number in found if number != "3.5"] == expected


def test_a_result_that_lacks_something_or_is_beyond_a_limit() -> None:
    rows = [
        {
            "model": f"Qwen3.5 {kind}",
            "length": length,
            "seed": seed,
            "fla to torch": dict(LIMITS),
            USED: {"x": 1.0},
        }
        for kind, length, seed in itertools.product(MODELS.values(), LENGTHS, SEEDS)
    ]
    assert problems(rows) == []
    assert problems(rows[:-1]) == ["('Qwen3.5 MoE', 256, 1) is missing"]
    rows[0]["fla to torch"]["logits"] = float("nan")
    rows[1][USED]["x"] = rows[2][USED]["x"] = 3.0
    assert problems(rows) == [
        "('Qwen3.5 dense', 64, 0): logits nan",
        "('Qwen3.5 dense', 'x'): 2 of the allowed error",
    ]


def test_all_runs_have_the_experts_of_the_first() -> None:
    model = presets.build("qwen3_5_moe")
    given, routing = presets.inputs(model), Routing()
    first = step(model, given, "torch", routing)
    assert len(routing.chosen) == sum(type(module).__name__.endswith("Router") for module in model.modules()) > 0
    assert torch.equal(step(model, given, "torch", routing)["logits"], first["logits"])
    routing.chosen = [index.flip(0) for index in routing.chosen]
    assert not torch.allclose(step(model, given, "torch", routing)["logits"], first["logits"])


def test_a_result_takes_the_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESULT, str(tmp_path / "rows.json"))
    for seed, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
        note({"model": "Qwen3.5 dense", "length": 64, "seed": seed, "value": value})
    assert [row["value"] for row in json.loads((tmp_path / "rows.json").read_text())] == [2.0, 3.0]


@pytest.mark.skipif(not CAN_TRAIN, reason=f"not run: {WHY_NOT}")
@pytest.mark.parametrize("name", MODELS)
def test_training_steps(name: str) -> None:
    """Beside it the library's distance from fp32 is noted, and PyTorch's own in bf16."""
    assert DEVICE is not None
    rows = []
    for length, seed in itertools.product(LENGTHS, SEEDS):
        model = presets.build(name, dtype=torch.bfloat16, device=DEVICE, seed=seed)
        given = presets.inputs(model, length=length, seed=seed, device=DEVICE)
        routing = Routing()
        theirs, ours = (step(model, given, backend, routing) for backend in ("torch", "fla"))
        wide = presets.build(name, dtype=torch.bfloat16, device=DEVICE, seed=seed).float()
        wide_given = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
        right = step(wide, wide_given, "torch", routing)
        rows.append(
            {
                "model": f"Qwen3.5 {MODELS[name]}",
                "length": length,
                "seed": seed,
                "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
                "versions": {name: metadata.version(name) for name in PACKAGES},
                "fla to torch": differences(ours, theirs),
                "fla to fp32": differences(ours, right),
                "torch to fp32": differences(theirs, right),
                USED: used_by_tensor(ours, theirs, right),
            }
        )
        note(rows[-1])
    assert [problem for problem in problems(rows) if not problem.endswith("is missing")] == []


CAN_INFER, WHY_NOT_INFER = npu.available()


@pytest.mark.skipif(not CAN_INFER, reason=f"not run: {WHY_NOT_INFER}")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_by_torch_npu(name: str, length: int) -> None:
    """Its rule has no gradient."""
    model = presets.build(name, dtype=torch.bfloat16, device="npu")
    given = presets.inputs(model, length=length, device="npu")
    logits = {}
    for backend in ("npu", "torch"):
        kernelize(model, {"fla": KernelChoice("fla", (backend,))}, strict=True)
        with torch.no_grad():
            logits[backend] = model(**given).logits.float()
        assert report(model).row("fla").calls
        unkernelize(model)
    assert float((logits["npu"] - logits["torch"]).abs().mean()) <= LIMITS["logits"]
