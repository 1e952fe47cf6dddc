"""Kernels from the Hub, on a local repository of the layout that the package kernels loads; no network."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("kernels")

from torch import nn

from tests.support.hub_repository import MLP, NORM, ROTARY, toy
from tests.support.snapshots import bits, differences, state_of
from twinkle import presets
from twinkle.kernel import hub, kernelize
from twinkle.kernel.report import plan, report
from twinkle.kernel.undo import unkernelize

pytestmark = pytest.mark.usefixtures("loopback")


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["exactly one of revision='…' and version=…, got neither", "must be said"]),
        ({"version": 1, "revision": "main"}, ["got both"]),
        ({"version": "1"}, ["version must be an integer, got '1'"]),
        ({"version": True}, ["version must be an integer, got True"]),
        ({"version": 1.0}, ["version must be an integer, got 1.0"]),
        ({"revision": ""}, ["revision must be a branch, tag or commit, got ''"]),
        ({"revision": 3}, ["revision must be a branch, tag or commit, got 3"]),
        ({"version": 1, "repo_id": "toy"}, ["repo_id must be 'organisation/repository', got 'toy'"]),
        ({"version": 1, "repo_id": "me/toy/x"}, ["got 'me/toy/x'"]),
        ({"version": 1, "repo_id": "/toy"}, ["got '/toy'"]),
        ({"version": 1, "repo_id": None}, ["got None"]),
        ({"version": 1, "name": "layers.RMSNorm"}, ["must be an identifier, got 'layers.RMSNorm'"]),
        ({"version": 1, "name": ""}, ["must be an identifier, got ''"]),
        ({"version": 1, "name": None}, ["must be an identifier, got None"]),
        ({"version": 1, "trust_remote_code": "yes"}, ["trust_remote_code must be True or False, got 'yes'"]),
        ({"version": 1, "trust_remote_code": 1}, ["trust_remote_code must be True or False, got 1"]),
    ],
)
def test_a_wrong_reference_is_an_error(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        hub(**{"repo_id": "me/toy", "name": "RMSNorm", **arguments})
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_reference_is_a_value_that_reads_well() -> None:
    assert toy("RMSNorm") == toy("RMSNorm") and hash(toy("RMSNorm")) == hash(toy("RMSNorm"))
    assert str(toy("RMSNorm")) == "me/toy:RMSNorm (version 1)"
    trusted = hub("me/toy", "RMSNorm", revision="v1.2", trust_remote_code=True)
    assert str(trusted) == "me/toy:RMSNorm (revision v1.2, trusted by trust_remote_code=True)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        trusted.name = "x"  # type: ignore[misc]


# --- what it can replace --------------------------------------------------------------------------------------------


def test_layers_and_a_function(qwen3: nn.Module, repository: str) -> None:
    output = bits(qwen3, **presets.inputs(qwen3))
    mapping = {NORM: toy("RMSNorm"), ROTARY: toy("apply_rotary_transformers")}
    (planned, _) = plan(qwen3, mapping).rows
    assert planned.implementation == "a hub kernel that is not fetched for a plan"
    assert repository not in sys.modules
    kernelize(qwen3, mapping, verify=True, strict=True)
    norm, rotary = report(qwen3).rows
    assert (norm.state, norm.backend, norm.instances, norm.scope) == ("installed", "hub", 5, "model")
    assert norm.implementation == f"{repository}.layers.RMSNorm" and "from me/toy:RMSNorm (version 1)" in norm.why()
    assert (rotary.state, rotary.backend, rotary.scope) == ("installed", "hub", "process")
    assert rotary.implementation == f"{repository}.apply_rotary_transformers"
    torch.testing.assert_close(bits(qwen3, **presets.inputs(qwen3)), output)
    presets.loss(qwen3(**presets.inputs(qwen3))).backward()
    assert (norm.calls, rotary.calls) == (10, 2) and norm.fallbacks == {}
    qwen3.zero_grad(set_to_none=True)


def test_a_layer_on_a_method(qwen3: nn.Module, repository: str) -> None:
    kernelize(qwen3, {f"{NORM}.forward": toy("RMSNorm")})
    assert report(qwen3).rows[0].state == "installed"
    bits(qwen3, **presets.inputs(qwen3))
    assert report(qwen3).rows[0].calls == 5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_with_another_contract_is_refused_before_it_breaks_the_model(repository: str, device: str) -> None:
    model = presets.build("qwen3", device=device, num_hidden_layers=1)
    before = state_of(model)
    kernelize(model, {MLP: toy("SiluAndMul"), NORM: toy("RMSNorm")})
    mlp, norm = report(model).rows
    assert (mlp.state, mlp.backend, norm.state) == ("refused", None, "installed")
    assert "on a small input it returns (2, 5, 16) torch.float32 where the original returns (2, 5, 32)" in mlp.why()
    unkernelize(model)
    assert differences(before, state_of(model)) == []


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        (NORM, "WithInit", "WithInit has an __init__ of its own"),
        (NORM, "apply_rotary_transformers", "is a function, the target is a class"),
        (ROTARY, "RMSNorm", "is a class, the target is a function"),
        (ROTARY, "swapped", "the kernel has 'cos' at another position"),
        (ROTARY, "raising", "running it on a small input raised RuntimeError: no kernel image"),
        (ROTARY, "turn", "the kernel has no parameter 'k'"),
        (MLP, "RMSNorm", "running it on a small input raised AttributeError"),
    ],
)
def test_what_does_not_fit_is_refused(qwen3: nn.Module, repository: str, key: str, name: str, words: str) -> None:
    before = state_of(qwen3)
    kernelize(qwen3, {key: toy(name)})
    (row,) = report(qwen3).rows
    assert row.state == "refused" and words in row.why(), row.why()
    assert differences(before, state_of(qwen3)) == []


@pytest.mark.parametrize("key", [NORM, ROTARY])
def test_without_a_backward_a_call_that_needs_one_is_the_originals(qwen3: nn.Module, repository: str, key: str) -> None:
    original = presets.build("qwen3", num_hidden_layers=1)
    presets.loss(original(**presets.inputs(original))).backward()
    kernelize(qwen3, {key: toy("RMSNormInference" if key == NORM else "inference_only")}, verify=True, strict=True)
    (row,) = report(qwen3).rows
    presets.loss(qwen3(**presets.inputs(qwen3))).backward()
    assert row.calls == 0 and list(row.fallbacks) == ["the hub kernel has no backward"]
    for (name, ours), (_, theirs) in zip(qwen3.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    bits(qwen3, **presets.inputs(qwen3))
    assert row.calls == (5 if key == NORM else 1), "without gradients it serves"
    qwen3.zero_grad(set_to_none=True)
    if key == NORM:  # also where only the weight needs a gradient
        before = row.fallbacks["the hub kernel has no backward"]
        qwen3.model.norm(torch.ones(1, 64))
        assert row.fallbacks["the hub kernel has no backward"] == before + 1


def test_what_says_that_it_cannot_be_compiled_is_not(repository: str) -> None:
    qwen3, x = presets.build("qwen3", num_hidden_layers=1), torch.ones(1, 64)
    for name, kernel_runs in (("RMSNorm", True), ("RMSNormEager", False)):
        kernelize(qwen3, {NORM: toy(name)})
        nodes: list[str] = []

        def look(graph: Any, inputs: Any, nodes: list[str] = nodes) -> Any:
            nodes += [str(node.target) for node in graph.graph.nodes]
            return graph

        compiled = torch.compile(lambda x: qwen3.model.norm(x), fullgraph=True, backend=look)
        with torch.no_grad():
            compiled(x)
        assert any("rms_norm" in node for node in nodes) is kernel_runs, nodes
        torch._dynamo.reset()
        unkernelize(qwen3)
