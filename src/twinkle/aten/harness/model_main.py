"""A model's training step and generation, in a process of its own: ``python -m twinkle.aten.harness.model_main``.

Reads a JSON object on stdin, writes one on stdout: see :func:`observe_model`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import deterministic

from twinkle.aten.home import spec_beside
from twinkle.aten.routes import every_size

TOKENS = 8


def observe_model(device: str, model: dict[str, Any], registrations: list[dict[str, str]], kept: str) -> dict[str, Any]:
    """A tiny model, built first: forward, backward, then greedy decoding.

    Args:
        device: where it runs.
        model: ``preset`` (a Qwen3 when left out), ``dtype``, and what its configuration has beyond the preset's.
        registrations: the operators to register: ``package`` (empty in script mode), ``folder``, ``dispatch_key`` and
            ``platform`` of each.
        kept: the file that the loss and the gradients themselves are written to.

    Returns:
        ``loss`` and every parameter's ``gradients`` as digests of their bits, ``tokens``; and by operator: ``keys``,
        ``reached``, ``kernel``, ``fallbacks``.
    """
    from twinkle import presets

    torch.manual_seed(0)
    settings = dict(model)
    preset, dtype = settings.pop("preset", "qwen3"), getattr(torch, settings.pop("dtype", "float32"))
    built = presets.build(preset, dtype=dtype, device=device, **settings)
    batch = presets.inputs(built, device=device)
    with every_size(), contextlib.ExitStack() as stack:
        live = {}
        for registration in registrations:
            counter: dict[str, int] = {}
            package, folder = registration["package"], Path(registration["folder"])
            if package:
                # Where the parent found it, by a path of its own maybe.
                sys.path.append(str(folder.parents[package.count(".")]))
            spec = spec_beside(package and f"{package}.test", folder)
            made = spec.register_a1(registration["dispatch_key"], counter, registration["platform"])
            live[made.operator] = stack.enter_context(made), counter
        torch.manual_seed(1)
        built.train()
        loss = presets.loss(built(**batch))
        loss.backward()
        built.eval()
        tokens = built.generate(batch["input_ids"], max_new_tokens=TOKENS, do_sample=False)
    gradients = {name: p.grad.cpu() for name, p in built.named_parameters() if p.grad is not None}
    torch.save({"loss": loss.detach().cpu(), **gradients}, kept)
    return {
        "device": str(next(built.parameters()).device),
        "loss": _digest(loss),
        "finite": bool(torch.isfinite(loss)),
        "gradients": {name: _digest(grad) for name, grad in gradients.items()},
        "tokens": tokens[:, -TOKENS:].tolist(),
        "operators": {
            name: {
                "keys": list(made.keys),
                "reached": counter["n"],
                "kernel": made.counts.kernel,
                "fallbacks": dict(made.counts.fallbacks),
            }
            for name, (made, counter) in live.items()
        },
    }


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Reads the task, writes what was observed.

    Two processes must differ by the operators' kernels alone, while accelerators sum up in any order if they may.
    """
    task = json.load(sys.stdin)
    if task["device"] != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        # Or every allocation would be written.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)
    print(json.dumps(observe_model(**task)))


if __name__ == "__main__":
    main()
