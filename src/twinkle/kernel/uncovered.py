"""Which norms, gated MLPs and rotary functions of a model no entry of a mapping covers, and which op would fit."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING, Any

from twinkle.kernel import registry
from twinkle.kernel.probe import variant_of
from twinkle.kernel.rows import Uncovered
from twinkle.kernel.targets import ModelIndex, Unresolved, resolve_target
from twinkle.naming import top_package
from twinkle.reasons import Reason

if TYPE_CHECKING:
    from torch import nn

PROBED_OPS = ("rms_norm", "gated_rms_norm", "swiglu", "geglu")
PROBED_FUNCTION_OPS = ("rotary", "multimodal_rotary")


def uncovered_of(index: ModelIndex, covered: Collection[tuple[Any, str]]) -> list[Uncovered]:
    """The norms, gated MLPs and rotary functions of a model that no entry covers.

    What a part computes is found by running it on small inputs (see :mod:`twinkle.kernel.probe`), so names don't
    matter; parts that no op fits are only listed when their name says that they are a norm, an MLP or a rotary.

    Args:
        index: the model.
        covered: (class or Python module, attribute) of the sites that entries name.
    """
    cache: dict[Hashable, Any] = {}
    return _classes(index, covered, cache) + _functions(index, covered, cache)


def _classes(index: ModelIndex, covered: Collection[tuple[Any, str]], cache: dict[Hashable, Any]) -> list[Uncovered]:
    found = []
    for cls, instances in index.by_class.items():
        if top_package(cls.__module__) == "torch" or (cls, "forward") in covered:
            continue
        label = f"{cls.__module__}.{cls.__qualname__}"
        name, module = instances[0]
        site = index.site(name, module, cls, "forward")
        for op in PROBED_OPS:
            variant = variant_of(registry.reference_of(op), site, cache)
            if not isinstance(variant, Reason):
                target = label if op == "rms_norm" else f"{label}.forward"
                found.append(Uncovered(target, len(instances), op, _words(variant), key=_key(cls, target, name)))
                break
        else:
            if _looks_like_norm_or_mlp(cls, module):
                found.append(Uncovered(label, len(instances), reason="no op computes what it does"))
    return found


def _words(variant: Any) -> str:
    """A variant for people: the fields that are not as usual."""
    if not dataclasses.is_dataclass(variant):
        return str(variant)
    unusual = [f for f in dataclasses.fields(variant) if getattr(variant, f.name) != f.default]
    values = {f.name: getattr(variant, f.name) for f in unusual}
    texts = [f"{k}=({_words(v)})" if dataclasses.is_dataclass(v) else f"{k}={v!r}" for k, v in values.items()]
    return ", ".join(texts) or "the usual"


def _key(cls: type, path: str, name: str) -> str:
    """What to write as the mapping's key: the path, or the class where that leads nowhere (made within a function)."""
    try:
        found = resolve_target(path)
    except ValueError:
        found = None
    if getattr(found, "owner", None) is cls:
        return f'"{path}"'
    return f'type(model.get_submodule("{name}"))' if name else "type(model)"


def _looks_like_norm_or_mlp(cls: type, module: nn.Module) -> bool:
    name = cls.__name__.lower()
    return (name.endswith("norm") and bool(module._parameters)) or name.endswith("mlp")


def _functions(index: ModelIndex, covered: Collection[tuple[Any, str]], cache: dict[Hashable, Any]) -> list[Uncovered]:
    found = []
    for module_name in sorted(index.python_modules):
        python_module = sys.modules.get(module_name)
        if python_module is None or top_package(module_name) == "torch":
            continue
        for name, value in sorted(vars(python_module).items()):
            if "rot" not in name.lower() and "rope" not in name.lower():
                continue
            if isinstance(value, type) or not callable(value) or (python_module, name) in covered:
                continue
            part = _function(index, f"{module_name}.{name}", cache)
            # What no op fits is worth a line when it is the rotation itself, not one of its helpers.
            if part is not None and (part.op or re.match(r"apply_.*rot", name)):
                found.append(part)
    return found


def _function(index: ModelIndex, label: str, cache: dict[Hashable, Any]) -> Uncovered | None:
    try:
        target = resolve_target(label)
        sites = [] if isinstance(target, Unresolved) else index.sites(target)
    except ValueError:  # e.g. a function of torch that the file imports
        return None
    if not sites:
        return None
    variants = {op: variant_of(registry.reference_of(op), sites[0], cache) for op in PROBED_FUNCTION_OPS}
    for op, variant in variants.items():
        if not isinstance(variant, Reason):
            return Uncovered(label, 1, op, _words(variant), key=f'"{label}"')
    return Uncovered(label, 1, reason=str(variants["rotary"]))
