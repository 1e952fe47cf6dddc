"""What the tests can't show without an Ascend NPU: run on one, it prints tables to paste into an issue.

    python script/prove_on_npu.py                      # every backend, every tiny model, in bf16
    python script/prove_on_npu.py --models llama qwen3_moe --dtype float32

First what torch_npu has of what the backends call, and what they found out about functions whose meaning isn't
published; then each tiny model with all npu backends against the original, judged in fp64 (on the CPU where the NPU has
none): output, loss and every gradient. The exit code is 1 when something is off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from twinkle import presets
from twinkle.commands.comparison import ALL, OFF, compare_entry
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, registry
from twinkle.platforms import get_platform


def answers(device: torch.device) -> dict[str, Callable[[], Any]]:
    """What isn't published, and how a backend finds it out."""
    from twinkle.kernel.ops.fla.npu import state_has_value_first
    from twinkle.kernel.ops.glu.npu import geglu_options
    from twinkle.kernel.ops.sdpa_attention.npu import scaled_with_the_scores

    return {
        "npu_geglu: activate_left means the first half": lambda: geglu_options("gelu_tanh", device)["activate_left"],
        "npu_fusion_attention: pse is scaled with the scores": lambda: scaled_with_the_scores(device),
        "npu_chunk_gated_delta_rule: a state is [V, K]": lambda: state_has_value_first(device),
    }


def tables(models: list[str], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Lines to print, each with whether all is well."""
    import torch_npu

    name = getattr(torch.npu, "get_device_name", lambda: "?")()  # type: ignore[attr-defined]
    yield f"torch {torch.__version__}, torch_npu {torch_npu.__version__}, {name}", True
    yield "\n| op | npu backend |\n|---|---|", True
    for op, definition in registry.ops().items():
        if "npu" in definition.implementations:
            reason = registry.availability(definition.implementations["npu"])
            yield f"| {op} | {reason or 'available'} |", reason is None
    yield "\n| not published | found |\n|---|---|", True
    for what, find in answers(device).items():
        try:
            yield f"| {what} | {find()} |", True
        except Exception as error:
            yield f"| {what} | {type(error).__name__}: {str(error).splitlines()[0]} |", False
    yield f"\n| model, {dtype} | verdict | backends | calls | share of the allowed error | worst tensor | left |", True
    yield "|---|---|---|---|---|---|---|", True
    for model in models:
        found = compare_entry(presets.build(model, dtype=dtype, device=device), ALL, DEFAULT_KERNEL_CONFIG)
        used = "" if found.used is None else f"{found.used:.2f}"
        cells = (
            model,
            found.verdict,
            ", ".join(found.backends),
            found.calls,
            used,
            found.worst or "",
            found.reason or "",
        )
        yield f"| {' | '.join(map(str, cells))} |", found.verdict != OFF


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(presets.PRESETS), default=list(presets.PRESETS))
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    options = parser.parse_args()
    missing = get_platform("ascend").missing()
    if missing is not None:
        print(f"no Ascend NPU here: {missing}", file=sys.stderr)
        return 2
    well = True
    for line, fine in tables(options.models, getattr(torch, options.dtype), torch.device("npu")):
        print(line, flush=True)
        well &= fine
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
