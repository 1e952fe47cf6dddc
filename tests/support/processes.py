"""Test cases that several processes run together, over gloo on the CPU."""

from __future__ import annotations

import sys
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


def problems(folder: Path, world: int, cases: str) -> dict[str, str]:
    """Runs all cases in one set of processes, since starting them takes longer than the cases do.

    Args:
        cases: ``module:name`` of the mapping; each case gets a mesh of all processes.

    Returns:
        case and process -> the traceback, empty where it passed.
    """
    multiprocessing.spawn(_worker, args=(str(folder), world, cases), nprocs=world)
    found = {}
    for number, case in enumerate(_load(cases)):
        for rank in range(world):
            file = folder / f"{number}.{rank}"
            found[f"{case}, process {rank}"] = file.read_text() if file.exists() else "was not reached"
    return found


def _load(cases: str) -> Cases:
    import importlib

    module, _, name = cases.partition(":")
    loaded: Cases = getattr(importlib.import_module(module), name)
    return loaded


def _worker(rank: int, folder: str, world: int, cases: str) -> None:
    """Runs all cases in one of the processes; writes for each a file with the traceback, empty when it passed."""
    torch.set_num_threads(1)
    register_test_backends()
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", where, timedelta(minutes=2), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
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
    dist.destroy_process_group()
