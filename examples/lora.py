"""LoRA in a plain loop: adapters and kernels, in any order. Needs peft (pip install peft). python examples/lora.py"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


def main() -> None:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    base = presets.build("qwen3").to(device)  # or AutoModelForCausalLM.from_pretrained(...)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).train()
    kernelize(model)  # projections are called as modules, so their adapters count
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    rows = torch.randint(3, 250, (16, 256), device=device)
    for step in range(5):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    for row in report(model).rows:
        if row.state == "installed":
            print(f"{row.target} by {row.backend}: {row.calls} calls")
    unkernelize(model)
    model.merge_and_unload()  # works as without kernels


if __name__ == "__main__":
    main()
