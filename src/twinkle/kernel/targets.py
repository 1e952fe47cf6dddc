"""From a key of a mapping to the places in a model that it means: the sites."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from twinkle.kernel.journal import Journal, journals_of, patch_of
from twinkle.kernel.reclass import peel
from twinkle.naming import top_package
from twinkle.reasons import Reason, nearest

Kind = Literal["class", "method", "function", "logical"]


@dataclass(frozen=True)
class Target:
    """What a mapping key names.

    Attributes:
        kind: a class (its ``forward``), one method of a class, a function of a Python module, or a logical name.
        label: the key as text: the dotted path, or the logical name.
        owner: the class or the Python module; None for a logical name.
        attribute: the method's or function's name.
        original: the class's function, or the module's function as it was before anything of ours was put there.
        path: the class's dotted path, where the key is one.
    """

    kind: Kind
    label: str
    owner: Any = None
    attribute: str = ""
    original: Any = None
    path: str | None = None

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Unresolved:
    """A dotted path that names nothing: ``missing``; or whose Python module no loaded model can use: ``unused``."""

    label: str
    state: Literal["missing", "unused"]
    reason: Reason


@dataclass(frozen=True, eq=False)
class Site:
    """One place of a model where a kernel can go.

    Attributes:
        module: the instance; None for a function.
        name: the instance's qualified name in the model, or the function's dotted path.
        owner: the instance's class without wrappers, or the function's Python module; None for what is no place.
        attribute: the method's or function's name.
        original: the callable that runs there when nothing of ours is installed.
        device: the device it runs on (the instance's own, else the model's).
        dtype: the dtype of its parameters (else the model's); None where there are none.
        variant: what it computes, as the op's reference found out; None before that or for entries without an op.
    """

    module: nn.Module | None
    name: str
    owner: Any
    attribute: str
    original: Any
    device: torch.device
    dtype: torch.dtype | None
    variant: Any = None

    @classmethod
    def of_op(cls, label: str, original: Any, device: torch.device, dtype: torch.dtype | None) -> Site:
        """No place, but what the candidates of a logical name are told, whose places its installer finds."""
        return cls(None, label, None, label, original, device, dtype)

    @property
    def is_place(self) -> bool:
        """Whether it is one; see :meth:`of_op`."""
        return self.owner is not None

    @property
    def where(self) -> str:
        """The place for people: ``model.layers.0.mlp.forward``, or the function's dotted path."""
        return self.name if self.module is None else f"{self.name or 'the model'}.{self.attribute}"

    @property
    def place(self) -> tuple[int, str]:
        """What two entries may not both own."""
        return id(self.owner if self.module is None else self.module), self.attribute


def check_model(model: Any, what: str) -> None:
    """Raises a ValueError when what ``what`` was called with is no model."""
    if not isinstance(model, nn.Module):
        hint = "; give an instance" if isinstance(model, type) else ""
        raise ValueError(f"{what} needs an nn.Module, got {describe(model)}{hint}")


def describe(value: Any) -> str:
    """Any value in an error message, in a few words."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    text = " ".join(repr(value).split())
    text = text if len(text) <= 100 else f"{text[:100]}…"
    return text if isinstance(value, (str, type(None))) else f"{type(value).__name__} {text}"


def resolve_target(key: Any, importing: bool = True) -> Target | Unresolved:
    """What a mapping key means.

    Args:
        key: an ``nn.Module`` subclass, a dotted path, a logical name (no dot), or a Target (returned as it is).
        importing: import the path's Python module; without it a module that nobody has loaded is ``unused``, since
            no model can hold an instance of its classes.

    Raises:
        ValueError: the key is of no such kind, resolves into torch, or is a path outside transformers that names
            nothing; the message names the nearest right one.
    """
    if isinstance(key, Target):
        return key
    if isinstance(key, type):
        return _class_target(key)
    if not isinstance(key, str):
        wanted = "an nn.Module subclass, a dotted path or a logical name"
        raise ValueError(f"a mapping's key must be {wanted}, got {describe(key)}{_key_hint(key)}")
    if not all(part and part == part.strip() and ":" not in part for part in key.split(".")):
        raise ValueError(f"the key {key!r} is no dotted path: write package.module.Class, ….Class.method or ….function")
    if "." not in key:
        return Target("logical", key)
    return _dotted_target(key, importing)


def _key_hint(key: Any) -> str:
    if isinstance(key, nn.Module):
        return f"; give its class {type(key).__qualname__}"
    if inspect.isroutine(key):
        return f"; write its dotted path '{key.__module__}.{key.__qualname__}'"
    return ""


def _class_target(cls: type, label: str | None = None) -> Target:
    if not issubclass(cls, nn.Module):
        raise ValueError(f"{label or describe(cls)} is no nn.Module subclass, so no model has instances of it")
    cls = peel(cls)
    label = label or f"{cls.__module__}.{cls.__qualname__}"
    _refuse_torch(label, cls.__module__)
    return Target("class", label, cls, "forward", inspect.getattr_static(cls, "forward"))


def _refuse_torch(label: str, module: str) -> None:
    if top_package(module) == "torch":
        raise ValueError(
            f"{label} belongs to torch, which every model of the process shares; name the model's own class, method or "
            "function that uses it instead"
        )


def _dotted_target(path: str, importing: bool) -> Target | Unresolved:
    start, rest = _find_module(path, importing)
    if start is None:
        return Unresolved(path, "unused", Reason("unused", "no model in this process uses its Python module"))
    if isinstance(start, Reason):
        return _not_there(path, start)
    holder: Any = start
    where = start.__name__
    for position, name in enumerate(rest):
        value, after = _member(holder, name), rest[position + 1 :]
        if value is None:
            return _not_there(path, _no_such(holder, where, name, after))
        if isinstance(value, Reason):
            return _not_there(path, value)
        if not after and not isinstance(value, type):
            if isinstance(holder, type):
                return _method_target(holder, name, path)
            return _function_target(holder, name, value, path)
        if not isinstance(value, (type, types.ModuleType)):
            raise ValueError(f"{path}: {where}.{name} is no class, so it has no method {after[0]!r}")
        holder, where = value, f"{where}.{name}"
    return dataclasses.replace(_class_target(holder, path), path=path)


def _member(holder: Any, name: str) -> Any:
    """A name of a Python module or class; None when it has none, a Reason when loading it on demand failed."""
    if isinstance(holder, type):
        return inspect.getattr_static(holder, name, None)
    value = vars(holder).get(name)
    if value is None and hasattr(holder, "__getattr__"):  # packages that load their names on demand (PEP 562)
        try:
            return getattr(holder, name, None)
        except Exception as error:
            return Reason.of_error(error, "broken-module", f"loading {holder.__name__}.{name}")
    return value


def _method_target(cls: type, method: str, path: str) -> Target:
    target = _class_target(cls, path)
    original = inspect.getattr_static(target.owner, method)
    if not isinstance(original, types.FunctionType):
        raise ValueError(f"{path} is a {type(original).__name__}, not a method that a kernel could replace")
    return Target("method", path, target.owner, method, original, path.rpartition(".")[0])


def _function_target(python_module: types.ModuleType, name: str, value: Any, path: str) -> Target:
    patch = patch_of(python_module, name)
    original = patch.original if patch else value
    if not callable(original):
        raise ValueError(f"{path} is a {type(original).__name__}, neither a class nor a function")
    # With HF kernels importable, a decorated function is a module singleton; its class lives where it was made.
    home = python_module.__name__ if isinstance(original, nn.Module) else getattr(original, "__module__", None)
    _refuse_torch(path, home or python_module.__name__)
    return Target("function", path, python_module, name, original)


def _find_module(path: str, importing: bool) -> tuple[types.ModuleType | Reason | None, list[str]]:
    """The Python module that a path starts with and what is left of the path: a name, or a class and a method."""
    parts = path.split(".")
    if not importing:
        for length in (len(parts) - 1, len(parts) - 2):
            module = sys.modules.get(".".join(parts[:length]))
            # A package is only on the way to the module that the path means.
            if module is not None and (length == len(parts) - 1 or not hasattr(module, "__path__")):
                return module, parts[length:]
        return None, []
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                return Reason.of_error(error, "broken-module", f"importing {name}"), []
        except Exception as error:
            return Reason.of_error(error, "broken-module", f"importing {name}"), []
    close = nearest(parts[0], {"transformers", *map(top_package, list(sys.modules))})
    remedy = f"nearest: {close}" if close else f"install {parts[0]}, or mend the path"
    return Reason("missing", f"there is no Python package {parts[0]!r}", remedy), []


def _no_such(holder: Any, where: str, name: str, after: list[str]) -> Reason:
    """A missing name as a reason, with the path that was probably meant."""
    members = {n: v for n, v in vars(holder).items() if not n.startswith("__")}
    if isinstance(holder, type):
        known = [n for n in dir(holder) if not n.startswith("_")]
    elif hasattr(holder, "__path__"):
        known = [*members, *(module.name for module in pkgutil.iter_modules(holder.__path__))]
    elif after:
        known = [n for n, v in members.items() if isinstance(v, type)]
    else:
        known = [n for n, v in members.items() if callable(v)]
    close = nearest(name, known)
    if close is None:
        return Reason("missing", f"{where} has no {name!r}")
    rest = after if isinstance(members.get(close), type) else []
    return Reason("missing", f"{where} has no {name!r}", f"nearest: {'.'.join([where, close, *rest])}")


def _not_there(path: str, reason: Reason) -> Unresolved:
    if path.startswith("transformers."):
        return Unresolved(path, "missing", reason)
    raise ValueError(f"target {path!r} does not resolve: {reason}")


@dataclass
class ModelIndex:
    """One walk over a model, shared by all entries of a mapping.

    Attributes:
        device: the device the model runs on; ``forced_device`` when the caller said which.
        dtype: the dtype of the model's first parameter.
        by_class: class without wrappers -> the instances, with their qualified names.
        journals: of what is installed on the model already.
        python_modules: the names of the Python modules whose code the model runs.
    """

    device: torch.device
    forced_device: torch.device | None
    dtype: torch.dtype | None
    journals: list[Journal] = field(default_factory=list)
    by_class: dict[type, list[tuple[str, nn.Module]]] = field(default_factory=dict)
    python_modules: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, device: torch.device | None) -> ModelIndex:
        parameter = next(model.parameters(), None)
        model_device = device or (parameter.device if parameter is not None else torch.device("cpu"))
        dtype = parameter.dtype if parameter is not None else None
        index = cls(model_device, device, dtype, journals_of(model))
        for name, module in model.named_modules():
            index.by_class.setdefault(peel(type(module)), []).append((name, module))
        index.python_modules = {
            base.__module__ for found in index.by_class for base in found.__mro__ if isinstance(base.__module__, str)
        }
        return index

    def sites(self, target: Target) -> list[Site]:
        """Where ``target`` lies in the model; empty when the model doesn't use it."""
        if target.kind == "logical":
            return []
        if target.kind == "function":
            if target.owner.__name__ not in self.python_modules:
                return []
            return [Site(None, target.label, target.owner, target.attribute, target.original, self.device, self.dtype)]
        found = []
        for cls, instances in self.by_class.items():
            if _means(target, cls):
                found += [self.site(name, module, cls, target.attribute) for name, module in instances]
        return found

    def site(self, name: str, module: nn.Module, cls: type, attribute: str) -> Site:
        parameter = next(module.parameters(recurse=True), None)
        device = self.forced_device or (self.device if parameter is None else parameter.device)
        dtype = self.dtype if parameter is None else parameter.dtype
        return Site(module, name, cls, attribute, getattr(cls, attribute), device, dtype)


def _means(target: Target, cls: type) -> bool:
    """Whether instances of a class run what the target names."""
    # A subclass with code of its own at this attribute doesn't run the target's.
    if issubclass(cls, target.owner) and inspect.getattr_static(cls, target.attribute) is target.original:
        return True
    # Liger puts a class of its own under the name; models made before that have instances of the one that was there.
    return target.path == f"{cls.__module__}.{cls.__qualname__}" and hasattr(cls, target.attribute)


def holders_of(site: Site) -> list[str]:
    """Other Python modules that took a function by ``from … import``, under whatever name: they go on calling it."""
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if module is not site.owner and any(v is site.original for v in list(getattr(module, "__dict__", {}).values()))
    )
