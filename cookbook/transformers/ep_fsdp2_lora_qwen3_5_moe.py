"""A mixture of experts of the Qwen3.5 family: expert parallelism, FSDP2 and LoRA on attention and experts.

    torchrun --nproc-per-node 8 cookbook/transformers/ep_fsdp2_lora_qwen3_5_moe.py --ep-size 8
    torchrun --nproc-per-node 2 cookbook/transformers/ep_fsdp2_lora_qwen3_5_moe.py --model tiny:qwen3_5_moe --lr 1e-2

The steps are those of ep_fsdp2_lora_qwen3_moe.py. What is different here needs none of its own: every process computes
the shared expert for its own tokens, the linear attention has adapters like the other, and a vision tower, where the
model has one, is sharded and left alone.
"""

from __future__ import annotations

from ep_fsdp2_lora_qwen3_moe import build
from settings import ExpertSettings
from training import run

if __name__ == "__main__":
    run(ExpertSettings, build, model="Qwen/Qwen3.5-35B-A3B", output="out/ep_fsdp2_lora_qwen3_5_moe")
