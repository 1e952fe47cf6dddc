"""Head and cross-entropy in one, against what else there is: ``python -m benchmarks.loss --json FILE``.

Times, peak memory, and how far the weight's gradient is from one that was summed up in fp64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.program import TIME_AND_MEMORY, progress, sized, time_and_memory, timed_rounds
from twinkle.bench.results import ORIGINAL, Result, Run
from twinkle.layout import plain, table, width_of_terminal
from twinkle.loss import linear_cross_entropy
from twinkle.naming import dtype_name

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SIZES = {"accelerator": (8192, 2048, 151936), "cpu": (512, 256, 8192), "quick": (32, 16, 100)}
"""Tokens, hidden size, classes."""


def all_logits(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What transformers does."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def liger_fused(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As Liger's patches call it: the weight's gradient is summed up in the weight's dtype."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]


def liger_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Liger's cross-entropy of all logits."""
    from liger_kernel.ops import LigerCrossEntropyFunction

    function = LigerCrossEntropyFunction.apply
    return function(F.linear(x, weight), target, None, -100, 0.0, 0.0, "mean", None, False)[0]


def ours(**options: Any) -> Callable[[], Loss]:
    return lambda: functools.partial(linear_cross_entropy, **options)


CANDIDATES: dict[str, Callable[[], Loss]] = {
    ORIGINAL: lambda: all_logits,
    "twinkle": ours(),
    "twinkle low memory": ours(accumulate="weight"),
    "twinkle, formula": ours(backend="torch"),
    "twinkle, 4 chunks": ours(chunk=0.25),
    "twinkle, 32 chunks": ours(chunk=1 / 32),
    "twinkle low memory, 32 chunks": ours(accumulate="weight", chunk=1 / 32),
    "liger": lambda: liger_fused,
    "liger, all logits": lambda: liger_loss,
    "compile": lambda: torch.compile(all_logits),
}
"""A chunk is a share of the tokens here."""


@dataclass(frozen=True)
class Inputs:
    """Hidden states ``[T, H]`` and weight ``[V, H]``, which get gradients, and classes ``[T]``."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor

    @classmethod
    def random(cls, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Inputs:
        tokens, hidden, classes = sizes
        generator = torch.Generator(device).manual_seed(0)
        random = functools.partial(torch.randn, generator=generator, device=device)
        x, weight = random(tokens, hidden).to(dtype), (random(classes, hidden) / hidden**0.5).to(dtype)
        target = torch.randint(classes, (tokens,), generator=generator, device=device)
        target[::7] = -100
        return cls(x.requires_grad_(), weight.requires_grad_(), target)

    def step(self, loss: Loss) -> torch.Tensor:
        """Forward and backward; the loss."""
        self.x.grad = self.weight.grad = None
        value = loss(self.x, self.weight, self.target)
        value.backward()
        return value.detach()


def exact_gradient(inputs: Inputs, rows: int = 512) -> torch.Tensor:
    """The weight's gradient ``[rows, H]`` of the first classes and the last ones, products and sums in fp64."""
    x, weight, target = (t.detach() for t in (inputs.x, inputs.weight, inputs.target))
    counts = target != -100
    chosen = torch.cat([torch.arange(rows // 2), torch.arange(len(weight) - rows // 2, len(weight))]).to(x.device)
    total = torch.zeros(len(chosen), x.shape[1], dtype=torch.float64, device=x.device)
    for part in torch.arange(len(x), device=x.device).split(1024):
        logits = F.linear(x[part], weight).double()  # rounded as everybody's are
        shares = logits.softmax(-1)[:, chosen]
        shares -= (target[part][:, None] == chosen).double()
        total += (shares * counts[part][:, None]).t() @ x[part].double()
    return total / counts.sum()


def measure(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], rounds: int) -> Run:
    """A row for each candidate."""
    inputs = Inputs.random(sizes, dtype, device)
    rows = min(512, sizes[2] // 2 * 2)
    exact = exact_gradient(inputs, rows)
    run = Run("loss", device, {"rounds": rounds})
    for number, (who, make) in enumerate(CANDIDATES.items()):
        progress(number, len(CANDIDATES), who)
        fields: dict[str, Any] = {}
        try:
            loss = make()
            chunk = getattr(loss, "keywords", {}).get("chunk")
            if chunk:
                loss = functools.partial(loss, chunk=max(1, round(chunk * sizes[0])))
            figures = {"loss": round(float(inputs.step(loss)), 6)}
            found = inputs.weight.grad
            assert found is not None
            found = torch.cat([found[: rows // 2], found[-(rows // 2) :]]).double()
            figures["dw_error"] = float((found - exact).norm() / exact.norm())
            inputs.x.grad = inputs.weight.grad = None
            fields = timed_rounds(functools.partial(inputs.step, loss), device, rounds)
            fields["figures"] = figures | fields["figures"]
        except Exception as error:  # e.g. Liger without a GPU, or too little memory: the others' figures stay
            fields = {"note": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        inputs.x.grad = inputs.weight.grad = None
        shape = "x".join(map(str, sizes))
        run.results.append(Result("loss/linear_cross_entropy/fb", who, shape, dtype_name(dtype), **fields))
    return run


def report(run: Run) -> str:
    """A line per candidate."""
    lines: list[tuple[str, ...]] = []
    for row in run.results:
        if row.ms:
            lines.append((row.who, *time_and_memory(row), f"{row.figures['dw_error']:.2g}"))
    shown = plain(table(("who", *TIME_AND_MEMORY, "error of dW"), lines, width_of_terminal()))
    return "\n".join([shown, *(f"{row.who}: {row.note}" for row in run.results if row.note)])


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    return sized("loss", "Times head and cross-entropy, forward and backward.", SIZES, measure, report, argv)


if __name__ == "__main__":
    main()
