"""``import twinkle.kernel`` is quick, loads no optional package and not torch, and survives broken ones on the path."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "triton", "liger_kernel", "torch_npu", "kernels", "fla", "numpy")
OPTIONAL = ("transformers", "triton", "liger_kernel", "torch_npu", "kernels", "fla")

BROKEN = {
    "ImportError": "raise ImportError('broken on purpose')",
    "RuntimeError": "raise RuntimeError('broken on purpose')",
    "SystemExit": "raise SystemExit('broken on purpose')",
    "SyntaxError": "this is no python",
}


def run(code: str, *path: Path) -> str:
    """Runs code in a fresh process, with folders first on the path; gives its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def broken_packages(folder: Path, source: str, names: tuple[str, ...] = HEAVY) -> Path:
    for name in names:
        (folder / f"{name}.py").write_text(source)
    return folder


LOADED = f"import sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"


@pytest.mark.parametrize(
    "statement",
    [
        "import twinkle",
        "import twinkle.kernel",
        "from twinkle.kernel import *",
        "from twinkle.kernel import kernelize, hub, KernelChoice, DEFAULT_KERNEL_CONFIG",
        "from twinkle.kernel.core import kernelize, hub, HubRef",
        "from twinkle.kernel.registry import register_op, register_backend, KernelImpl, resolve_impl, lazy_import",
        "import twinkle.kernel.ops",
        "import twinkle.kernel.report",
        "import twinkle.platforms, twinkle.reasons, twinkle.presets",
        "from twinkle.kernel import KernelChoice, hub; KernelChoice('swiglu', ('npu',)); hub('a/b', 'c', version=1)",
        "from twinkle.kernel import registry; registry.ops(); registry.backends_of('rms_norm')",
    ],
)
def test_nothing_heavy_is_imported(statement: str, tmp_path: Path) -> None:
    assert run(f"{statement}\n{LOADED}") == "[]\n"


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_broken_packages_do_no_harm(source: str, tmp_path: Path) -> None:
    code = f"from twinkle.kernel import DEFAULT_KERNEL_CONFIG; assert DEFAULT_KERNEL_CONFIG\n{LOADED}"
    assert run(code, broken_packages(tmp_path, source)) == "[]\n"


def test_the_import_is_quick() -> None:
    """Median of five, the start of the process excluded; of the processor, since other tests run beside this one."""
    code = "import time; t = time.process_time(); import twinkle.kernel; print(time.process_time() - t)"
    seconds = sorted(float(run(code)) for _ in range(5))
    assert statistics.median(seconds) < 0.1, seconds


def test_exactly_four_names_are_public() -> None:
    code = """
import twinkle.kernel as kernel
assert sorted(kernel.__all__) == ["DEFAULT_KERNEL_CONFIG", "KernelChoice", "hub", "kernelize"]
namespace = {}
exec("from twinkle.kernel import *", namespace)
assert sorted(set(namespace) - {"__builtins__"}) == sorted(kernel.__all__)
import types
# Submodules appear as attributes when they are imported; nothing else does.
print(sorted(name for name, value in vars(kernel).items()
             if not name.startswith("__") and not isinstance(value, types.ModuleType)))
"""
    assert run(code) == "['DEFAULT_KERNEL_CONFIG', 'KernelChoice', 'annotations', 'hub', 'kernelize']\n"


def test_the_default_installer_can_be_had_from_core() -> None:
    code = """
from twinkle.kernel import core
from twinkle.kernel.core import default_installer
from twinkle.kernel.install import default_installer as other
assert default_installer is other
try:
    core.no_such_name
except AttributeError as error:
    print(error)
"""
    assert run(code) == "module 'twinkle.kernel.core' has no attribute 'no_such_name'\n"


@pytest.mark.parametrize("what", ["ImportError", "RuntimeError", "SyntaxError"])
def test_broken_optional_packages_are_reasons_in_the_report(what: str, tmp_path: Path) -> None:
    """kernelize itself, where optional packages first on the path raise at import."""
    broken_packages(tmp_path, BROKEN[what], OPTIONAL)
    code = """
import warnings; warnings.simplefilter("ignore")
import torch
from torch import nn
from twinkle.kernel import KernelChoice, hub, kernelize
from twinkle.kernel.report import plan, report

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6
    def forward(self, x):
        h = x.float()
        return (self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)

model = nn.Sequential(Norm())
expected = model(torch.ones(2, 8))
for value in (KernelChoice("rms_norm", ("npu", "triton", "liger")), hub("a/b", "c", version=1, trust_remote_code=True)):
    kernelize(model, {Norm: value})
    row = report(model).rows[0]
    assert row.state in ("kept", "refused") and row.why(), row
    assert torch.equal(model(torch.ones(2, 8)), expected)
    print(row.why())
"""
    output = run(code, tmp_path)
    assert f"importing get_kernel from kernels raised {what}" in output
    assert "liger: " in output and "triton: " in output
