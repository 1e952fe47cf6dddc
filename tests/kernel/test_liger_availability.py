"""When Liger's kernels can't be used here: the report says why, and nothing else changes.

Each case is a fresh Python process, since what matters is decided when triton and liger_kernel are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.liger, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
PREPARE = """
import json, os, sys
answers = {}

def ask():
    from twinkle.kernel.registry import availability, get_impl
    reason = availability(get_impl("rms_norm", "liger"))
    return None if reason is None else [reason.code, str(reason)]
"""


def run(script: str, *paths: Path, interpret: bool = False) -> dict[str, Any]:
    """What a script of its own process leaves in ``answers``; the machine's GPUs, if any, are hidden from it."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "LIGER_FUSED_MOE_AUTOTUNE")}
    environment |= {**hidden, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    code = PREPARE + textwrap.dedent(script) + "\nprint(json.dumps(answers))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def fake_liger(folder: Path, name: str, ops: str) -> Path:
    package = folder / name / "liger_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "ops.py").write_text(ops)
    return package.parent


def test_on_a_cpu_the_report_says_why_and_liger_is_not_even_imported() -> None:
    answers = run(
        """
        import torch
        from twinkle import presets
        from twinkle.kernel import DEFAULT_KERNEL_CONFIG, kernelize
        from twinkle.kernel.report import report
        from twinkle.kernel.testing import with_backends

        model = presets.build("qwen3", num_hidden_layers=1)
        inputs = presets.inputs(model, batch=1, length=4)
        before, classes = model(**inputs).logits, [type(m) for m in model.modules()]
        entries = {k: v for k, v in DEFAULT_KERNEL_CONFIG.items() if ".qwen3.modeling_" in k}
        kernelize(model, with_backends(entries, "liger"))
        answers["rows"] = [[row.op, row.state, row.why()] for row in report(model).rows]
        answers["same"] = torch.equal(model(**inputs).logits, before) and classes == [type(m) for m in model.modules()]
        answers["imported"] = "liger_kernel" in sys.modules

        import triton
        os.environ["TRITON_INTERPRET"] = "1"
        answers["too late"] = ask()
        """
    )
    assert [row[:2] for row in answers["rows"]] == [[op, "kept"] for op in ("rms_norm", "swiglu", "rotary")]
    whys = [why for *_, why in answers["rows"]]
    assert all("no device for Liger's Triton kernels" in why and "TRITON_INTERPRET=1" in why for why in whys)
    assert answers["same"] and not answers["imported"]
    assert answers["too late"] == [
        "interpreter",
        "TRITON_INTERPRET was changed after triton was imported (set it before the first import, or not at all)",
    ]


def test_a_broken_liger_is_a_reason_and_the_next_backend_is_tried(tmp_path: Path) -> None:
    broken = fake_liger(tmp_path, "broken", "raise RuntimeError('built for another torch')")
    answers = run(
        """
        import torch
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from twinkle.kernel import KernelChoice, kernelize
        from twinkle.kernel.report import report
        from twinkle.kernel.testing import register_test_backends

        register_test_backends()
        norm = LlamaRMSNorm(8)
        kernelize(norm, {LlamaRMSNorm: KernelChoice("rms_norm", ("liger", "loopback"))})
        (row,) = report(norm).rows
        answers["row"] = [row.state, row.backend, [str(reason) for reason in row.reasons]]
        answers["works"] = norm(torch.ones(2, 8)).shape == (2, 8)
        """,
        broken,
        interpret=True,
    )
    why = "importing liger_kernel.ops raised RuntimeError: built for another torch"
    assert answers == {"row": ["installed", "loopback", [why]], "works": True}


def test_a_liger_without_a_symbol_is_a_reason_that_names_it(tmp_path: Path) -> None:
    older = fake_liger(tmp_path, "older", "swiglu_forward = LigerRopeFunction = object")
    answers = run(
        """
        from twinkle.kernel.registry import availability, get_impl

        for op in ("rms_norm", "swiglu", "geglu", "moe_experts"):
            answers[op] = availability(get_impl(op, "liger")).text
        """,
        older,
        interpret=True,
    )
    missing = {op: text.partition(" has no ")[2] for op, text in answers.items()}
    assert missing == {
        "rms_norm": "LigerRMSNormFunction",
        "swiglu": "swiglu_backward",
        "geglu": "geglu_forward, geglu_backward",
        "moe_experts": "LigerFusedMoEFunction",
    }


def test_packages_that_are_not_there() -> None:
    """Where nothing could run the kernels, that is the reason: installing a package would be no remedy."""
    answers = run(
        """
        from importlib import util
        from twinkle import triton_programs
        from twinkle.kernel.ops import triton_support

        found = util.find_spec
        for name in ("triton", "liger_kernel"):
            util.find_spec = lambda wanted, package=None: None if wanted == name else found(wanted, package)
            answers[name] = ask()
            if name == "triton":
                answers["own"] = str(triton_support.available()[1])
                triton_programs.platform_of = lambda kind: "a platform"
                answers["own with a GPU"] = str(triton_support.available()[1])
                answers["triton with a GPU"] = ask()
        """,
        interpret=True,
    )
    assert answers["triton"] == ["no-device", "no device for Liger's Triton kernels: none of cuda, npu, xpu"]
    assert answers["own"] == "Triton has no GPU to run on"
    assert answers["own with a GPU"] == "the package triton is not installed (pip install triton)"
    install = "pip install 'twinkle-kernel[liger]'"
    assert answers["triton with a GPU"] == ["no-package", f"the package triton is not installed ({install})"]
    assert answers["liger_kernel"] == ["no-package", f"the package liger-kernel is not installed ({install})"]


def test_a_gpu_without_a_working_driver() -> None:
    """As where Triton finds no C compiler: no kernel of Triton's can be launched, by anybody."""
    answers = run(
        """
        import triton
        from twinkle import triton_programs
        from twinkle.kernel.ops import triton_support

        def broken(self):
            raise RuntimeError("Failed to find C compiler.")

        triton_programs.platform_of = lambda kind: "a platform" if kind == "cuda" else None
        type(triton.runtime.driver).active = property(broken)
        answers["own"], answers["liger"] = str(triton_support.available()[1]), ask()
        """
    )
    why = "asking Triton for its cuda driver raised RuntimeError: Failed to find C compiler."
    assert answers == {"own": why, "liger": ["no-driver", why]}


def test_an_interpreter_with_gaps_is_found_by_running_a_kernel_and_moe_is_not_tuned_by_surprise() -> None:
    """Triton 3.6's interpreter raises on Liger's kernels; mended but for bf16, it would give wrong numbers."""
    answers = run(
        """
        answers["as it is"] = ask()

        from triton.runtime.interpreter import InterpreterBuilder
        from twinkle.kernel.ops import liger_support
        from tests.support import triton_interpreter

        # Liger took libdevice's stubs by name when it was imported.
        for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
            del sys.modules[name]
        whole = InterpreterBuilder.binary_op
        triton_interpreter.install()
        mended, InterpreterBuilder.binary_op = InterpreterBuilder.binary_op, whole
        liger_support._disproved.cache_clear()
        answers["bf16"] = ask()
        InterpreterBuilder.binary_op = mended
        liger_support._disproved.cache_clear()
        answers["mended"] = ask()

        from twinkle.kernel.ops.moe import liger as experts
        answers["tuning"] = str(experts._tuning_reason())
        """,
        interpret=True,
    )
    assert answers["as it is"][0] == "interpreter"
    assert "running Liger's kernels in Triton's interpreter raised" in answers["as it is"][1]
    assert answers["bf16"] == [
        "interpreter",
        "Triton's interpreter computes wrong numbers in bf16 (run on a GPU, or with a newer Triton)",
    ]
    assert answers["mended"] is None
    assert "LIGER_FUSED_MOE_AUTOTUNE=0 before liger_kernel is imported" in answers["tuning"]
