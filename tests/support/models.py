"""What tests of kernelized models share: one training step's results, and what a model and its process look like."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from twinkle import presets
from twinkle.kernel import DEFAULT_KERNEL_CONFIG, KernelChoice, journal
from twinkle.kernel.report import Row, report, short
from twinkle.kernel.testing import with_backends


@pytest.fixture(autouse=True)
def clean_process(loopback: None) -> Iterator[None]:
    """One thread, so that equal sums have equal bits; and no test may leave a replaced function behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if journal._patches:
        gc.collect()
    left = list(journal._patches.values())
    where = [patch.where for patch in left]
    for patch in left:
        patch.restore()
    assert where == [], "replaced attributes that no undo and no collection brought back"


def mapping(backend: str, *names: str) -> dict[str, KernelChoice]:
    """The default config through one backend, without logical names.

    Args:
        names: take only the targets whose short name starts or ends so, e.g. ``"llama."`` or ``"MLP.forward"``.
    """
    chosen = {
        key: choice
        for key, choice in DEFAULT_KERNEL_CONFIG.items()
        if "." in key and (not names or short(key).startswith(names) or short(key).endswith(names))
    }
    assert chosen
    return with_backends(chosen, backend)


def step(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Logits and the gradient of every parameter that gets one, by name."""
    model.zero_grad(set_to_none=True)
    outputs = model(**(presets.inputs(model) if inputs is None else inputs))
    presets.loss(outputs).backward()
    logits = getattr(outputs, "logits", None)
    results = {"logits": (outputs.last_hidden_state if logits is None else logits).detach().clone()}
    results |= {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return results


def same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Whether two steps gave the same tensors, whatever the names of the parameters are prefixed with."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours.values(), theirs.values()))


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Two steps in fp32 that differ in the order of a few sums."""
    assert list(ours) == list(theirs)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def rows_of(model: nn.Module) -> dict[str, Row]:
    """Short target -> row, of the entries that have anything to do with the model; each has one row here."""
    rows = [row for row in report(model).rows if row.state != "unused"]
    found = {short(row.target): row for row in rows}
    assert len(found) == len(rows), "an entry with several rows"
    return found


def installed(model: nn.Module) -> dict[str, int | None]:
    """Target -> instances of what is installed."""
    return {target: row.instances for target, row in rows_of(model).items() if row.state == "installed"}


def look(model: nn.Module) -> dict[str, Any]:
    """All that a kernel may change for a while and an undo has to bring back, to be compared with ``==``.

    Objects without an equality of their own are compared by identity, and here all are: classes, functions, parameters.
    """
    seen: dict[str, Any] = {"training": model.training, "repr": repr(model), "state": list(model.state_dict())}
    owners = set()
    for name, module in model.named_modules():
        seen[f"class of {name}"] = type(module)
        seen[f"attributes of {name}"] = list(vars(module))
        seen[f"parameters of {name}"] = {key: id(value) for key, value in module._parameters.items()}
        seen[f"children of {name}"] = {key: id(value) for key, value in module._modules.items()}
        owners |= {base for base in type(module).__mro__ if _is_global(base)}
    for owner in sorted(owners, key=str):
        seen[f"methods of {owner}"] = {k: id(v) for k, v in vars(owner).items()}
        seen[f"globals of {owner.__module__}"] = {k: id(v) for k, v in vars(sys.modules[owner.__module__]).items()}
    return seen


def _is_global(cls: type) -> bool:
    home = sys.modules[cls.__module__]
    return home.__name__.startswith(("transformers.", "tests.")) and getattr(home, cls.__name__, None) is cls


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Where two looks differ."""
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]
