#!/usr/bin/env bash
# All accelerators of this host, or NPROC_PER_NODE processes. On several hosts, start it on each with NNODES, NODE_RANK
# and MASTER_ADDR set. Options of ep_fsdp2_lora_qwen3_5_moe.py may follow.
set -euo pipefail

exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    --nproc-per-node "${NPROC_PER_NODE:-auto}" \
    "$(dirname "${BASH_SOURCE[0]}")/ep_fsdp2_lora_qwen3_5_moe.py" "$@"
