"""A user's function mode, as ``torch.device(...)`` is one as a context, sees and changes no call of a kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.aten.conftest import DEVICE
from tests.aten.uses import USES
from twinkle.aten import Profile, catalog, strided
from twinkle.aten.spec import OperatorSpec


class Seen(TorchFunctionMode):
    """Notes the calls that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", USES)
def test_a_mode_sees_what_it_sees_natively(name: str, chip: Profile) -> None:
    """Forward and backward."""
    spec = catalog.operator(name)

    def work() -> tuple[list[str], list[str]]:
        x = torch.randn(4, 3, device=DEVICE, requires_grad=True)
        with Seen() as forward:
            result = USES[name](x)
        with Seen() as backward:
            (result**2).sum().backward()
        return forward.names, backward.names

    native = work()
    with spec.register_a1(platform=chip.platform) as registration:
        ours = work()
    assert ours == native and registration.counts.kernel > 0


def clone_it(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def make_empty(n: int) -> torch.Tensor:
    return torch.empty_strided([n], [1])


def attend(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def scripted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function whose calls go past modes, to the dispatcher at once, while they are on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "another default device": lambda: torch.device("meta"),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_first_call_of_all_decides_nothing(context: str, clone: OperatorSpec, chip: Profile) -> None:
    """What kernels keep for later calls doesn't depend on where the first comes from."""
    strided._true.cache_clear()
    call = scripted(clone_it)
    x = torch.randn(3, 4, device=DEVICE)
    with clone.register_a1(platform=chip.platform) as registration:
        with CONTEXTS[context]():
            assert torch.equal(call(x), x)
        leaf = x.clone().requires_grad_()
        leaf.clone().sum().backward()
        assert leaf.grad is not None and leaf.grad.device.type == DEVICE and leaf.grad.all()
        assert registration.counts.kernel >= 3


@pytest.mark.skipif(DEVICE != "cpu", reason="without a device it is the CPU")
def test_no_device_is_the_device_that_it_is_natively(chip: Profile) -> None:
    spec, call = catalog.operator("empty_strided"), scripted(make_empty)
    with torch.device("meta"):
        native = call(3).device
        with spec.register_a1(platform=chip.platform) as registration:
            assert call(3).device == native and registration.counts.kernel == 1
            assert torch.empty_strided((2,), (1,)).device.type == "meta"
        assert spec.aten((2,), (1,)).device.type == "meta"
    assert spec.aten((2,), (1,)).device.type == "cpu"


def test_hooks_on_what_is_saved_are_the_users(chip: Profile) -> None:
    """They run within a call of ours, and are within the mode all the same."""
    call = scripted(attend)
    x = torch.randn(1, 2, 4, 8, device=DEVICE, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        torch.zeros(1)
        return tensor

    with catalog.operator("scaled_dot_product_attention").register_a1(platform=chip.platform) as registration:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Seen() as seen:
            call(x)
        assert registration.counts.kernel == 1
    assert len(seen.names) >= 1 and set(seen.names) == {"zeros"}
