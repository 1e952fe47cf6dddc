"""A mixture-of-experts block, router included, by each candidate: ``python -m benchmarks.moe --json FILE``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.program import TIME_AND_MEMORY, progress, sized, time_and_memory, timed_rounds
from twinkle.bench.ops import wrong
from twinkle.bench.results import ORIGINAL, Result, Run
from twinkle.kernel import KernelChoice, kernelize
from twinkle.kernel.ops.worthwhile import every_size
from twinkle.kernel.report import report as report_on
from twinkle.kernel.undo import unkernelize
from twinkle.layout import plain, table, width_of_terminal
from twinkle.naming import dtype_name

_MODULE = "transformers.models.qwen3_moe.modeling_qwen3_moe"
EXPERTS, ROUTER = f"{_MODULE}.Qwen3MoeExperts.forward", f"{_MODULE}.Qwen3MoeTopKRouter.forward"

CANDIDATES: dict[str, dict[str, KernelChoice]] = {
    ORIGINAL: {},
    "triton": {EXPERTS: KernelChoice("moe_experts", ("triton",)), ROUTER: KernelChoice("moe_router", ("triton",))},
    "triton, experts alone": {EXPERTS: KernelChoice("moe_experts", ("triton",))},
    "torch": {EXPERTS: KernelChoice("moe_experts", ("torch",))},
    "liger": {EXPERTS: KernelChoice("moe_experts", ("liger",))},
}
"""Who computes a block: what is put into it."""


@dataclass(frozen=True)
class Sizes:
    """Of Qwen3-30B-A3B by default."""

    tokens: int = 8192
    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8
    dtype: torch.dtype | None = None
    """The machine's usual one when None."""

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}, {self.experts} experts of {self.width}, top {self.top_k}"


MIXTRAL = Sizes(tokens=4096, hidden=4096, width=14336, experts=8, top_k=2)
"""Few and wide experts, of the shape of Mixtral-8x7B."""

SIZES = {
    "accelerator": [
        Sizes(),
        Sizes(tokens=512),
        Sizes(tokens=16),
        MIXTRAL,
        *(Sizes(tokens=tokens, dtype=dtype) for dtype in (torch.float16, torch.float32) for tokens in (8192, 16)),
    ],
    "cpu": [Sizes(512, 256, 128, 16, 4)],
    "quick": [Sizes(16, 32, 24, 4, 2)],
}


def block(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Any:
    """A block of transformers with random weights, in training mode."""
    from transformers.models.qwen3_moe import configuration_qwen3_moe, modeling_qwen3_moe

    config = configuration_qwen3_moe.Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"  # what transformers chooses by itself
    torch.manual_seed(0)
    with torch.device(device):
        made = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config).to(dtype).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.02)
    return made


def passes(made: Any, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """``f``: forward without gradients; ``fb``: forward and backward. Each gives the output."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return made(x)

    def both() -> torch.Tensor:
        made.zero_grad(set_to_none=True)
        x.grad = None
        out: torch.Tensor = made(x)
        out.backward(torch.ones_like(out))
        return out.detach()

    return {"f": forward, "fb": both}


def measure(device: torch.device, usual: torch.dtype, sizes: Sequence[Sizes], rounds: int) -> Run:
    """A row for each size, candidate and pass."""
    run = Run("moe", device, {"rounds": rounds})
    steps = [(size, who) for size in sizes for who in CANDIDATES]
    for number, (size, who) in enumerate(steps):
        progress(number, len(steps), f"{size}: {who}")
        dtype = size.dtype or usual
        if who == ORIGINAL:
            made = block(size, dtype, device)
            x = torch.randn(1, size.tokens, size.hidden, device=device).to(dtype).requires_grad_()
            expected = passes(made, x)["f"]()
        else:
            kernelize(made, CANDIDATES[who])
        note = None if who == ORIGINAL else _why_not(made) or wrong(passes(made, x)["f"](), expected)
        for name, step in passes(made, x).items():
            fields = timed_rounds(step, device, rounds) if note is None else {"note": note}
            shape = str(size)
            run.results.append(Result(f"moe/qwen3_moe/{name}", who, shape, dtype_name(dtype), **fields))
        unkernelize(made)
    return run


def _why_not(made: Any) -> str | None:
    """Why nothing serves; None when the kernel does."""
    return "; ".join(row.why() for row in report_on(made).rows if row.state != "installed") or None


def report(run: Run) -> str:
    """A line per size, candidate and pass."""
    lines: list[tuple[str, ...]] = []
    for row in run.results:
        if row.ms:
            lines.append((row.shape, row.dtype, row.case.rpartition("/")[2], row.who, *time_and_memory(row)))
    header = ("sizes", "dtype", "pass", "who", *TIME_AND_MEMORY)
    notes = dict.fromkeys(f"{row.who}: {row.note}" for row in run.results if row.note)
    return "\n".join([plain(table(header, lines, width_of_terminal())), *notes])


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    with every_size():
        return sized("moe", "Times a mixture-of-experts block.", SIZES, measure, report, argv)


if __name__ == "__main__":
    main()
