"""FSDP2 over all GPUs, or over two processes on a CPU.

torchrun --nproc-per-node 2 examples/fsdp2.py

cookbook/transformers has whole training scripts, with LoRA, expert parallelism and checkpoints.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from twinkle import presets
from twinkle.kernel import kernelize
from twinkle.kernel.report import report


def main() -> None:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = presets.build("qwen3").to(device).train()
    kernelize(model)  # in every process, and before fully_shard
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(dist.get_rank())  # each process has data of its own
    rows = torch.randint(3, 250, (16, 256), device=device)
    for step in range(5):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}", flush=True)
    row = report(model).row("Qwen3RMSNorm")
    print(f"rank {dist.get_rank()}: Qwen3RMSNorm by {row.backend}, {row.calls} calls", flush=True)
    dist.destroy_process_group()
    if device.type == "cpu":
        time.sleep(0.2)  # a thread of gloo that is still at work when the interpreter ends aborts the process


if __name__ == "__main__":
    main()
