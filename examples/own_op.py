"""An op of your own with one backend, chosen for a model, counted and undone.

python examples/own_op.py

The op is the squared ReLU, an activation that some models have as a module. For a backend of an op that is there
already, register_backend("rms_norm", "mine", KernelImpl(...)) takes the place of register_op. With a reference
(CONTRIBUTING.md, "Adding an op") kernels are verified, and instances told apart by what they compute.
"""

from __future__ import annotations

import torch
from torch import nn

from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.registry import KernelImpl, register_op
from twinkle.kernel.report import report
from twinkle.kernel.undo import unkernelize


class SquaredReLU(nn.Module):
    """What the model has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(torch.relu(x))


class Fast(nn.Module):
    """What replaces it: no ``__init__``, since it takes the place of live instances; the same arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.clamp(min=0)

    @staticmethod
    def accepts_call(module: nn.Module, x: torch.Tensor) -> str | None:
        """A reason leaves that one call to the original."""
        return None if x.is_floating_point() else "not floating"


def available() -> tuple[bool, str | None]:
    """Whether it can run on this machine: device, package, version."""
    return True, None


def accepts(site: object) -> str | None:
    """Whether it fits an instance; in doubt, a reason."""
    return None


def main() -> None:
    register_op("squared_relu", implementations={"fast": KernelImpl(lambda target: Fast, available, accepts)})
    model = nn.Sequential(nn.Linear(8, 8), SquaredReLU(), nn.Linear(8, 8), SquaredReLU())
    x = torch.randn(4, 8)
    before = model(x)
    kernelize(model, {SquaredReLU: KernelChoice("squared_relu", ("fast",))}, strict=True)
    torch.testing.assert_close(model(x), before)
    print(report(model).table())
    unkernelize(model)
    assert torch.equal(model(x), before)


if __name__ == "__main__":
    main()
