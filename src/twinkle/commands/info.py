"""``twinkle-kernel info``: what this machine has."""

from __future__ import annotations

import platform as host
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import twinkle
from twinkle.commands.console import answer, quiet_logs
from twinkle.document import GAP, Heading, Part, Points, Table, Text
from twinkle.exits import FINE
from twinkle.kernel import registry
from twinkle.kernel.plugins import declared
from twinkle.naming import version_of
from twinkle.platforms import PLATFORMS
from twinkle.reasons import Reason

PACKAGES = ("torch", "transformers", "triton", "liger-kernel", "kernels", "torch_npu")


def run(*, as_json: bool) -> int:
    """Prints it; the exit code is 0."""
    with quiet_logs():  # a broken plug-in is in the output
        facts = gather()
    answer(facts, parts(facts), as_json=as_json)
    return FINE


def gather() -> dict[str, Any]:
    """Everything, as plain data: versions, platforms, ops (op -> backend -> available, reason), plug-ins, and the
    packages with operators of the ATen level: where each was found, and why one of its operators can't be had."""
    from twinkle.aten import catalog

    errors = _plugin_errors()
    return {
        "versions": {"twinkle-kernel": twinkle.__version__, "python": host.python_version()}
        | {package: version_of(package) for package in PACKAGES},
        "platforms": [
            {
                "name": platform.name,
                "aliases": list(platform.aliases),
                "device_type": platform.device_type,
                "present": (missing := platform.missing()) is None,
                "reason": None if missing is None else str(missing),
            }
            for platform in PLATFORMS.values()
        ],
        "ops": {op: dict(_backends(op)) for op in registry.ops()},
        "plugins": [
            {**asdict(plugin), "error": str(error) if (error := errors.get((plugin.name, plugin.value))) else None}
            for plugin in declared()
        ],
        "operators": [asdict(package) for package in catalog.packages()],
    }


def _backends(op: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for backend in dict.fromkeys([*registry.KNOWN_BACKENDS, *registry.backends_of(op)]):
        impl = registry.get_impl(op, backend)
        registered = not isinstance(impl, Reason)
        reason = registry.availability(impl) if not isinstance(impl, Reason) else impl
        yield (
            backend,
            {
                "registered": registered,
                "available": reason is None,
                "reason": None if reason is None else str(reason),
            },
        )


def _plugin_errors() -> dict[tuple[str, str], Reason]:
    from twinkle.kernel.plugins import load_plugins

    return load_plugins()


def parts(facts: dict[str, Any]) -> Iterator[Part]:
    """The facts as tables and sentences."""
    versions = [(name, version or "not installed") for name, version in facts["versions"].items()]
    yield Table(("package", "version"), versions)
    yield GAP

    platforms = [
        (found["name"], found["device_type"], "yes" if found["present"] else f"no: {found['reason']}")
        for found in facts["platforms"]
    ]
    yield Table(("platform", "device", "here"), platforms)
    yield GAP

    backends = list(dict.fromkeys(name for op in facts["ops"].values() for name in op))
    marks = [(op, *(_mark(found.get(backend)) for backend in backends)) for op, found in facts["ops"].items()]
    yield Table(("op", *backends), marks)
    yield Text("- not registered for this op", "dim")

    why = _why_not(facts["ops"])
    if why:
        yield GAP
        yield Heading("Why not")
        yield Points([(f"{backend} for {', '.join(ops)}", reason) for (backend, reason), ops in why.items()])
    yield GAP

    if not facts["plugins"]:
        yield Text("no third-party plug-ins (entry points of the group twinkle.kernel_ops)", "dim")
    for plugin in facts["plugins"]:
        state = f"not loaded: {plugin['error']}" if plugin["error"] else "loaded"
        yield Text(f"plug-in {plugin['name']} of {plugin['distribution']} ({plugin['value']}): {state}")

    for package in facts["operators"]:
        state = package["error"] or ", ".join(package["operators"])
        found = package["found"] or "nowhere"
        yield Text(f"operators in the package {package['name']}, found at {found}: {state}")


def _mark(found: dict[str, Any] | None) -> str:
    if found is None or not found["registered"]:
        return "-"
    return "yes" if found["available"] else "no"


def _why_not(ops: dict[str, dict[str, dict[str, Any]]]) -> dict[tuple[str, str], list[str]]:
    """(backend, reason) -> the ops it holds for, so that a missing package is said once."""
    why: dict[tuple[str, str], list[str]] = {}
    for op, backends in ops.items():
        for backend, found in backends.items():
            if found["registered"] and not found["available"]:
                why.setdefault((backend, found["reason"].replace(f"op {op} ", "the op ")), []).append(op)
    return why
