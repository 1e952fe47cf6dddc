"""A PrivateUse1 device without hardware: memory and arithmetic are the CPU's, everything else is a device of its own.

``load("npu")`` or ``load("mlu")`` makes it this process's out-of-tree device (one name per process, as with a vendor's
plug-in, in whose place a module of the plug-in's name stands; for ``npu`` with the published functions, see
:mod:`tests.simulated_device.torch_npu`). It proves routing, layouts, dtypes and gradients, not a chip's numerics or
speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import os
import sys
import tempfile
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILDS = Path(__file__).parents[2] / "build" / "simulated_device"
PLUGINS = {"npu": "torch_npu", "mlu": "torch_mlu"}
"""Device type -> the vendor's package, whose presence the platform's probe asks for."""


def load(name: str = "npu") -> None:
    """Makes ``torch.device(name)`` a device of this process; a second call does nothing.

    Raises:
        RuntimeError: the process has another out-of-tree device, or the compiler fails.
    """
    taken = torch._C._get_privateuse1_backend_name()
    if taken == name and PLUGINS[name] in sys.modules:
        return
    if taken != "privateuseone":
        raise RuntimeError(f"this process has the device {taken} already; {name} needs a process of its own")
    ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL).register_hooks()
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _device_module(name))
    torch.utils.generate_methods_for_privateuse1_backend()
    sys.modules[PLUGINS[name]] = _plugin(name)


def _plugin(name: str) -> types.ModuleType:
    """What stands in the place of the vendor's package."""
    if name == "npu":
        from tests.simulated_device import torch_npu

        return torch_npu.make()
    plugin = types.ModuleType(PLUGINS[name], "Stands in for the vendor's plug-in.")
    plugin.__spec__ = importlib.machinery.ModuleSpec(PLUGINS[name], None)
    return plugin


def load_mlu() -> None:
    """:func:`load` under its other name, for an entry point, which takes no arguments."""
    load("mlu")


def autoload(folder: Path, name: str) -> Path:
    """Makes a folder which, when it is on a process's path, has PyTorch load the device as it loads vendors' plug-ins.

    Returns:
        The folder.
    """
    information = folder / f"simulated_{name}-0.dist-info"
    information.mkdir(exist_ok=True)
    function = {"npu": "load", "mlu": "load_mlu"}[name]
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: simulated-{name}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[torch.backends]\nsimulated = tests.simulated_device:{function}\n")
    return folder


def _library() -> Path:
    """The compiled device for this PyTorch; compiled at first use (half a minute), by one process at a time or more."""
    text = f"{torch.__version__}{sys.version}{SOURCE.read_text()}"
    target = BUILDS / hashlib.sha256(text.encode()).hexdigest()[:16] / "device.so"
    if not target.exists():
        from torch.utils import cpp_extension

        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = cpp_extension.load(
                "simulated_device",
                [str(SOURCE)],
                build_directory=folder,
                extra_cflags=["-O1"],
                is_python_module=False,
                is_standalone=False,
            )
            os.replace(Path(built), target)  # in one step: another process sees all of it or nothing
    return target


def _device_module(name: str) -> types.ModuleType:
    """What PyTorch asks ``torch.<name>`` for."""
    module = types.ModuleType(f"torch.{name}")
    generator = torch.default_generator
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "synchronize": lambda device=None: None,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for attribute, answer in answers.items():
        setattr(module, attribute, answer)
    return module
