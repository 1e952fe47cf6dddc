"""Where the fused norms are installed and where not, and what a model computes with them, by the reference's maths."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import linecache
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn

from tests.support import fused_lookalikes as lookalikes
from tests.support.models import assert_close, clean_process, differences, look, step  # noqa: F401
from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, kernelize
from twinkle.kernel.config import OPT_IN_KERNEL_CONFIG
from twinkle.kernel.ops.fused_norms import rewriting
from twinkle.kernel.report import Row, plan, report
from twinkle.kernel.testing import with_backends
from twinkle.kernel.undo import unkernelize

QK = {"fused_qk": KernelChoice("qk_norm_rotary", ("loopback",))}
ADD = {"fused_add_norm": KernelChoice("add_rms_norm", ("loopback",))}
FUSED = {**QK, **ADD}

BOTH = {  # family -> attention modules, layers
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3"), (2, 2)),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), (1, 2)),  # one layer of two has linear attention
}
LAYERS_ALONE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma2", "granite", "phi3", "glm4", "gpt_oss", "deepseek_v3"), 2),
    "mistral3": 4,  # those of its vision tower too
    "gemma4": 3,
}
NEITHER = ("olmo2", "olmo3", "exaone4", "cohere2", "starcoder2", "deepseek_v4")


def row(model: nn.Module, key: str = "fused_qk") -> Row:
    return report(model).row(key)


def states(model: nn.Module) -> tuple[Any, ...]:
    return tuple(row(model, key).instances if row(model, key).state == "installed" else None for key in FUSED)


# --- models -----------------------------------------------------------------------------------------------------------

QUICK = ("qwen3", "gemma3", "qwen3_next", "granite", "olmo2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*BOTH, *LAYERS_ALONE, *NEITHER)],
)
def test_a_family(name: str) -> None:
    original = presets.build(name)
    expected, before = step(original), look(original)
    model = kernelize(original, FUSED)
    installed = BOTH.get(name) or (None, LAYERS_ALONE.get(name))
    assert states(model) == installed
    assert_close(step(model), expected)
    assert [row(model, key).calls for key in FUSED] == [count or 0 for count in installed]
    assert not any(row(model, key).fallbacks for key in FUSED)
    assert all(row(model, key).why() for key, count in zip(FUSED, installed, strict=True) if count is None)
    assert unkernelize(model).not_undone == ()
    assert differences(before, look(model)) == []


def test_with_the_default_config_before_and_after() -> None:
    """Norms that the op rms_norm serves, and a rotary function that the op rotary serves, are the same norms."""
    everything = with_backends({**DEFAULT_KERNEL_CONFIG, **FUSED}, "loopback")
    default = {key: choice for key, choice in everything.items() if key not in FUSED}
    original = presets.build("qwen3")
    expected, before = step(original), look(original)
    for mappings in ([everything], [default, FUSED], [FUSED, default]):
        model = copy.deepcopy(original)
        for mapping in mappings:
            kernelize(model, mapping)
        assert_close(step(model), expected)
        assert (states(model), row(model).calls, row(model).fallbacks) == ((2, 2), 2, {})
        assert report(model).row("Qwen3RMSNorm").calls == 3, "the others are called as ever"
        assert report(model).row("apply_rotary_pos_emb").calls == 0
        assert unkernelize(model).not_undone == ()
    assert differences(before, look(original)) == []


def test_verified_and_opt_in() -> None:
    assert not FUSED.keys() & DEFAULT_KERNEL_CONFIG.keys() and FUSED.keys() < OPT_IN_KERNEL_CONFIG.keys()
    model = kernelize(presets.build("qwen3"), FUSED, verify=True, strict=True)
    assert all(row(model, key).verified for key in FUSED)
    assert plan(presets.build("llama"), FUSED).row("fused_qk").state == "unused"
    unkernelize(model)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_generation_with_a_cache(name: str) -> None:
    model = presets.build(name)
    inputs = {"input_ids": torch.arange(3, 11)[None], "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    expected = model.generate(**inputs)
    kernelize(model, FUSED)
    assert torch.equal(model.generate(**inputs), expected)
    assert row(model).calls == row(model, "fused_add_norm").calls == 12
    unkernelize(model)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "llama"])
def test_checkpointed(name: str) -> None:
    model = presets.build(name).train()
    model.gradient_checkpointing_enable()
    expected = step(model)
    kernelize(model, FUSED)
    assert_close(step(model), expected)
    assert row(model, "fused_add_norm").calls == 4, "once forward, and once again for the backward"
    unkernelize(model)


def test_autocast_gives_the_dtypes_that_the_model_gives() -> None:
    model = presets.build("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        ours = step(kernelize(model, FUSED))
    assert {key: t.dtype for key, t in ours.items()} == {key: t.dtype for key, t in expected.items()}
    assert row(model).calls == 2
    unkernelize(model)


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "gate_proj"], ["q_norm", "q_proj"]], ids=str)
@pytest.mark.parametrize("adapt_first", [True, False])
def test_adapters(adapt_first: bool, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> Any:
        torch.manual_seed(0)
        saved = [name for name in targets if "norm" in name]
        linear = [name for name in targets if name not in saved]
        config = peft.LoraConfig(r=2, target_modules=linear, modules_to_save=saved or None, init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data *= 1.5
        return model

    expected = step(adapted(presets.build("qwen3")))
    model = presets.build("qwen3")
    model = kernelize(adapted(model), FUSED) if adapt_first else adapted(kernelize(model, FUSED))
    assert_close(step(model), expected)
    assert row(model, "fused_add_norm").calls == 2
    if "q_norm" not in targets:
        assert row(model).calls == 2
    elif adapt_first:
        assert "q_norm is no RMSNorm" in row(model).why()
    else:
        assert row(model).calls == 0 and sum(row(model).fallbacks.values()) == 2
    assert unkernelize(model).not_undone == ()


def test_layers_share_a_class_and_copies_and_files_are_what_they_should_be() -> None:
    original = presets.build("qwen3")
    expected = step(original)
    model = kernelize(original, FUSED)
    layers = model.model.layers
    assert type(layers[0]) is type(layers[1]) and type(layers[0].self_attn) is type(layers[1].self_attn)
    twin = copy.deepcopy(model)
    assert_close(step(twin), expected)
    assert row(twin).calls == 2
    unkernelize(model)
    assert states(twin) == (2, 2), "the copy has its own"
    unkernelize(twin)
    layer, file = kernelize(lookalikes.Layer(), ADD), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert report(loaded).rows == [] and type(loaded) is lookalikes.Layer
    torch.testing.assert_close(loaded(torch.ones(2, 16)), layer(torch.ones(2, 16)))
    unkernelize(layer)


def test_compiled_whole_and_layer_by_layer() -> None:
    torch.compiler.reset()
    model = presets.build("qwen3", num_hidden_layers=3)
    inputs = presets.inputs(model) | {"use_cache": False}  # every layer's cache would be compiled for itself
    expected = model(**inputs).logits
    kernelize(model, with_backends({**DEFAULT_KERNEL_CONFIG, **FUSED}, "loopback"))
    graphs: list[Any] = []

    def note(graph: Any, arguments: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=note)(**inputs).logits, expected)
    assert len(graphs) == 1 and all(row(model, key).counts.compiled for key in FUSED)
    assert not any(row(model, key).fallbacks or row(model, key).calls for key in FUSED)
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=note)
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert len(graphs) == 2, "layers that are alike are compiled once"
    unkernelize(model)
    torch.compiler.reset()


# --- code -------------------------------------------------------------------------------------------------------------


def test_the_code_that_it_is_for() -> None:
    for module, inputs, mapping in (
        (lookalikes.Attention(), lookalikes.attention_inputs(), QK),
        (lookalikes.Layer(), (torch.randn(2, 3, 16),), ADD),
    ):
        expected = module(*inputs)
        kernelize(module, mapping)
        (found,) = report(module).rows
        torch.testing.assert_close(module(*inputs), expected)
        assert (found.state, found.calls) == ("installed", 1), found.why()
        unkernelize(module)


def test_decorators_stay() -> None:
    """Those of transformers 5.24: one takes an argument by its old name, another checkpoints a layer."""
    module, x = lookalikes.DecoratedLayer(), torch.randn(2, 16)
    signature, expected = inspect.signature(module.forward), module(old=x)
    kernelize(module, ADD)
    torch.testing.assert_close(module(old=x), expected)
    assert (row(module, "fused_add_norm").calls, module.acted) == (1, 2)
    assert inspect.signature(module.forward) == signature
    unkernelize(module)
    assert module.forward.__func__ is lookalikes.DecoratedLayer.forward  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cls", "why"), lookalikes.ATTENTIONS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_attention_in_other_code_is_left_alone(cls: Any, why: str) -> None:
    module, inputs = cls(), lookalikes.attention_inputs()
    expected = module(*inputs)
    kernelize(module, QK)
    assert row(module).state == "refused" and why in row(module).why()
    assert all(map(torch.equal, module(*inputs), expected))


@pytest.mark.parametrize("cls", lookalikes.LAYERS)
def test_layers_in_other_code_are_left_alone(cls: Any) -> None:
    module = kernelize(cls(), ADD)
    assert row(module, "fused_add_norm").state == "refused"
    assert "doesn't add to a residual and normalise the sum right after" in row(module, "fused_add_norm").why()


def test_code_whose_source_is_another_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was changed on disk since it was imported, and what never lay there."""
    forward: Any = lookalikes.Attention.forward
    file = forward.__code__.co_filename
    assert not isinstance(rewriting.body_of(forward), rewriting.Reason)
    assert isinstance(rewriting.body_of(torch.add), rewriting.Reason)
    edited = "".join(linecache.getlines(file)).replace("q, k = rotate(q, k, cos, sin)\n        return F.", "return F.")
    for lines in (edited.splitlines(keepends=True), ["not python at all ("], []):
        rewriting._trees.cache_clear()
        monkeypatch.setattr(linecache, "getlines", lambda *_, lines=lines: lines)
        module = kernelize(lookalikes.Attention(), QK)
        assert row(module).state == "refused" and "isn't there, or isn't what runs" in row(module).why()
    rewriting._trees.cache_clear()


def test_errors_and_signatures_are_the_models_own() -> None:
    import traceback

    module = lookalikes.Layer()
    signature = inspect.signature(module.forward)
    kernelize(module, ADD)
    assert inspect.signature(module.forward) == signature and module.forward.__name__ == "forward"
    torch.testing.assert_close(module(torch.ones(1, 16), scale=0.5), module(torch.ones(1, 16)))
    with pytest.raises(RuntimeError) as raised:
        module(torch.ones(1, 17))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert any(frame.filename == lookalikes.__file__ and "self.mixer(x)" in str(frame.line) for frame in frames)
    unkernelize(module)


# --- calls ------------------------------------------------------------------------------------------------------------


class Changed(nn.Module):
    """A norm of somebody else's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.norm(x)


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return tuple(2 * r for r in result) if isinstance(result, tuple) else 2 * result

    return call


def with_a_hook(module: Any, monkeypatch: Any) -> None:
    module.q_norm.register_forward_hook(lambda _, args, output: 2 * output)


def with_a_hook_before(module: Any, monkeypatch: Any) -> None:
    module.k_norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def with_a_backward_hook(module: Any, monkeypatch: Any) -> None:
    module.k_norm.register_full_backward_hook(lambda _, grads, output: (2 * grads[0],))


def with_a_forward_of_its_own(module: Any, monkeypatch: Any) -> None:
    module.q_norm.forward = types.MethodType(doubled(type(module.q_norm).forward), module.q_norm)


def with_another_norm(module: Any, monkeypatch: Any) -> None:
    module.k_norm = Changed(module.k_norm)


def with_a_patched_class(module: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookalikes.Norm, "forward", doubled(lookalikes.Norm.forward))


def with_another_rotation(module: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookalikes, "rotate", doubled(lookalikes.rotate))


def with_a_kernel_of_the_users_own(module: Any, monkeypatch: Any) -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x * self.weight

    kernelize(module, {lookalikes.Norm: Mine})


def with_a_rotation_of_the_users_own(module: Any, monkeypatch: Any) -> None:
    original = lookalikes.rotate

    def mine(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        return original(2 * q, 3 * k, cos, sin, unsqueeze_dim)

    kernelize(module, {"tests.support.fused_lookalikes.rotate": mine})


def with_hooks_for_all(module: Any, monkeypatch: Any) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda m, args, output: 2 * output if isinstance(m, lookalikes.Norm) else None
    )
    monkeypatch.setattr(module, "handle_", handle, raising=False)


CHANGES = {
    with_a_hook: "hooks",
    with_a_hook_before: "hooks",
    with_a_backward_hook: "hooks",
    with_a_forward_of_its_own: "forward of its own",
    with_another_norm: "when the kernel was installed",
    with_a_patched_class: "when the kernel was installed",
    with_another_rotation: "the rotary function is not the one",
    with_a_kernel_of_the_users_own: "when the kernel was installed",
    with_a_rotation_of_the_users_own: "the rotary function is not the one",
    with_hooks_for_all: "hooks for all modules",
}


@pytest.fixture
def no_hooks_left() -> Iterator[None]:
    yield
    torch.nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize(("change", "why"), CHANGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_somebody_changes_later_is_not_passed_over(
    change: Any, why: str, monkeypatch: pytest.MonkeyPatch, no_hooks_left: None
) -> None:
    """The modules and functions are called then, whatever they do by now."""

    def run(fused: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        module, (x, cos, sin) = lookalikes.Attention(), lookalikes.attention_inputs()
        if fused:
            kernelize(module, QK)
        with monkeypatch.context() as patched:
            change(module, patched)
            result = module(x.requires_grad_(), cos, sin)
            torch.nn.modules.module._global_forward_hooks.clear()
        if fused:
            (reason,) = row(module).fallbacks
            assert row(module).calls == 0 and why in reason
        unkernelize(module)
        return module, result.detach(), torch.autograd.grad(result.square().sum(), x)[0]

    theirs, ours = run(False), run(True)
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])
    plain = lookalikes.Attention()
    plain.load_state_dict({k.replace("norm.norm", "norm"): v for k, v in ours[0].state_dict().items()})
    assert change is with_a_backward_hook or not torch.allclose(ours[1], plain(*lookalikes.attention_inputs()))


def test_weights_and_eps_are_read_at_each_call() -> None:
    module, inputs = lookalikes.Attention(), lookalikes.attention_inputs()
    kernelize(module, QK)
    twin = lookalikes.Attention()
    module.q_norm.weight = nn.Parameter(torch.rand(16))
    module.k_norm.eps = 0.5
    nn.utils.parametrize.register_parametrization(module.k_norm, "weight", nn.Softplus())
    twin.load_state_dict({**module.state_dict(), "k_norm.weight": module.k_norm.weight}, strict=False)
    twin.k_norm.eps = 0.5
    torch.testing.assert_close(module(*inputs), twin(*inputs))
    assert row(module).calls == 1
    unkernelize(module)


def test_a_norm_that_is_taken_away() -> None:
    """The original says what it has to say about that."""
    module = kernelize(lookalikes.Attention(), QK)
    module.q_norm = None  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not callable"):
        module(*lookalikes.attention_inputs())
    unkernelize(module)
