"""Mixtures of experts over several processes.

from twinkle.moe import apply_expert_parallel

apply_expert_parallel(model, init_device_mesh("cuda", (8,), mesh_dim_names=("ep",)))
"""

from twinkle.moe.checkpoint import gather_state_dict, load_state_dict
from twinkle.moe.expert_parallel import apply_expert_parallel

__all__ = ["apply_expert_parallel", "gather_state_dict", "load_state_dict"]
