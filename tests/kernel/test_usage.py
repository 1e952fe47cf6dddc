"""What people do with models: they generate, train, save, offload, differentiate and export them, kernelized or not."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.models import (
    assert_close,
    clean_process,  # noqa: F401
    differences,
    installed,
    look,
    rows_of,
    same_bits,
    step,
)
from tests.support.qwen3 import QWEN3, kernelized_qwen3, loopback, qwen3
from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.undo import unkernelize


@pytest.fixture
def model():
    model = kernelized_qwen3()
    yield model
    assert unkernelize(model).not_undone == ()


def calls(model):
    return {target: row.calls for target, row in rows_of(model).items()}


def test_generate(model):
    ids = presets.inputs(model)["input_ids"]
    ours, theirs = (m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (model, qwen3()))
    assert torch.equal(ours, theirs) and ours.shape == (2, 22)
    assert calls(model)["qwen3.Qwen3MLP.forward"] == 2 * 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, model):
    with mode():
        ours, theirs = (m(**presets.inputs(m)).logits for m in (model, qwen3()))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert calls(model)["qwen3.Qwen3RMSNorm"] == 9


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "meta as the default device": lambda: torch.device("meta"),
    "bf16 as the default dtype": lambda: default_dtype(torch.bfloat16),
    "a seed of its own": lambda: torch.random.fork_rng(devices=[]),
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("preset", ["qwen3_moe", "qwen3_next"])
def test_kernelize_sees_the_same_whatever_is_set_around_it(context, preset):
    model, other = presets.build(preset), presets.build(preset)
    kernelize(model, loopback(f"{preset}."))
    random = torch.get_rng_state()
    with CONTEXTS[context]():
        kernelize(other, loopback(f"{preset}."))
    assert torch.equal(torch.get_rng_state(), random)
    assert installed(other) == installed(model)
    assert same_bits(step(other), step(model))
    for each in (model, other):
        unkernelize(each)


def test_every_output_is_still_there():
    """Hidden states, attentions and router logits are recorded by classes and hooks of the modeling file."""
    model = presets.build("qwen3_moe", attn_implementation="eager")
    wanted = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    with torch.no_grad():
        theirs = model(**presets.inputs(model), **wanted)
        kernelize(model, loopback("qwen3_moe."))
        ours = model(**presets.inputs(model), **wanted)
    assert list(ours) == list(theirs) and type(ours) is type(theirs)
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(ours[name]) == len(theirs[name]) > 0
        for one, other in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    unkernelize(model)


def test_save_pretrained_and_back(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    plain = qwen3()
    assert [type(m) for m in loaded.modules()] == [type(m) for m in plain.modules()]
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert [n for n, p in plain.state_dict().items() if not torch.equal(p, loaded.state_dict()[n])] == []


def test_kernelize_on_meta_before_the_weights_come():
    plain, model = qwen3(), qwen3(device="meta")
    kernelize(model, loopback())
    assert installed(model) == QWEN3
    model.load_state_dict(plain.state_dict(), assign=True)
    model.model.rotary_emb = copy.deepcopy(plain.model.rotary_emb)  # not part of a state dict
    assert_close(step(model), step(plain))
    assert calls(model)["qwen3.Qwen3RMSNorm"] == 9
    unkernelize(model)


@pytest.mark.parametrize("kernels_first", [True, False])
def test_offloaded_with_accelerate(kernels_first):
    """Between calls the weights are on the meta device; hooks bring them."""
    accelerate = pytest.importorskip("accelerate")
    model = qwen3()
    inputs = presets.inputs(model)
    theirs = model(**inputs).logits
    if kernels_first:
        kernelize(model, loopback())
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if not kernels_first:
        kernelize(model, loopback())
    assert model.model.norm.weight.is_meta and installed(model) == QWEN3
    torch.testing.assert_close(model(**inputs).logits, theirs, rtol=1e-4, atol=1e-5)
    assert calls(model)["qwen3.Qwen3MLP.forward"] == 2
    assert unkernelize(model).not_undone == ()
    assert torch.equal(model(**inputs).logits, theirs)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(**inputs).logits, theirs)


@pytest.mark.parametrize("kernels_first", [True, False])
def test_prepared_by_accelerate(kernels_first):
    """With mixed precision it puts a forward of its own on the whole model."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = qwen3()
    if kernels_first:
        kernelize(model, loopback())
    prepared = accelerator.prepare(model)
    if not kernels_first:
        kernelize(prepared, loopback())
    outputs = prepared(**presets.inputs(qwen3()))
    accelerator.backward(outputs.loss)
    assert outputs.logits.dtype == torch.float32
    assert calls(prepared) == {**QWEN3, "qwen3.apply_rotary_pos_emb": 2}
    assert unkernelize(accelerator.unwrap_model(prepared)).modules == 11
    assert rows_of(prepared) == {}


@pytest.mark.parametrize("checkpointing", [True, False])
def test_trainer_of_transformers(checkpointing, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{k: v[0] for k, v in presets.inputs(qwen3(), batch=1, seed=seed).items()} for seed in range(4)]
    trained = []
    for kernels in (False, True):
        model = qwen3()
        if kernels:
            kernelize(model, loopback())
        arguments = TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, use_cpu=True, save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointing, learning_rate=1e-3,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train()
        trained.append(model)
    plain, model = trained
    assert calls(model)["qwen3.Qwen3MLP.forward"] == (8 if checkpointing else 4)
    assert unkernelize(model).not_undone == ()
    # Adam divides by what may be next to nothing, so single weights may differ; the models do the same.
    torch.testing.assert_close(step(model)["logits"], step(plain)["logits"], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(step(model)["logits"], step(qwen3())["logits"], atol=1e-2)


def test_transforms_of_torch_func(model):
    plain = qwen3()
    ids = presets.inputs(plain)["input_ids"]

    def gradients(m):
        def loss(parameters, row):
            batch = {"input_ids": row[None], "labels": row[None], "use_cache": False}
            return torch.func.functional_call(m, parameters, (), batch).loss

        weights = {name: p.detach() for name, p in m.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no batching rule for attention on the CPU: slow, but right
        assert_close(gradients(model), gradients(plain))
    assert calls(model)["qwen3.Qwen3RMSNorm"] == 9


def test_export(model):
    ids = presets.inputs(model)["input_ids"]
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    with torch.no_grad():
        ours = program.module()(input_ids=ids, use_cache=False).logits
        assert set(calls(model).values()) == {0} and all(row.counts.compiled for row in rows_of(model).values())
        torch.testing.assert_close(ours, qwen3()(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_freezing_and_growing(model):
    """Later changes of the model that have nothing to do with kernels."""
    model.requires_grad_(False)
    model.resize_token_embeddings(260)
    model.add_module("extra", torch.nn.Linear(2, 2))
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    assert installed(model) == {"qwen3.Qwen3RMSNorm": 13, "qwen3.Qwen3MLP.forward": 3, "qwen3.apply_rotary_pos_emb": 1}
    before = look(model)
    unkernelize(model)
    changed = {key.partition(" ")[0] for key in differences(before, look(model))}
    assert changed == {"class", "globals"} and installed(model) == {}
