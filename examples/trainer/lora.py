"""A LoRA training with transformers' Trainer and kernels, of a tiny Qwen3 that learns a few sequences by heart.

python examples/trainer/lora.py
accelerate launch --multi_gpu --num_processes 2 examples/trainer/lora.py

Where there is no GPU, ACCELERATE_USE_CPU=true before the second makes it two processes on the CPU.
"""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from twinkle import presets
from twinkle.kernel.trainer import ENTRY, TwinkleKernelCallback


def main() -> None:
    torch.manual_seed(0)
    model = presets.build("qwen3")  # or AutoModelForCausalLM.from_pretrained(...)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]))
    rows = torch.randint(3, 250, (8, 256))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=20,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=5,
            report_to=[],
            save_strategy="no",
        )
        trainer = Trainer(
            adapted,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows for _ in range(40)],
            callbacks=[TwinkleKernelCallback()],
        )
        trainer.train()
    *_, told = (entry[ENTRY] for entry in trainer.state.log_history if ENTRY in entry)
    for row in told["installed"]:
        print(
            f"process {arguments.process_index}: {row['target']} by {row['backend']}, {row['calls']} calls", flush=True
        )


if __name__ == "__main__":
    main()
