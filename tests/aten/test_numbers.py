"""A number in a tensor's place, ``x * 0.5``: PyTorch's own kernel serves it, and gets what PyTorch makes of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.aten.conftest import DEVICE, INTERPRETED
from twinkle.aten import Profile, catalog
from twinkle.aten.harness import op_level
from twinkle.aten.harness.compare import same_bits
from twinkle.aten.harness.unlisted import number_calls
from twinkle.aten.numbers import NUMBERS, as_tensor
from twinkle.aten.spec import OperatorSpec

MUL = "mul.Tensor(Tensor self, Tensor other) -> Tensor"
SUB = "sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
VALUES: tuple[Any, ...] = (True, 3, -1, 2**53 + 1, 2.5, 0.1, -0.0, 1j, 0.1 - 2j)

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="no kernel of ours takes such a call"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


def results(work: Callable[[torch.Tensor, Any], torch.Tensor], shape: tuple[int, ...]) -> list[Any]:
    found: list[Any] = []
    for dtype, number in itertools.product(DTYPES, VALUES):
        x = torch.full(shape, 2, dtype=dtype).to(DEVICE)
        try:
            found.append(work(x, number))
        except Exception as error:
            found.append(type(error))
    return found


def same(one: Any, other: Any) -> bool:
    return same_bits(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one is other


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
@pytest.mark.parametrize("schema", [MUL, SUB])
def test_results_have_the_dtypes_and_bits_they_have_natively(
    schema: str, shape: tuple[int, ...], newly_made: Callable[[str], OperatorSpec], chip: Profile
) -> None:
    spec = newly_made(schema)
    operator = getattr(torch, spec.name)
    native = results(operator, shape)
    with spec.register_a1(platform=chip.platform) as registration:
        ours = results(operator, shape)
    calls = list(itertools.product(DTYPES, VALUES))
    assert [call for call, a, b in zip(calls, ours, native, strict=True) if not same(a, b)] == []
    # PyTorch has no difference of booleans; nor, from 2.14 on, of bcomplex32, bfloat16 with a complex number.
    lacking = 2 if spec.name == "sub" and hasattr(torch, "bcomplex32") else 0
    assert sum(isinstance(one, torch.Tensor) for one in native) >= 80 - lacking
    assert set(registration.counts.fallbacks) == {"number"} and registration.counts.kernel == 0


def test_a_scaled_loss_and_its_gradient(newly_made: Callable[[str], OperatorSpec], chip: Profile) -> None:
    def work() -> list[Any]:
        w = torch.full((3,), 0.3, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        losses = [(w.float() ** 2).mean() * 0.1, w.sum() * 0.1]
        return [*losses, *(torch.autograd.grad(loss, w)[0] for loss in losses)]

    native = work()
    with newly_made(MUL).register_a1(platform=chip.platform) as registration:
        ours = work()
    assert all(map(same, ours, native)) and registration.counts.fallbacks["number"] >= 2


CONTEXTS: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "another default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_wherever_the_call_comes_from(context: str, newly_made: Callable[[str], OperatorSpec], chip: Profile) -> None:
    x = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    with newly_made(MUL).register_a1(platform=chip.platform), CONTEXTS[context]():
        assert (x * 0.1).dtype is torch.bfloat16


def test_within_transforms(newly_made: Callable[[str], OperatorSpec], chip: Profile) -> None:
    """Where the kernel stands at the backend key. What a gradient's transform makes of a number holds no data, so that
    PyTorch itself fails to hand it to any Python code at an autograd key."""
    x = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    with newly_made(MUL).register_a1(platform=chip.platform) as registration:
        assert torch.vmap(lambda t: t * 0.1)(x[None]).dtype is torch.bfloat16
        if registration.keys == (chip.found.dispatch_key,):
            assert torch.func.grad(lambda t: t * 0.1 * 2)(x).dtype is torch.bfloat16
        assert sum(registration.counts.fallbacks.values()) >= 1 and registration.counts.kernel == 0


@pytest.mark.parametrize("number", [True, 3, 2**62, 0.1, 0.1 - 2j])
def test_what_pytorch_makes_of_a_number(number: Any) -> None:
    made = as_tensor(number)
    assert (made.dtype, made.shape, made.item()) == (NUMBERS[type(number)], (), number)
    assert as_tensor(type(number)(0)).item() == 0 and made.item() == number, "each has memory of its own"
    for dtype in DTYPES:
        x = torch.ones((), dtype=dtype)
        assert torch.result_type(x, made) is torch.result_type(x, number)


@pytest.mark.skipif(DEVICE != "cpu", reason="one device is enough")
def test_the_op_level_calls_with_numbers(monkeypatch: pytest.MonkeyPatch, chip: Profile) -> None:
    copy = catalog.operator("copy_")
    names = [name for name, _ in number_calls(copy, torch.device("cpu"))]
    assert len(names) == 24 and f"{names[0].partition(',')[0]}, src the number 0.1 beside int64" in names
    assert list(number_calls(catalog.operator("clone"), torch.device("cpu"))) == []
    monkeypatch.setattr("twinkle.aten.arguments.as_tensor", lambda number: torch.tensor(0.0))
    problems = op_level.run(copy, chip).problems
    assert problems and all("src the number" in problem for problem in problems)
