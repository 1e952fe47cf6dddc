"""An op whose backend is to be broken in every way, on the toy model's norms."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support import toys
from twinkle.kernel import KernelChoice
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.undo import patch

TOYS = "tests.support.toys"
NORM, ROPE = f"{TOYS}.ToyNorm.forward", f"{TOYS}.apply_rope"


class Doubled(nn.Module):
    """A norm kernel that can be told from the original."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Raising(nn.Module):
    """A norm kernel that fails when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")


def boom(*args: Any) -> Any:
    raise RuntimeError("boom")


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt


def here() -> tuple[bool, None]:
    return True, None


def loads(layer: Any) -> Callable[..., Any]:
    return lambda target: layer


def register(backend: KernelImpl, installer: Any = None) -> None:
    """Registers op ``fragile`` with the backend to test and a good one behind it."""
    good = KernelImpl(loads(Doubled), here)
    register_op("fragile", implementations={"bad": backend, "good": good}, installer=installer)


def fragile(*backends: str, installer: Any = None) -> KernelChoice:
    return KernelChoice("fragile", backends or ("bad",), installer)


def loopback(op: str) -> KernelChoice:
    return KernelChoice(op, ("loopback",))


def norms(model: nn.Module) -> list[nn.Module]:
    """The toy model's four norms."""
    return [module for module in model.modules() if isinstance(module, toys.ToyNorm)]


def patching(
    at: int | None = None, error: BaseException | None = None, outside: Callable[[nn.Module], None] | None = None
) -> Callable[..., int]:
    """An installer that patches a process-wide function and the norms' forwards, and fails at one of them."""

    def install(model: nn.Module, target: Any, impl: Any) -> int:
        patch(toys, "turn", lambda x: x)
        for position, module in enumerate(norms(model)):
            if position == at:
                if outside is not None:
                    outside(model)
                raise error or RuntimeError("out of luck")
            patch(module, "forward", types.MethodType(impl.forward, module))
        return len(norms(model))

    return install
