"""The training: a Qwen3 of about three million parameters, whose tokens are bytes, and AdamW."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinkle.kernel.exact import exact_copy, exactly

HIDDEN = 288
SETTINGS: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,  # no other axis of a parameter has this length, see reordered()
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "use_cache": False,
}
BATCH, LENGTH = 8, 64
# Settings under which rounding stays rounding. With transformers' initializer_range of 0.02, a shorter warm-up or no
# clipping the loss falls less, and single steps multiply tiny differences by a hundred: then the curves of two
# summation orders of one and the same model come apart, and comparing curves would say nothing.
LEARNING_RATE, WARM_UP, CLIP = 1e-3, 10, 1.0
SEED = 0


def new_model(device: str) -> Any:
    """A ``Qwen3ForCausalLM`` in fp32 with the same weights for every call, in training mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model = Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=LENGTH, **SETTINGS))
    return model.to(device).train()


def batches(text: bytes, device: str) -> Iterator[torch.Tensor]:
    """Windows of the text as token ids, int64 ``[BATCH, LENGTH]``; the same for every call, endless.

    Raises:
        ValueError: the text is shorter than one window.
    """
    if len(text) < LENGTH:
        raise ValueError(f"the text has {len(text)} bytes, a window needs {LENGTH}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(0, len(data) - LENGTH + 1, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + LENGTH] for start in starts]).long().to(device)


def forward(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss (mean cross-entropy of the next token, nats) and logits ``[BATCH, LENGTH, 256]``, in the model's dtype."""
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


class Order:
    """One of the orders in which the same sums can be computed.

    Order 0 leaves everything as it is. Every other one permutes the channels of the residual stream, in all weights
    alike, and the rows of each batch. In exact arithmetic nothing changes: same loss, same updates. In floating point
    every matrix product, norm and gradient is summed in another order, so the difference between two orders is what
    rounding alone does to this training.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        generator = torch.Generator().manual_seed(number)
        self.channels = torch.randperm(HIDDEN, generator=generator)
        self.rows = torch.randperm(BATCH, generator=generator)

    def of_model(self, model: nn.Module) -> nn.Module:
        """Permutes a model's weights in place; returns it."""
        if self.number:
            for parameter in model.parameters():
                parameter.data = self._reordered(parameter.data, self.channels)
        return model

    def of_batch(self, ids: torch.Tensor) -> torch.Tensor:
        """A batch with its rows permuted."""
        return ids[self.rows.to(ids.device)] if self.number else ids

    def back(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A result of :func:`results` brought back to order 0, so that it can be compared."""
        if not self.number:
            return tensor
        if name == "logits":
            return tensor[self.rows.argsort().to(tensor.device)]
        return self._reordered(tensor, self.channels.argsort())

    @staticmethod
    def _reordered(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        for axis, length in enumerate(tensor.shape):
            if length == HIDDEN:
                tensor = tensor.index_select(axis, order.to(tensor.device))
        return tensor


def exact_results(ids: torch.Tensor, order: Order | None = None) -> dict[str, torch.Tensor]:
    """The :func:`results` of the same model in fp64, on the CPU; with an order, of its weights and ``ids`` in that."""
    order = order or Order(0)
    model = order.of_model(exact_copy(new_model("cpu")))
    with exactly(model):
        return results(model, order.of_batch(ids.cpu()))


def results(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss, logits and the gradient of every parameter, of one forward and backward; clears the gradients."""
    loss, logits = forward(model, ids)
    loss.backward()
    found = {"loss": loss.detach(), "logits": logits.detach()}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = parameter.grad.detach().clone()
    model.zero_grad(set_to_none=True)
    return found


class Training:
    """A run: a model, its optimizer and its batches."""

    def __init__(self, model: Any, text: bytes, device: str, order: Order | None = None) -> None:
        self.model = model
        self.order = order or Order(0)
        self._batches = batches(text, device)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))

    def step(self) -> tuple[float, float]:
        """One step; the loss before it, and how many seconds it took."""
        ids = self.order.of_batch(next(self._batches))
        start = time.perf_counter()
        loss, _ = forward(self.model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # waits for the device
        self._schedule.step()
        return value, time.perf_counter() - start
