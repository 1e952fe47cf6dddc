"""Test cases that several processes run together, over gloo on the CPU or NCCL on GPUs."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twinkle.kernel.testing import register_test_backends

Cases = Mapping[str, Callable[[DeviceMesh], Any]]


PATIENCE = 60
"""Seconds after which processes that wait for one that is gone count as hanging."""


NOT_REACHED = "was not reached"


def backend_for(world: int) -> str:
    """NCCL where there is a GPU for each process, otherwise gloo on the CPU."""
    return "nccl" if torch.cuda.device_count() >= world else "gloo"


def problems(folder: Path, world: int, cases: str, death: str | None = None, backend: str = "gloo") -> dict[str, str]:
    """Runs all cases in one set of processes, since starting them takes longer than the cases do.

    Args:
        cases: ``module:name`` of the mapping; each case gets a mesh of all processes.
        death: ``module:name`` of a case that kills a process and is run last; the others have to end with an error.
        backend: ``gloo`` or ``nccl``.

    Returns:
        case and process -> the traceback, empty where it passed.
    """
    context = multiprocessing.spawn(_worker, args=(str(folder), world, cases, death, backend), nprocs=world, join=False)
    assert context is not None
    for process in context.processes:
        process.join()
    found = {}
    for rank, process in enumerate(context.processes):
        said = folder / f"death.{rank}"
        if death is not None and rank < world - 1:
            found[f"death, process {rank}"] = said.read_text() if said.exists() else NOT_REACHED
        elif death is None and process.exitcode:
            found[f"process {rank}"] = f"ended with exit code {process.exitcode}"
    loaded: Cases = _load(cases)
    for number, case in enumerate(loaded):
        for rank in range(world):
            file = folder / f"{number}.{rank}"
            found[f"{case}, process {rank}"] = file.read_text() if file.exists() else NOT_REACHED
    return found


def check(found: Mapping[str, str]) -> None:
    """Raises with what was wrong, the tracebacks in full; cases that a failure kept from being run are only named."""
    missed = [case for case, problem in found.items() if problem == NOT_REACHED]
    failed = [f"{case}: {problem}" for case, problem in found.items() if problem and problem != NOT_REACHED]
    if failed or missed:
        raise AssertionError("\n\n".join([*failed, f"not reached: {', '.join(missed) or 'none'}"]))


def _load(cases: str) -> Any:
    import importlib

    module, _, name = cases.partition(":")
    return getattr(importlib.import_module(module), name)


def _worker(rank: int, folder: str, world: int, cases: str, death: str | None, backend: str) -> None:
    """Runs all cases in one of the processes; writes for each a file with the traceback, empty when it passed."""
    torch.set_num_threads(1)
    register_test_backends()
    where = f"file://{folder}/rendezvous"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, where, timedelta(minutes=2), rank=rank, world_size=world)
    mesh = init_device_mesh("cuda" if backend == "nccl" else "cpu", (world,), mesh_dim_names=("ep",))
    for number, case in enumerate(_load(cases).values()):
        problem = ""
        try:
            case(mesh)
        except BaseException:
            problem = traceback.format_exc()
        Path(folder, f"{number}.{rank}").write_text(problem)
        if problem:  # the other processes may wait for this one in vain
            sys.stdout.flush()
            break
    else:
        if death is not None:
            Path(folder, f"death.{rank}").write_text(_outlived(_load(death), mesh))
            os._exit(0)  # what is left of the group can't be taken apart together
    dist.destroy_process_group()
    time.sleep(0.2)  # a thread of gloo that is still at work when the interpreter ends aborts the process


def _outlived(death: Callable[[DeviceMesh], Any], mesh: DeviceMesh) -> str:
    """What was wrong with the end of a process that another one's death has to stop."""
    dist.barrier()
    begin = time.monotonic()
    try:
        death(mesh)
    except Exception:
        seconds = time.monotonic() - begin
        return "" if seconds < PATIENCE else f"it took {seconds:.0f} s"
    return "no error"
