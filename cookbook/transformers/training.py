"""What the scripts share: processes, kernels, the loop, checkpoints.

No trainer: a script builds its model and optimizer out of transformers, peft and PyTorch's FSDP2, and hands them over.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from log import Log, facts, memory
from models import batch, new_model, tokens
from settings import Place, Settings, WrongSettings, baseline
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from twinkle.commands.options import accelerator
from twinkle.moe import (
    clip_grad_norm_,
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    load_state_dict,
)


def run(kind: type[Settings], build: Callable[[Any, Place], tuple[Any, Any]], **defaults: Any) -> None:
    """Reads the command line, starts this process's part, trains. Ends the process with 2 when a setting is wrong."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kind, description=sys.modules["__main__"].__doc__)
    parser.set_defaults(**defaults)
    (settings,) = parser.parse_args_into_dataclasses()
    # Of patterns that peft itself adds for stacked experts, and then doesn't find among the modules.
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
    with processes(settings) as place, Log(settings, place) as log:
        try:
            try:
                model, optimizer = build(settings, place)
            except ValueError as error:  # e.g. the mesh doesn't fit the number of processes
                raise WrongSettings(str(error)) from error
            train(settings, place, log, model, optimizer)
        except WrongSettings as error:
            if place.rank == 0:
                print(f"{parser.prog}: {error}", file=sys.stderr, flush=True)
            sys.exit(2)


@contextlib.contextmanager
def processes(settings: Settings) -> Iterator[Place]:
    """This process among those that torchrun started; alone without it."""
    found = accelerator()
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(found.device_type, None if found.device_type == "cpu" else local)
    if device.type != "cpu":
        torch.accelerator.set_device_index(local)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = dist.get_default_backend_for_device(device)
    on = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout), device_id=on, **alone)
    try:
        yield Place(dist.get_rank(), world, device)
    finally:
        dist.destroy_process_group()
        if backend == "gloo":
            # DTensor's caches hold groups, whose threads therefore live on. One that lets go of its last tensor while
            # the interpreter ends aborts the process, since it is refused the GIL; a moment later none has any left.
            time.sleep(0.2)


# --- the model --------------------------------------------------------------------------------------------------------


def kernelized_model(settings: Settings, place: Place) -> Any:
    """The model with its kernels, before adapters and sharding.

    Trained weights are kept in fp32, frozen ones in bf16; on a CPU everything is fp32.
    """
    dtype = torch.float32 if place.device.type == "cpu" or not settings.lora_rank else torch.bfloat16
    model = new_model(settings.model, layers=settings.layers, dtype=dtype, device=place.device, seed=settings.seed)
    if not baseline():
        from twinkle.kernel import kernelize

        kernelize(model, _mapping(settings, model), device=place.device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(settings.seed)  # adapters begin alike in every process, with kernels and without
    return model


def _mapping(settings: Settings, model: Any) -> dict[str, Any]:
    from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice
    from twinkle.kernel.config import OPT_IN_KERNEL_CONFIG
    from twinkle.kernel.report import plan

    mapping: dict[str, Any] = dict(DEFAULT_KERNEL_CONFIG)
    named = tuple(name.strip() for name in getattr(settings, "experts", "").split(",") if name.strip())
    if named:
        there = {row.target for row in plan(model).rows if row.op == "moe_experts" and row.state != "unused"}
        mapping |= {target: KernelChoice("moe_experts", named) for target in there & mapping.keys()}
    if settings.enable_liger:
        fused = OPT_IN_KERNEL_CONFIG["fused_ce"]
        mapping["fused_ce"] = KernelChoice(fused.op, ("liger",)) if settings.fused_ce == "liger" else fused
    return mapping


def mixed_precision(settings: Settings, place: Place) -> MixedPrecisionPolicy:
    """Computing in bf16, adding up gradients in fp32; all fp32 on a CPU."""
    if place.device.type == "cpu":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(settings: Settings, place: Place, log: Log, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Trains from the first step or a checkpoint, and writes the log and checkpoints.

    Raises:
        WrongSettings: the batch can't be divided, the text is too short, or the checkpoint isn't one.
    """
    rows, rest = divmod(settings.batch, place.world * settings.accumulate)
    if rest or not rows:
        raise WrongSettings(
            f"--batch {settings.batch} can't be divided among {place.world} processes in {settings.accumulate} parts"
        )
    ids = tokens(settings.model, settings.text)
    if len(ids) < settings.length:
        raise WrongSettings(f"--length {settings.length}: the text has only {len(ids)} tokens")
    done = resume(settings.resume, model, optimizer) if settings.resume else 0
    log.write("start", **facts(settings, place, model))
    # So that nobody's first collective meets another one's set-up.
    dist.barrier()
    for step in range(done, settings.steps):
        begin = time.perf_counter()
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        whole = batch(ids, step, settings.batch, settings.length, settings.seed)
        own = whole.chunk(place.world)[place.rank].to(place.device)
        loss, norm = optimize(model, optimizer, own.split(rows), settings.max_grad_norm)
        dist.all_reduce(loss)
        value = loss.item() / place.world  # waits for the device
        seconds = time.perf_counter() - begin
        log.step(
            step=step + 1,
            loss=value,
            grad_norm=float(norm),
            lr=rate,
            seconds=round(seconds, 4),
            tokens_per_second=round(settings.batch * settings.length / seconds, 1),
            **memory(place),
        )
        if not math.isfinite(value):
            raise WrongSettings(f"the loss is {value} at step {step + 1}; try a smaller --lr")
        last = step + 1 == settings.steps
        if (last and settings.save_every >= 0) or (settings.save_every > 0 and (step + 1) % settings.save_every == 0):
            folder = Path(settings.output, f"step-{step + 1}")
            save(folder, model, optimizer, step + 1)
            log.write("checkpoint", step=step + 1, folder=str(folder))
    log.write("end", warnings=log.warnings)


def optimize(
    model: Any, optimizer: torch.optim.Optimizer, pieces: Sequence[torch.Tensor], max_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this process's token ids, piece by piece; its mean loss, and the norm of all gradients."""
    total = torch.zeros((), device=pieces[0].device)
    for number, piece in enumerate(pieces):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number + 1 == len(pieces))
        loss = model(input_ids=piece, labels=piece).loss / len(pieces)
        loss.backward()
        total += loss.detach()
    norm = clip_grad_norm_(model, max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def learning_rate(settings: Settings, step: int) -> float:
    """Linear up to ``lr`` over the warm-up, then a cosine down to a tenth of it."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# --- checkpoints ------------------------------------------------------------------------------------------------------

STATE = "training.pt"


def save(folder: Path, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """What is trained, in the format of a single process: for :func:`resume`, and as transformers and peft save it."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = gather_state_dict(model, names=trained.__contains__, rank0_only=True)
    moments = gather_optimizer_state(model, optimizer, rank0_only=True)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "model": weights, "optimizer": moments}, folder / STATE)
        more = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
        model.save_pretrained(folder, state_dict=weights, **more)
    dist.barrier()


def resume(folder: str, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Loads a checkpoint; the number of steps done.

    Raises:
        WrongSettings: it isn't one, or another model's.
    """
    file = Path(folder, STATE)
    if not file.is_file():
        raise WrongSettings(f"--resume {folder}: no {STATE} there; name a folder step-N of an earlier run's --output")
    state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained != set(state["model"]):
        other = sorted(trained ^ set(state["model"]))
        raise WrongSettings(f"--resume {folder}: it trained other weights, e.g. {other[0]}; use the same settings")
    load_state_dict(model, state["model"], strict=False)
    load_optimizer_state(model, optimizer, state["optimizer"])
    return int(state["step"])
