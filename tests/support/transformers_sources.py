"""Reads the modeling files of transformers without importing them: of the installed version, and of the newest 5.x.

The newest version comes as a wheel into ``tests/.cache`` and is only read, never installed. The environment variable
``TWINKLE_TRANSFORMERS_WHEEL`` names a local wheel to read instead.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"
WHEEL_VARIABLE = "TWINKLE_TRANSFORMERS_WHEEL"
REQUIREMENT = "transformers>=5,<6"

# A cached wheel is taken for the newest one for a day; a checkout that is tested often doesn't ask every time.
_FRESH_SECONDS = 24 * 60 * 60
_DOWNLOAD_SECONDS = 300


class SourceError(RuntimeError):
    """No sources could be had, so nothing can be said about them."""


class TargetGone(LookupError):
    """The dotted path names nothing in these sources."""


@dataclass(frozen=True)
class Shape:
    """What a replacement relies on.

    Args:
        kind: ``class``, ``method`` or ``function``.
        parameters: names in order; of a class, those of its ``forward``.
        children: attributes that ``__init__`` sets to a module, an activation or a parameter.
        reads: attributes of ``self`` that the methods other than ``__init__`` read: what the computation depends on,
            such as an epsilon, or the limit of a clamp.
    """

    kind: str
    parameters: tuple[str, ...]
    children: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()


def differences(old: Shape, new: Shape) -> list[str]:
    """How the shape changed, one text per aspect; empty when it didn't."""
    found = []
    if old.kind != new.kind:
        found.append(f"kind: {old.kind} -> {new.kind}")
    if old.parameters != new.parameters:
        found.append(f"parameters: ({', '.join(old.parameters)}) -> ({', '.join(new.parameters)})")
    for aspect in ("children", "reads"):
        before, after = getattr(old, aspect), getattr(new, aspect)
        changes = [f"-{name}" for name in sorted(before - after)] + [f"+{name}" for name in sorted(after - before)]
        if changes:
            found.append(f"{aspect}: {' '.join(changes)}")
    return found


class Sources:
    """One version of transformers as text.

    Args:
        version: for messages.
        read: path of a file relative to site-packages -> its text, or None when there is no such file.
    """

    def __init__(self, version: str, read: Callable[[str], str | None]) -> None:
        self.version = version
        self._read = read
        self._modules: dict[str, dict[str, ast.stmt] | None] = {}

    def shape(self, dotted: str) -> Shape:
        """The shape of ``pkg.module.Class``, ``pkg.module.Class.method`` or ``pkg.module.function``.

        Raises:
            TargetGone: nothing of that name; the message has the nearest one.
        """
        parts = dotted.split(".")
        for split in range(len(parts) - 1, 0, -1):
            module, names = ".".join(parts[:split]), parts[split:]
            if self._definitions(module) is not None:
                return self._shape(module, names)
        raise TargetGone(f"transformers {self.version} has no module for {dotted}")

    def _shape(self, module: str, names: list[str]) -> Shape:
        home, node = self._find(module, names[0])
        if isinstance(node, ast.FunctionDef) and len(names) == 1:
            return Shape("function", _parameters(node))
        if not isinstance(node, ast.ClassDef) or len(names) > 2:
            raise TargetGone(f"transformers {self.version}: {module}.{'.'.join(names)} is no class, method or function")
        methods = self._methods(home, node)
        method = names[1] if len(names) == 2 else "forward"
        if method not in methods:
            raise TargetGone(
                f"transformers {self.version}: {module}.{names[0]} has no method {method}{_nearest(method, methods)}"
            )
        return Shape(
            kind="class" if len(names) == 1 else "method",
            parameters=_parameters(methods[method]),
            children=frozenset(_children(methods["__init__"])) if "__init__" in methods else frozenset(),
            reads=frozenset(read for name, node in methods.items() if name != "__init__" for read in _reads(node)),
        )

    def _definitions(self, module: str) -> dict[str, ast.stmt] | None:
        """Top-level name -> the statement that defines or imports it; None when there is no such module."""
        if module not in self._modules:
            path = module.replace(".", "/")
            text = self._read(f"{path}.py")
            if text is None:
                text = self._read(f"{path}/__init__.py")
            self._modules[module] = None if text is None else dict(_top_level(ast.parse(text).body))
        return self._modules[module]

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt]:
        """The definition of a name and the module it stands in, imports within transformers followed."""
        definitions = self._definitions(module)
        if definitions is None or name not in definitions:
            near = _nearest(name, definitions or {})
            raise TargetGone(f"transformers {self.version}: {module} has no {name}{near}")
        node = definitions[name]
        if not isinstance(node, ast.ImportFrom):
            return module, node
        base = module.split(".")[: -node.level] if node.level else []
        origin = ".".join([*base, *(node.module or "").split(".")])
        original = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
        return self._find(origin, original)

    def _methods(self, module: str, node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
        """A class's methods with those it inherits from classes of transformers; bases from elsewhere are left out."""
        methods: dict[str, ast.FunctionDef] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                try:
                    home, parent = self._find(module, base.id)
                except TargetGone:
                    continue
                if isinstance(parent, ast.ClassDef):
                    methods |= self._methods(home, parent)
        return methods | {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


@functools.cache
def installed() -> Sources:
    """The installed version, read as text."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SourceError("transformers isn't installed")
    root = Path(spec.origin).parents[1]

    def read(path: str) -> str | None:
        file = root / path
        # Only transformers: a wheel holds nothing else, and both versions have to be read alike.
        return file.read_text(encoding="utf-8") if path.startswith("transformers/") and file.is_file() else None

    return Sources(importlib.metadata.version("transformers"), read)


@functools.cache
def newest() -> Sources:
    """The newest 5.x release, read from its wheel.

    Raises:
        SourceError: no wheel could be had; the message says what was tried.
    """
    wheel = newest_wheel()
    match = re.match(r"transformers-([^-]+)-", wheel.name)
    if match is None:
        raise SourceError(f"{wheel} isn't named like a wheel of transformers")
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise SourceError(f"{wheel} can't be read: {error}") from error
    files = set(archive.namelist())
    return Sources(match[1], lambda path: archive.read(path).decode("utf-8") if path in files else None)


def newest_wheel() -> Path:
    """The wheel named by the environment variable, else the cached one if it's fresh, else a download."""
    named = os.environ.get(WHEEL_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise SourceError(f"{WHEEL_VARIABLE}={named}: no such file")
        return Path(named)
    cached = max(CACHE.glob("transformers-5.*.whl"), key=lambda file: file.stat().st_mtime, default=None)
    if cached is not None and time.time() - cached.stat().st_mtime < _FRESH_SECONDS:
        return cached
    return _download()


def _download() -> Path:
    CACHE.mkdir(exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    # Into a folder of its own and then moved: test processes that run side by side never see half a file. Wheels need
    # not fit this interpreter, they are only read, so pip is told a Python that every release supports.
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.13", "--dest", folder, REQUIREMENT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SourceError(_no_wheel(f"no answer in {_DOWNLOAD_SECONDS} s")) from error
        wheels = list(Path(folder).glob("transformers-*.whl"))
        if done.returncode or len(wheels) != 1:
            raise SourceError(_no_wheel(done.stderr.strip()[-1500:] or f"exit status {done.returncode}"))
        target = CACHE / wheels[0].name
        os.replace(wheels[0], target)
        os.utime(target)
    return target


def _no_wheel(reason: str) -> str:
    return (
        f"The newest transformers couldn't be downloaded (pip download --no-deps '{REQUIREMENT}'), so the default "
        f"targets weren't checked against it. Set {WHEEL_VARIABLE} to a local wheel, or TWINKLE_OFFLINE=1 to skip "
        f"this check knowingly. pip said: {reason}"
    )


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names a module defines or imports, those inside if and try included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            for handler in getattr(node, "handlers", ()):
                yield from _top_level(handler.body)
            yield from _top_level(node.orelse)
            yield from _top_level(node.body)


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    names += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return tuple(names)


def _children(init: ast.FunctionDef) -> Iterator[str]:
    """``self.name = SomeClass(…)`` (parameters are ``nn.Parameter(…)``) and ``self.name = ACT2FN[…]``."""
    for node in ast.walk(init):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(value, ast.Call):
            made = ast.unparse(value.func).split(".")[-1][:1].isupper()
        else:
            made = isinstance(value, ast.Subscript) and ast.unparse(value.value) == "ACT2FN"
        if made:
            yield from (target.attr for target in targets if _of_self(target))


def _reads(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        if _of_self(node) and isinstance(node.ctx, ast.Load):
            yield node.attr


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _nearest(name: str, known: dict[str, ast.stmt] | dict[str, ast.FunctionDef]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; nearest: {near[0]}" if near else ""
