"""The callback in a trainer of TRL, which makes the LoRA model and the batches itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
trl = pytest.importorskip("trl", reason="not run: the package trl is not installed")

import datasets
import tokenizers
import transformers
from peft import LoraConfig

from twinkle import presets
from twinkle.kernel.exact import KeepFloat64, exact_copy
from twinkle.kernel.report import report
from twinkle.kernel.trainer import ENTRY, TwinkleKernelCallback
from twinkle.kernel.verify import allowed_error_used

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_accelerator")]

STEPS = 3
ROWS = 4


def words() -> Any:
    """A tokenizer that knows ``w0`` to ``w249``."""
    vocabulary = {f"w{number}": number for number in range(250)} | {"<eos>": 250, "<pad>": 251}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def new_model() -> Any:
    torch.manual_seed(0)
    return presets.build("qwen3")


def new_trainer(folder: Path, lora: bool, *callbacks: Any) -> Any:
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        learning_rate=5e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    text = " ".join(f"w{7 * place % 250}" for place in range(23))  # every batch the same, whatever their order
    return trl.SFTTrainer(
        new_model(),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"text": [text] * STEPS * ROWS}),
        processing_class=words(),
        callbacks=list(callbacks),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "gate_proj"]) if lora else None,
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def shape_of(model: Any) -> dict[str, Any]:
    """Each module's class, and the names of what it has."""
    return {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_sft_with_kernels(lora: bool, tmp_path: Path) -> None:
    plain = new_trainer(tmp_path, lora)
    batch = next(iter(plain.get_train_dataloader()))
    with KeepFloat64():  # of a model of its own, since TRL puts a forward of its own on the trainer's; LoRA begins at 0
        truth = exact_copy(new_model())(**{name: batch[name] for name in ("input_ids", "labels")}).loss
    plain.train()

    trainer = new_trainer(tmp_path, lora, TwinkleKernelCallback())
    installed = [row for row in report(trainer.model).rows if row.state == "installed"]
    assert [row.op for row in installed] == ["rms_norm", "rotary"]
    trainer.train()
    assert len(losses(trainer)) == STEPS
    ours, theirs = torch.tensor(losses(trainer)[0]), torch.tensor(losses(plain)[0])
    assert abs(theirs - truth) < 1e-5, "the judge computes something else"
    assert allowed_error_used(ours, theirs, truth.detach()) <= 1
    assert losses(trainer)[-1] < losses(trainer)[0], "it learns"
    told = trainer.state.log_history[-1][ENTRY]["installed"]
    assert all(of["calls"] for of in told), told
    assert report(trainer.model).rows == []
    assert shape_of(trainer.model) == shape_of(plain.model), "what the trainer itself leaves behind is in both"
