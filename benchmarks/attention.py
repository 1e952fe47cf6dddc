"""Attention under masks, by each candidate: ``python -m benchmarks.attention --json FILE``.

What flex attention has to know of a mask it finds out before the clock runs: in a model that is once for all layers.
The last line is what ``twinkle.kernel.ops.sdpa_attention.flex.QUERIES`` should say of this type of device.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.program import TIME_AND_MEMORY, progress, sized, time_and_memory, timed_rounds
from benchmarks.verdict import SLOWER
from twinkle.bench.ops import wrong
from twinkle.bench.results import ORIGINAL, Result, Run, medians
from twinkle.kernel.ops.sdpa_attention import flex
from twinkle.kernel.ops.sdpa_attention import torch as backend
from twinkle.layout import plain, table, width_of_terminal
from twinkle.naming import dtype_name

EAGER, FUSED, FLEX = "eager", "torch", "flex"

MOST_SCORES = 2**31
"""Eager attention, which holds them several times over, is left out beyond that many."""


@dataclass(frozen=True)
class Sizes:
    """Of one row in a layer of Qwen3-8B by default."""

    length: int = 8192
    heads: int = 32
    groups: int = 4
    channels: int = 128
    window: int = 1024
    documents: int = 16

    def __str__(self) -> str:
        return f"{self.length}x{self.heads}x{self.channels}"


SIZES = {
    "accelerator": [Sizes(1024), Sizes(2048), Sizes(4096), Sizes(8192)],
    "cpu": [Sizes(512, 4, 2, 32, 128, 4)],
    "quick": [Sizes(160, 4, 2, 16, 32, 4)],
}


# --- masks, as transformers' are: boolean, [1, 1, length, length] -----------------------------------------------------


def _padded(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Causal, an eighth of the row is padding behind."""
    at = torch.arange(sizes.length, device=device)
    return (at[:, None] >= at) & (at < sizes.length - sizes.length // 8)


def _window(sizes: Sizes, device: torch.device) -> torch.Tensor:
    at = torch.arange(sizes.length, device=device)
    return (at[:, None] >= at) & (at[:, None] - at < sizes.window)


def _packed(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Causal, in documents of random lengths."""
    ends = torch.randperm(sizes.length - 1, generator=torch.Generator().manual_seed(0))[: sizes.documents - 1] + 1
    at = torch.arange(sizes.length, device=device)
    document = torch.bucketize(at, ends.sort().values.to(device), right=True)
    return (at[:, None] >= at) & (document[:, None] == document)


def _prefix(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Causal behind a prefix, half of the row, that sees itself whole: a picture before its text."""
    at = torch.arange(sizes.length, device=device)
    return (at[:, None] >= at) | (torch.maximum(at[:, None], at) < sizes.length // 2)


def _everything(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """A mask that keeps all, of which nothing can be skipped."""
    return torch.ones(sizes.length, sizes.length, dtype=torch.bool, device=device)


MASKS: dict[str, Callable[[Sizes, torch.device], torch.Tensor]] = {
    "padded": _padded,
    "sliding window": _window,
    "packed documents": _packed,
    "prefix": _prefix,
    "nothing masked": _everything,
}

# --- candidates -------------------------------------------------------------------------------------------------------


def candidates() -> dict[str, Callable[..., Any]]:
    """Functions with the signature of transformers' attention functions."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

    return {
        ORIGINAL: sdpa_attention_forward,
        EAGER: eager_attention_forward,
        FUSED: backend.attention_by(lambda given, dropout: False),
        FLEX: backend.attention_by(flex.can),
    }


def inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value, that want gradients, in the layout that projections give them; the output's gradient."""
    torch.manual_seed(0)
    heads = (sizes.heads, *[sizes.heads // sizes.groups] * 2, sizes.heads)
    made = [torch.randn(1, sizes.length, number, sizes.channels, device=device).to(dtype) for number in heads]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in made[:3]], made[3]


def passes(who: str, sizes: Sizes, kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Any]]:
    """``f``: forward without gradients, gives the output; ``fb``: forward and backward, gives the gradients."""
    function, mask = candidates()[who], MASKS[kind](sizes, device)[None, None]
    tensors, seed = inputs(sizes, dtype, device)
    module = types.SimpleNamespace(is_causal=True, num_key_value_groups=sizes.groups, training=True)
    if who == EAGER:  # transformers makes it once for all layers
        mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)

    def call() -> torch.Tensor:
        out: torch.Tensor = function(module, *tensors, mask, scaling=sizes.channels**-0.5)[0]
        return out

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return call()

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(), tensors, seed)

    return {"f": forward, "fb": both}


def measure(device: torch.device, dtype: torch.dtype, sizes: Sequence[Sizes], rounds: int) -> Run:
    """A row for each size, mask, candidate and pass."""
    run = Run("attention", device, {"rounds": rounds})
    steps = [(size, kind, who) for size in sizes for kind in MASKS for who in candidates()]
    expected: dict[str, Any] = {}
    for number, (size, kind, who) in enumerate(steps):
        progress(number, len(steps), f"{size}, {kind}: {who}")
        timed = passes(who, size, kind, dtype, device)
        note = _why_not(who, size, device)
        if who == ORIGINAL:
            expected = {name: step() for name, step in timed.items()}
        elif note is None:
            note = wrong(timed["f"](), expected["f"]) or wrong(timed["fb"](), expected["fb"])
        for name, step in timed.items():
            fields = timed_rounds(step, device, rounds) if note is None else {"note": note}
            if who == FLEX and note is None:
                blocks = flex.blocks_of(MASKS[kind](size, device)[None, None])
                fields["figures"]["skipped"] = round(blocks.skipped, 3)
            shape, number_type = f"{size}, {kind}", dtype_name(dtype)
            run.results.append(Result(f"attention/{kind}/{name}", who, shape, number_type, **fields))
    return run


def _why_not(who: str, size: Sizes, device: torch.device) -> str | None:
    if who == EAGER and size.heads * size.length**2 > MOST_SCORES:
        return "its scores would fill the memory"
    return "flex attention has no backward there" if who == FLEX and device.type == "cpu" else None


def faster_from(results: Iterable[Result]) -> int | None:
    """From how many queries flex attention is faster than PyTorch's other function and transformers', in every case.

    Those of masks of which too little can be skipped are no cases. None where it isn't even with the most queries that
    were measured.
    """
    by_length: dict[int, list[float]] = {}
    for (_, shape, _), rows in medians(results).items():
        if FLEX in rows and rows[FLEX].figures["skipped"] >= flex.SKIPPED:
            times = {who: row.ms["p50"] for who, row in rows.items() if row.ms}
            ratio = times[FLEX] / min(times.get(who, math.inf) for who in (ORIGINAL, FUSED))
            by_length.setdefault(int(shape.partition("x")[0]), []).append(ratio)
    found = None
    for length in sorted(by_length, reverse=True):
        if max(by_length[length]) > SLOWER:
            break
        found = length
    return found


def report(run: Run) -> str:
    """A line per size, mask, candidate and pass, and what they decide."""
    lines: list[tuple[str, ...]] = []
    for row in run.results:
        if row.ms:
            lines.append((row.shape, row.case.rpartition("/")[2], row.who, *time_and_memory(row)))
    header = ("sizes", "pass", "who", *TIME_AND_MEMORY)
    notes = dict.fromkeys(f"{row.who}, {row.shape}: {row.note}" for row in run.results if row.note)
    least = faster_from(run.results)
    verdict = "nothing" if least is None else f"{least}"
    return "\n".join([plain(table(header, lines, width_of_terminal())), *notes, f"QUERIES: {verdict}"])


def main(argv: list[str] | None = None) -> Run:
    """Runs the program; returns what it measured."""
    return sized("attention", "Times attention under masks.", SIZES, measure, report, argv)


if __name__ == "__main__":
    main()
