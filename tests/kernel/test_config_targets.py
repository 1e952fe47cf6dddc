"""The default targets exist, fit their op, and have the same shape in the newest transformers."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.transformers_sources import (
    WHEEL_VARIABLE,
    Shape,
    SourceError,
    Sources,
    TargetGone,
    differences,
    installed,
    newest,
)
from twinkle.kernel import config
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG

OPS = {
    "rms_norm",
    "gated_rms_norm",
    "swiglu",
    "geglu",
    "rotary",
    "moe_router",
    "moe_experts",
    "moe_block",
    "sdpa_attention",
    "fla",
}
TARGETS = sorted(key for key in DEFAULT_KERNEL_CONFIG if "." in key)


def resolve(dotted: str) -> tuple[Any, Any]:
    """The object at a dotted path, and the class or module that owns it."""
    parts = dotted.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if not f"{'.'.join(parts)}.".startswith(f"{error.name}."):
                raise  # the module is there, but something it needs isn't
            continue
        for name in parts[split:-1]:
            owner = getattr(owner, name)
        return getattr(owner, parts[-1]), owner
    raise ModuleNotFoundError(f"no module for {dotted}")


@pytest.fixture(scope="module")
def newest_sources() -> Sources:
    if os.environ.get("TWINKLE_OFFLINE") == "1" and not os.environ.get(WHEEL_VARIABLE):
        pytest.skip("TWINKLE_OFFLINE=1: not checked against the newest transformers")
    try:
        return newest()
    except SourceError as error:
        reason = str(error)
    pytest.fail(reason, pytrace=False)


@pytest.mark.parametrize("key", TARGETS)
def test_target_resolves_in_the_installed_transformers(key: str) -> None:
    from torch import nn

    target, owner = resolve(key)
    op = DEFAULT_KERNEL_CONFIG[key].op
    if op == "rms_norm":
        assert isinstance(target, type) and issubclass(target, nn.Module)
    elif op == "rotary":
        # With the kernels package around, transformers turns decorated functions into one nn.Module per function.
        assert isinstance(target, nn.Module) or callable(target)
        assert not isinstance(target, type)
    else:
        assert isinstance(owner, type) and issubclass(owner, nn.Module) and callable(target)


@pytest.mark.parametrize("key", TARGETS)
def test_target_has_what_its_op_computes_with(key: str) -> None:
    assert misfit(DEFAULT_KERNEL_CONFIG[key].op, installed().shape(key)) is None


def misfit(op: str, shape: Shape) -> str | None:
    """Why a target of this shape can't be what the op computes; None when it can."""

    def has(*children: str) -> bool:
        return shape.children.issuperset(children)

    if "limit" in shape.reads or any("sparsity" in name for name in shape.reads):
        return f"changes values between gate and activation: {sorted(shape.reads)}"
    if op == "rms_norm":
        fits = shape.kind == "class" and len(shape.parameters) == 2 and shape.reads & {"eps", "variance_epsilon"}
        return None if fits else f"no RMSNorm: {shape}"
    if op == "gated_rms_norm":
        return None if shape.parameters == ("self", "hidden_states", "gate") else f"no gated norm: {shape}"
    if op in ("swiglu", "geglu"):
        gated = has("gate_proj", "up_proj", "down_proj") or has("gate_up_proj", "down_proj")
        fits = gated and shape.children & {"act_fn", "activation_fn"} and len(shape.parameters) == 2
        return None if fits else f"no gated MLP: {shape}"
    if op == "rotary":
        pair, single = ("q", "k", "cos", "sin"), ("x", "cos", "sin")
        fits = shape.kind == "function" and (shape.parameters[:4] == pair or shape.parameters[:3] == single)
        return None if fits else f"no rotation of q and k by cos and sin: {shape}"
    if op == "moe_router":
        fits = shape.parameters == ("self", "hidden_states") and shape.children == {"weight"} and "top_k" in shape.reads
        return None if fits else f"no router by a softmax: {shape}"
    if op == "moe_experts":
        fits = shape.parameters == ("self", "hidden_states", "top_k_index", "top_k_weights")
        return None if fits and has("gate_up_proj", "down_proj", "act_fn") else f"no stacked experts: {shape}"
    if op == "moe_block":
        fits = shape.parameters == ("self", "hidden_states") and has("gate", "experts")
        return None if fits and "jitter_noise" not in shape.reads else f"no plain MoE block: {shape}"
    return f"no target of op {op} is known"


@pytest.mark.parametrize("key", TARGETS)
def test_target_keeps_its_shape_in_the_newest_transformers(key: str, newest_sources: Sources) -> None:
    old, gone = installed(), None
    try:
        new_shape = newest_sources.shape(key)
    except TargetGone as error:
        gone = str(error)
    if gone:
        pytest.fail(f"{key} is gone: {gone}", pytrace=False)
    changes = differences(old.shape(key), new_shape)
    if changes:
        versions = f"from {old.version} to {newest_sources.version}"
        pytest.fail(f"{key} changed shape {versions}: {'; '.join(changes)}", pytrace=False)


def test_every_op_is_known_and_every_chain_is_a_tuple() -> None:
    for key, choice in DEFAULT_KERNEL_CONFIG.items():
        assert choice.op in OPS, key
        assert isinstance(choice.backends, tuple) and choice.backends, key
        assert len(set(choice.backends)) == len(choice.backends), key
        assert choice.installer is None, key


def test_logical_keys() -> None:
    logical = {key: choice.op for key, choice in DEFAULT_KERNEL_CONFIG.items() if "." not in key}
    assert logical == {"sdpa": "sdpa_attention", "fla": "fla"}


def test_liger_is_in_no_default_chain_of_experts_or_qwen3_5_rotaries() -> None:
    experts = [key for key, choice in DEFAULT_KERNEL_CONFIG.items() if choice.op == "moe_experts"]
    rotaries = [key for key, choice in DEFAULT_KERNEL_CONFIG.items() if choice.op == "rotary" and ".qwen3_5" in key]
    assert {key.split(".")[2] for key in rotaries} == {"qwen3_5", "qwen3_5_moe"}
    assert experts
    for key in experts + rotaries:
        assert "liger" not in DEFAULT_KERNEL_CONFIG[key].backends, key


def test_no_target_is_listed_twice() -> None:
    names = [
        (family, name)
        for family, targets in config._FAMILIES.items()
        for names in targets.values()
        for name in ((names,) if isinstance(names, str) else names)
    ]
    assert len(names) == len(set(names)) == len(TARGETS)


def test_config_is_data() -> None:
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {"__future__", "twinkle.kernel.registry"}


# The checks above are worth something only if they can fail.

MODELING = """
from ..base.modeling_base import imported_rope, BaseMLP
try:
    import flash
except ImportError:
    def guarded(x): ...

def rope(q, k, cos, sin, unsqueeze_dim=1): ...

class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
    def _norm(self, x): return x * self.eps
    def forward(self, x): return self.weight * self._norm(x)

class MLP(nn.Module):
    def __init__(self, config):
        self.size = config.size
        self.gate_proj = nn.Linear(1, 1)
        self.up_proj = nn.Linear(1, 1)
        self.down_proj = nn.Linear(1, 1)
        self.act_fn = ACT2FN[config.hidden_act]
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

class Derived(BaseMLP):
    pass
"""
BASE = """
def imported_rope(x, cos, sin): ...

class BaseMLP(nn.Module):
    def __init__(self):
        self.fc1 = nn.Linear(1, 1)
    def forward(self, hidden): return self.fc1(hidden)
"""


@pytest.fixture
def sources() -> Callable[..., Sources]:
    def make(*replacements: tuple[str, str]) -> Sources:
        text = MODELING
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        files = {"transformers/models/new/modeling_new.py": text, "transformers/models/base/modeling_base.py": BASE}
        return Sources("0", files.get)

    return make


NEW = "transformers.models.new.modeling_new"


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (
            "rope",
            "sin, unsqueeze_dim",
            "sin, dim",
            "parameters: (q, k, cos, sin, unsqueeze_dim) -> (q, k, cos, sin, dim)",
        ),
        ("Norm", "self.eps", "self.variance_epsilon", "reads: -eps +variance_epsilon"),
        ("Norm", "self.weight", "self.scale", "children: -weight +scale; reads: -weight +scale"),
        ("MLP.forward", "gate_proj", "w1", "children: -gate_proj +w1; reads: -gate_proj +w1"),
        ("MLP.forward", "self.gate_proj(x)", "self.gate_proj(x).clamp(max=self.limit)", "reads: +limit"),
        ("MLP.forward", "return self.down", "self.size; return self.down", "reads: +size"),
        (
            "MLP.forward",
            "def forward(self, x):\n        ",
            "def forward(self, x, scale):\n        ",
            "(self, x, scale)",
        ),
        ("rope", "def rope(", "class rope:\n    def forward(", "kind: function -> class"),
    ],
)
def test_a_changed_shape_is_told(sources: Callable[..., Sources], name: str, old: str, new: str, expected: str) -> None:
    before, after = sources().shape(f"{NEW}.{name}"), sources((old, new)).shape(f"{NEW}.{name}")
    assert expected in "; ".join(differences(before, after))


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("Norm", "class Norm", "class RMSNorm", "has no Norm; nearest: RMSNorm"),
        ("MLP.forward", "def forward(self, x):\n        ", "def call(self, x):\n        ", "has no method forward"),
        ("rope", "def rope", "def rotary", "modeling_new has no rope"),
    ],
)
def test_a_target_that_is_gone_is_told(
    sources: Callable[..., Sources], name: str, old: str, new: str, expected: str
) -> None:
    sources().shape(f"{NEW}.{name}")
    with pytest.raises(TargetGone, match=expected):
        sources((old, new)).shape(f"{NEW}.{name}")
    with pytest.raises(TargetGone, match="no module for"):
        sources().shape("transformers.models.old.modeling_old.rope")


def test_imported_inherited_and_guarded_names_are_followed(sources: Callable[..., Sources]) -> None:
    assert sources().shape(f"{NEW}.imported_rope").parameters == ("x", "cos", "sin")
    assert sources().shape(f"{NEW}.guarded").parameters == ("x",)
    inherited = sources().shape(f"{NEW}.Derived.forward")
    assert inherited == Shape("method", ("self", "hidden"), frozenset({"fc1"}), frozenset({"fc1"}))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("swiglu", "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5VisionMLP.forward"),
        ("swiglu", "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4MLP.forward"),
        ("geglu", "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextMLP.forward"),
        ("rotary", "transformers.models.llama4.modeling_llama4.apply_rotary_emb"),
        ("moe_experts", "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts.forward"),
        ("moe_experts", "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts.forward"),
        ("moe_router", "transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter.forward"),
        ("moe_router", "transformers.models.gpt_oss.modeling_gpt_oss.GptOssTopKRouter.forward"),
        ("moe_block", "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock.forward"),
    ],
)
def test_targets_that_are_left_out_would_not_fit(op: str, name: str) -> None:
    assert name not in DEFAULT_KERNEL_CONFIG
    assert misfit(op, installed().shape(name)) is not None


def test_without_a_wheel_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(WHEEL_VARIABLE, str(tmp_path / "transformers-5.99.0-py3-none-any.whl"))
    with pytest.raises(SourceError, match="no such file"):
        newest.__wrapped__()
