"""A training in a plain loop: kernels in, train, kernels out. python examples/plain_loop.py"""

from __future__ import annotations

import torch

from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


def main() -> None:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = presets.build("qwen3").to(device).train()  # or AutoModelForCausalLM.from_pretrained(...)
    kernelize(model)  # before the optimizer or after it: parameters stay the same objects
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = torch.randint(3, 250, (16, 256), device=device)
    for step in range(5):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print(report(model).table())
    unkernelize(model)  # the model is transformers' own again, with the weights that were trained


if __name__ == "__main__":
    main()
