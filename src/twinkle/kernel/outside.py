"""Seeing what an installer changed besides what it wrote through :func:`twinkle.kernel.undo.patch`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from twinkle.kernel.reclass import BOUND_FORWARDS, CONTAINERS, installed_on
from twinkle.naming import top_package


@dataclass(frozen=True, eq=False)
class Seen:
    """One object as it was.

    Attributes:
        where: what people call it.
        value: the object; kept, so that its id is not used again.
        contents: attribute -> value.
    """

    where: str
    value: Any
    contents: dict[str, Any]


Snapshot = dict[int, Seen]
"""id of an object -> how it was."""


def snapshot(model: nn.Module) -> Snapshot:
    """What an installer could change: the modules of a model (class, attributes, parameters, children), what their
    classes and the Python modules of those define, and what all models share: torch.nn, its functions, and the
    attention functions of transformers. Not the values of tensors."""
    return {id(seen.value): seen for seen in _look(model)}


def _look(model: nn.Module) -> Iterator[Seen]:
    classes: dict[type, None] = {}
    for name, module in model.named_modules():
        contents = {k: v for k, v in vars(module).items() if not k.startswith("_") or k in BOUND_FORWARDS}
        for container in CONTAINERS:
            contents |= vars(module)[container]
        yield Seen(name or "the model", module, {"__class__": type(module), **contents})
        classes |= dict.fromkeys(type(module).__mro__)
    python_modules = {}
    for cls in classes:
        if top_package(cls.__module__) in ("torch", "builtins") or installed_on(cls) is not None:
            continue
        yield Seen(f"{cls.__module__}.{cls.__qualname__}", cls, {k: v for k, v in vars(cls).items() if callable(v)})
        python_modules[cls.__module__] = sys.modules.get(cls.__module__)
    for file in (*python_modules.values(), nn, F):
        if file is not None:
            yield Seen(file.__name__, file, {k: v for k, v in vars(file).items() if callable(v)})
    for cls in vars(nn).values():
        if isinstance(cls, type) and "forward" in vars(cls):
            yield Seen(f"torch.nn.{cls.__name__}", cls, {"forward": vars(cls)["forward"]})
    utils = sys.modules.get("transformers.modeling_utils")
    if utils is not None:
        functions = type(utils.ALL_ATTENTION_FUNCTIONS)._global_mapping
        yield Seen("transformers' attention functions", functions, dict(functions))


def changed_outside(before: Snapshot, after: Snapshot, journalled: set[tuple[int, str]]) -> list[str]:
    """Where two snapshots differ, but for what the journal knows.

    Args:
        journalled: (id of an object, attribute) of what went through the journal.
    """
    return [
        f"{seen.where}.{name}"
        for key, seen in before.items()
        if key in after
        for name in sorted(seen.contents.keys() | after[key].contents.keys())
        if seen.contents.get(name) is not after[key].contents.get(name) and (key, name) not in journalled
    ]
