"""Kernels in a training of transformers' Trainer, as its callback puts them in and takes them out."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.support.snapshots import differences, state_of
from twinkle import presets
from twinkle.commands.demo.outcome import judge_losses
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.exact import KeepFloat64, exact_copy
from twinkle.kernel.report import report
from twinkle.kernel.trainer import ENTRY, TwinkleKernelCallback
from twinkle.kernel.undo import unkernelize
from twinkle.kernel.verify import allowed_error_used

pytestmark = pytest.mark.usefixtures("own_accelerator")

STEPS = 20
ROWS = 4


def new_model(lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = presets.build("qwen3")
    if lora:
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    return model


def batches(order: int = 0) -> list[dict[str, torch.Tensor]]:
    """The same batch for each step, so that there is something to learn; its rows in one of several orders."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 250, (ROWS, 24), generator=generator).roll(order, dims=0)
    return [{"input_ids": row, "labels": row} for _ in range(STEPS) for row in rows]


def new_trainer(model: Any, folder: Path, *callbacks: Any, order: int = 0, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "seed": 0,
        **options,
    }
    arguments = transformers.TrainingArguments(**settings)
    made = {"model_init": model} if callable(model) and not isinstance(model, nn.Module) else {"model": model}
    trainer = transformers.Trainer(args=arguments, train_dataset=batches(order), callbacks=list(callbacks), **made)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class FirstGradients(transformers.TrainerCallback):
    """Keeps those of the first step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.found = gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def originals(lora: bool, folder: Path) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """The loss of each step and the first gradients without kernels, in three orders of summation."""
    found = []
    for order in range(3):
        first = FirstGradients()
        trainer = new_trainer(new_model(lora), folder, first, order=order)
        trainer.train()
        found.append((losses(trainer), first.found))
    return found


def exact(lora: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step in fp64."""
    batch = batches()[:ROWS]
    with KeepFloat64():
        model = exact_copy(new_model(lora)).train()
        loss = model(**{name: torch.stack([row[name] for row in batch]) for name in batch[0]}).loss
        loss.backward()
    return loss.item(), gradients(model)


def told(trainer: Any) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if ENTRY in entry]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_the_losses_are_the_same_and_the_model_is_as_before(lora: bool, tmp_path: Path) -> None:
    plain = new_model(lora)
    before = state_of(plain)
    new_trainer(plain, tmp_path).train()
    without = differences(before, state_of(plain))

    model = new_model(lora)
    before = state_of(model)
    first = FirstGradients()
    trainer = new_trainer(model, tmp_path, TwinkleKernelCallback(), first)
    assert [row.state for row in report(model).rows].count("installed") == 2, "norms and rotary, from the start on"
    trainer.train()

    orders = originals(lora, tmp_path)
    judged = judge_losses(losses(trainer), [curve for curve, _ in orders])
    worst = max(range(1, STEPS), key=lambda step: judged[step].used)
    assert len(judged) == STEPS and judged[worst].used <= 1, f"step {worst}: {judged[worst]}"
    loss, exact_gradients = exact(lora)
    of_first = {
        "loss": (
            torch.tensor(losses(trainer)[0]),
            [torch.tensor(c[0]) for c, _ in orders],
            torch.tensor(loss, dtype=torch.float64),
        )
    }
    assert first.found.keys() == exact_gradients.keys()
    for name, found in first.found.items():
        of_first[name] = found, [each[name] for _, each in orders], exact_gradients[name]
    for name, (ours, theirs, truth) in of_first.items():
        used = min(allowed_error_used(ours, original, truth.double()) for original in theirs)
        assert used <= 1, f"{name} of the first step: {used}"
    assert losses(trainer)[-1] < 0.9 * losses(trainer)[0], "it learns"

    assert differences(before, state_of(model)) == without, "the trainer itself leaves something behind"
    assert report(model).rows == []
    begin, end = told(trainer)
    assert (begin["step"], end["step"]) == (0, STEPS)
    assert [of["calls"] for of in begin[ENTRY]["installed"]] == [0, 0]
    calls = {of["target"].rpartition(".")[2]: of["calls"] for of in end[ENTRY]["installed"]}
    assert calls == {"Qwen3RMSNorm": 9 * STEPS, "apply_rotary_pos_emb": 2 * STEPS}
    assert "triton" in next(why for target, why in end[ENTRY]["left"].items() if target.endswith("Qwen3MLP.forward"))
    numbers = [entry["kernel_calls"] for entry in trainer.state.log_history if "loss" in entry]
    assert numbers == [11 * step for step in range(1, STEPS + 1)]
    assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history, "checkpoints keep it"


def test_a_second_training_and_another_model_get_kernels_again(tmp_path: Path) -> None:
    made: list[nn.Module] = []

    def model_init() -> nn.Module:
        made.append(new_model())
        return made[-1]

    trainer = new_trainer(model_init, tmp_path, TwinkleKernelCallback(), max_steps=1)
    for _ in range(2):
        trainer.train()
        assert told(trainer)[-1][ENTRY]["installed"][0]["calls"] > 0
    assert len(made) >= 3 and all(report(model).rows == [] for model in made)


NORM = "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"


def test_of_two_trainers_of_one_model_each_has_its_own_kernels(tmp_path: Path) -> None:
    """Both made before either trains; the second one's mapping is another."""
    model = new_model()
    mapping = {NORM: KernelChoice("rms_norm", ("torch",))}
    one = new_trainer(model, tmp_path, TwinkleKernelCallback(), max_steps=1)
    two = new_trainer(model, tmp_path, TwinkleKernelCallback(mapping), max_steps=1)
    for trainer, targets in ((one, 2), (two, 1), (one, 2)):
        trainer.train()
        installed = told(trainer)[-1][ENTRY]["installed"]
        assert len(installed) == targets and installed[0]["calls"] == 9
        assert report(model).rows == []


def test_one_callback_may_serve_two_trainers(tmp_path: Path) -> None:
    models, callback = [new_model(), new_model()], TwinkleKernelCallback()
    trainers = [new_trainer(model, tmp_path, callback, max_steps=1) for model in models]
    for trainer in trainers:
        trainer.train()
        assert told(trainer)[-1][ENTRY]["installed"][0]["calls"] == 9
    assert [report(model).rows for model in models] == [[], []]


class Raises(transformers.TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("same", [True, False], ids=["the same trainer", "another trainer"])
def test_the_end_of_a_later_training_undoes_what_one_that_raised_left(same: bool, tmp_path: Path) -> None:
    model = new_model()
    trainer = new_trainer(model, tmp_path, TwinkleKernelCallback(), Raises(), max_steps=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert any(row.state == "installed" for row in report(model).rows)
    if same:
        trainer.remove_callback(Raises)
    else:
        trainer = new_trainer(model, tmp_path, TwinkleKernelCallback(), max_steps=1)
    trainer.train()
    assert told(trainer)[-1][ENTRY]["installed"][0]["calls"] == (18 if same else 9)
    assert report(model).rows == []


def test_what_the_caller_installs_after_a_training_that_raised_stays(tmp_path: Path) -> None:
    model = new_model()
    trainer = new_trainer(model, tmp_path, TwinkleKernelCallback(), Raises(), max_steps=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    unkernelize(model)
    kernelize(model)
    new_trainer(model, tmp_path, TwinkleKernelCallback(), max_steps=1).train()
    assert any(row.state == "installed" for row in report(model).rows)
    unkernelize(model)


def test_the_last_entry_of_the_log_is_still_the_trainers(tmp_path: Path) -> None:
    trainer = new_trainer(new_model(), tmp_path, TwinkleKernelCallback(), max_steps=1)
    trainer.train()
    assert trainer.state.log_history[-1].keys() >= {"train_loss", "train_runtime", ENTRY}


def test_a_training_is_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    whole, resumed = (
        new_trainer(new_model(), tmp_path, TwinkleKernelCallback(), max_steps=4, save_strategy="steps", save_steps=2)
        for _ in range(2)
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole) and report(resumed.model).rows == []
    assert [entry[ENTRY]["installed"][0]["calls"] for entry in told(resumed)] == [0, 0, 18]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"bf16": True},
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: next(iter(options)),
)
def test_however_the_trainer_runs_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    """One step: its loss by the judgement, of any of three orders of summation, and the model as before."""
    torch._dynamo.reset()
    theirs = []
    for order in range(3):
        plain = new_trainer(new_model(), tmp_path, order=order, max_steps=1, **options)
        plain.train()
        theirs.append(torch.tensor(losses(plain)[0]))
    torch._dynamo.reset()
    trainer = new_trainer(new_model(), tmp_path, TwinkleKernelCallback(), max_steps=1, **options)
    trainer.train()
    truth = torch.tensor(exact(False)[0], dtype=torch.float64)
    used = min(allowed_error_used(torch.tensor(losses(trainer)[0]), original, truth) for original in theirs)
    assert used <= 1, used
    row = told(trainer)[-1][ENTRY]["installed"][0]
    assert row["compiled"] if "torch_compile" in options else row["calls"] + sum(row["fallbacks"].values()) >= 9
    assert report(trainer.model).rows == []


def test_a_trainer_may_evaluate_first(tmp_path: Path) -> None:
    model = new_model()
    expected = new_trainer(model, tmp_path).evaluate(batches()[:ROWS])["eval_loss"]
    trainer = new_trainer(model, tmp_path, TwinkleKernelCallback(), max_steps=1)
    with_kernels = trainer.evaluate(batches()[:ROWS])["eval_loss"]
    truth = torch.tensor(exact(False)[0], dtype=torch.float64)
    assert allowed_error_used(torch.tensor(with_kernels), torch.tensor(expected), truth) <= 1
    assert told(trainer) == []
    assert any(row.calls for row in report(model).rows), "a trainer that only evaluates has kernels too"
    trainer.train()
    assert report(model).rows == []


def test_a_model_that_was_kernelized_before_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = kernelize(new_model())
    trainer = new_trainer(model, tmp_path, TwinkleKernelCallback({}), max_steps=1)
    trainer.train()
    assert caplog.text.count("is kernelized already") == 1
    assert told(trainer)[-1][ENTRY]["installed"][0]["calls"] > 0
    assert any(row.state == "installed" for row in report(model).rows)
    unkernelize(model)


@pytest.mark.liger
def test_what_liger_patches_for_the_trainer_gets_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does so after the trainer was made. Its kernels need a GPU, so that no step is trained here."""
    pytest.importorskip("liger_kernel.transformers")
    import transformers.models.qwen3.modeling_qwen3 as home

    for name in ("Qwen3RMSNorm", "Qwen3MLP", "apply_rotary_pos_emb", "Qwen3ForCausalLM"):
        monkeypatch.setattr(home, name, getattr(home, name))
    monkeypatch.setattr(home.Qwen3ForCausalLM, "forward", home.Qwen3ForCausalLM.forward)
    model = new_model()
    callback = TwinkleKernelCallback()
    trainer = new_trainer(model, tmp_path, callback, use_liger_kernel=True, max_steps=1)
    assert report(model).rows == [] and "leave that argument out" in caplog.text
    with pytest.raises(Exception, match=r"driver|Pointer|triton|cuda"):
        trainer.train()
    rows = {row.target.rpartition("qwen3.")[2]: row for row in report(model).rows if row.instances}
    assert rows["Qwen3RMSNorm"].state == "refused" and "already patched by Liger" in rows["Qwen3RMSNorm"].why()
    unkernelize(model)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_generate_with_a_static_cache(compiled: bool) -> None:
    """transformers compiles a step with a static cache by itself on GPUs; here its forward is."""
    model = new_model().eval()
    prompt = presets.inputs(model, batch=2, length=7)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "min_new_tokens": 6}
    expected = copy.deepcopy(model).generate(prompt, **options)
    kernelize(model)
    if compiled:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    found = model.generate(prompt, **options)
    assert torch.equal(found, expected)
    rows = [row for row in report(model).rows if row.state == "installed"]
    assert len(rows) == 2 and all(row.counts.compiled if compiled else row.calls for row in rows)
    if compiled:
        del model.forward
    unkernelize(model)
    assert torch.equal(model.generate(prompt, **options), expected)
