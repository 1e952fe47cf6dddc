"""Mixtures of experts over several processes.

from twinkle.moe import apply_expert_parallel, expert_mesh, fully_shard_model

mesh = expert_mesh(ep=4, device_type="cuda")
fully_shard_model(apply_expert_parallel(model, mesh), mesh)
"""

from twinkle.moe.checkpoint import gather_optimizer_state, gather_state_dict, load_optimizer_state, load_state_dict
from twinkle.moe.expert_parallel import apply_expert_parallel
from twinkle.moe.fully_shard import expert_mesh, fully_shard_model
from twinkle.moe.optimizing import clip_grad_norm_, parameter_groups

__all__ = [
    "apply_expert_parallel",
    "clip_grad_norm_",
    "expert_mesh",
    "fully_shard_model",
    "gather_optimizer_state",
    "gather_state_dict",
    "load_optimizer_state",
    "load_state_dict",
    "parameter_groups",
]
