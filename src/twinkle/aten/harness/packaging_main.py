"""A program that goes one way to an operator: run as a file, in a process of its own, which imports nothing before.

Its argument is a JSON object: ``operator``, ``mode`` (``package`` or ``script``), ``folder`` (the operator's),
``stages``, and ``dispatch_key``, ``platform`` and ``device``. It prints the name of each stage that it has passed, and
ends with an exception in the one that it doesn't pass.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any


def imported(task: dict[str, Any]) -> ModuleType:
    """The operator's ``register.py``, or its package, which has the same names."""
    is_script = task["mode"] == "script"
    if is_script:
        sys.path.insert(0, task["folder"])
    module = importlib.import_module("register" if is_script else f"ops.{task['operator']}")
    spec = module.register_a1.__self__
    assert (spec.name, spec.home.is_script) == (task["operator"], is_script), spec
    return module


def registered(module: ModuleType, task: dict[str, Any]) -> Any:
    """The live registration; None of an operator that is refused by design, with the reason."""
    from twinkle.aten.routes import every_size

    spec = module.register_a1.__self__
    try:
        with every_size():
            registration = module.register_a1(task["dispatch_key"], None, task["platform"])
    except NotImplementedError as refusal:
        assert spec.by_design and spec.by_design in str(refusal)
        return None
    assert not registration.closed and registration.keys and spec.by_design is None
    return registration


def execute(spec: Any, registration: Any, device: str) -> None:
    """Calls the operator, or by itself its kernel that is never registered; closes the registration."""
    from twinkle.aten.arguments import Arguments
    from twinkle.aten.harness.cases import cases

    for case in cases(spec, seeds=1):
        Arguments(spec.overload).call(spec.native if registration else spec.aten, case.values(device))
    if registration is None:
        own = [name for name in sys.modules if name.startswith(f"{spec.home.package}.kernel.")]
        assert own, "its kernel wasn't even imported"
    else:
        registration.close()
        assert registration.counter["n"] > 0 and registration.counts.kernel > 0, registration.counts


def main() -> None:
    """Goes as far as the stages say."""
    task = json.loads(sys.argv[1])
    module = imported(task)
    print("import", flush=True)
    if "register" in task["stages"]:
        registration = registered(module, task)
        print("register", flush=True)
    if "execute" in task["stages"]:
        execute(module.register_a1.__self__, registration, task["device"])
        print("execute", flush=True)


if __name__ == "__main__":
    main()
