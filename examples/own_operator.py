"""A kernel of your own under an operator of PyTorch, in one file: aten::mish on a CPU.

python examples/own_operator.py

"twinkle-kernel ops new mish" makes a package with all that belongs to one: reference, inputs, three levels of checks.
"""

from __future__ import annotations

from typing import Any

import torch

from twinkle.aten import Home, Kernel, OperatorSpec, Semantics
from twinkle.aten.conditions import floating, tensor
from twinkle.aten.gradients import by_autograd


def mish(self: torch.Tensor) -> torch.Tensor:
    """The kernel, with the operator's signature; it may call any operator but its own."""
    return self * torch.tanh(torch.nn.functional.softplus(self))


def mish_pullback(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient where the operator's own doesn't serve."""
    return by_autograd(mish, grad, arguments)


SPEC = OperatorSpec(
    schema="mish(Tensor self) -> Tensor",
    home=Home.of(__name__, __file__),
    semantics=Semantics.ROUNDS,  # the last bits may differ from PyTorch's
    kernels={"torch": Kernel("own_operator:mish")},
    conditions=(*tensor(0, "self", lambda t: (t,)), floating(0, lambda t: (t,))),  # other calls stay PyTorch's
    pullback="own_operator:mish_pullback",
    reference="own_operator:mish",
)


def main() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.nn.functional.mish(x)
    with SPEC.register_a1(platform="cpu") as registration:
        result = torch.nn.functional.mish(x)  # whoever calls it, in any model
        torch.nn.functional.mish(x[:0])  # without elements: not the kernel's
        print(registration.counts)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    assert registration.counts.kernel == 1 and registration.closed


if __name__ == "__main__":
    main()
