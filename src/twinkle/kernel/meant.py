"""What a mapping's entry that can't be was meant to be, as far as the model and our own configs show it: for errors."""

from __future__ import annotations

import sys
from typing import Any

from twinkle.kernel import registry
from twinkle.kernel.config import DEFAULT_KERNEL_CONFIG, OPT_IN_KERNEL_CONFIG
from twinkle.kernel.registry import KernelChoice
from twinkle.kernel.targets import ModelIndex, describe
from twinkle.naming import top_package


def meant_by(key: Any, index: ModelIndex) -> str | None:
    """What the key is in the model, and the key to write instead; None where it is nothing there."""
    if not isinstance(key, str):
        return None
    for cls, found in index.by_class.items():
        if any(name and key in (name, f"{name}.forward") for name, _ in found):
            what = f"{key!r} is a place in this model, and a key names code"
            if top_package(cls.__module__) == "torch":
                return f"{what}: write the dotted path of the model's own class that uses this {cls.__qualname__}"
            return f"{what}: write {_path_of(cls)!r} for all of its {len(found)} {cls.__qualname__}"
    first, _, rest = key.partition(".")
    for cls in index.by_class:
        if cls.__qualname__ == first and top_package(cls.__module__) != "torch":
            path = f"{_path_of(cls)}.{rest}" if rest else _path_of(cls)
            return f"{key!r} is a name in this model's code: write its dotted path {path!r}"
    for module in sorted(index.python_modules):
        if callable(vars(sys.modules.get(module, sys)).get(key)) and top_package(module) != "torch":
            return f"{key!r} is a name in this model's code: write its dotted path {f'{module}.{key}'!r}"
    return None


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def logical_key_of(value: Any) -> str | None:
    """The key without a dot that our configs have for what a choice's op finds by itself; None for any other value."""
    if not isinstance(value, KernelChoice) or value.installer or not registry.get_op(value.op).installer:
        return None
    choices = {**DEFAULT_KERNEL_CONFIG, **OPT_IN_KERNEL_CONFIG}
    return next((key for key, choice in choices.items() if "." not in key and choice.op == value.op), None)


def no_logical_entry(key: str, value: Any, index: ModelIndex) -> str:
    """Why a key without a dot can't have that value, and what to write."""
    able = ", ".join(name for name, op in registry.ops().items() if op.installer is not None)
    got = f"op {value.op} has no installer" if isinstance(value, KernelChoice) else f"got {describe(value)}"
    remedy = meant_by(key, index) or (
        f"Use a KernelChoice of an op with an installer ({able}) or with installer=…, or name a class, method or "
        "function by its dotted path"
    )
    return f"{key!r} is a logical name (it has no dot): its places are found by an installer, but {got}. {remedy}"
