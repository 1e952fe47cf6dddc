"""The simulated device itself: without it being a device of its own, what is tested on it would prove nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import simulated_device
from tests.aten.conftest import DEVICE, INTERPRETED, ROOT, SIMULATED
from twinkle import presets
from twinkle.aten import Profile, catalog
from twinkle.aten.harness.cases import cases
from twinkle.aten.serving import Serving
from twinkle.aten.spec import OperatorSpec, Semantics
from twinkle.platforms import platform_of

pytestmark = pytest.mark.skipif(not SIMULATED, reason="this process has no simulated device")


def test_it_is_a_device_of_its_own() -> None:
    x = torch.randn(3, 4, device=DEVICE)
    assert x.device == torch.device(DEVICE, 0) and not x.is_cpu
    assert str(torch.accelerator.current_accelerator()) == DEVICE
    found = platform_of(DEVICE)
    assert found is not None and found.name == {"npu": "ascend", "mlu": "cambricon"}[DEVICE]


def test_one_name_per_process() -> None:
    simulated_device.load(DEVICE)
    other = "mlu" if DEVICE == "npu" else "npu"
    with pytest.raises(RuntimeError, match=f"has the device {DEVICE} already; {other} needs a process of its own"):
        simulated_device.load(other)


def test_copies_resolve_pending_conjugation_and_negation() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    x = z.to(DEVICE)
    assert torch.equal(x.conj().cpu(), z.conj())
    assert torch.equal(x.conj().clone().cpu(), z.conj().resolve_conj())
    assert torch.equal(torch._neg_view(x).clone().cpu(), -z)


def test_a_model_computes_what_it_computes_on_the_cpu() -> None:
    """The loss to the bit; some gradients by other formulas, which PyTorch has for out-of-tree devices."""

    def train(device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = presets.build("qwen3", device=device, attn_implementation="eager")
        loss = presets.loss(model(**presets.inputs(model, device=device)))
        loss.backward()
        return loss.detach().cpu(), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}

    (loss, gradients), (expected, expected_gradients) = train(DEVICE), train("cpu")
    assert torch.equal(loss, expected)
    assert gradients.keys() == expected_gradients.keys()
    torch.testing.assert_close(gradients, expected_gradients)


def test_no_kernel_takes_tensors_of_two_devices(spec: OperatorSpec, chip: Profile) -> None:
    """Whichever of an operator's tensors is the odd one. What reads no element takes any."""
    for each in spec.parts:
        if Semantics.METADATA in each.semantics:
            continue
        values = next(case.values(chip.device) for case in cases(each, seeds=1))
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        for place in places if len(places) > 1 else ():
            mixed = [value.cpu() if i == place else value for i, value in enumerate(values)]
            for level in each.kernels:
                assert Serving(each, chip.found, level).refusal(mixed) is not None, (each, level, place)


def test_indices_on_the_other_device_are_pytorchs(chip: Profile) -> None:
    """Found by many random calls: the table on the CPU, so that only the derivative is called on the device."""
    table = torch.randn(5, 3, requires_grad=True)
    with catalog.operator("embedding").register_a1(platform=chip.platform) as registration:
        torch.nn.functional.embedding(torch.tensor(4, device=DEVICE), table).sum().backward()
    assert registration.derivative is not None and registration.derivative.counts.fallbacks == {"device": 1}
    assert table.grad is not None and table.grad.tolist() == [[0.0] * 3] * 4 + [[1.0] * 3]


@pytest.mark.multiprocess
@pytest.mark.skipif(DEVICE != "npu" or INTERPRETED, reason="the program asks for an Ascend NPU")
def test_the_packaging_program_on_an_ascend_npu(environment: dict[str, str], tmp_path: Path) -> None:
    """Both ways in through execution, and all operators at once in a model, as on the chip.

    By one operator of each kind: an allocation, one with a derivative of PyTorch's own, a composite one, one whose
    derivative has a kernel too, one that is never registered. How they are imported doesn't depend on the device.
    """
    kinds = ["empty_strided", "clone", "contiguous", "embedding", "empty"]
    command = [sys.executable, ROOT / "ops" / "test_packaging.py", "--npu-e2e", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, together, cells = done.stdout.splitlines()
    assert together.startswith("all at once in a model: passed")
    assert cells == f"{6 * len(kinds)} cells, all passed"
