"""Lets language models compute their loss without their logits.

Two methods of a model's instances are replaced. The model's ``forward`` says that a loss is wanted, and lets its own
code run; the head's ``forward``, called in it, puts its work off and returns :class:`PendingLogits`, of which
cross-entropy is computed by the kernel. So what the model does around them, shifting labels or averaging over a given
number of tokens, is its own code still.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from twinkle.kernel.calls import as_original, counted, signature_of
from twinkle.kernel.journal import Refused
from twinkle.kernel.ops.causal_lm_loss.pending_logits import Head, PendingLogits
from twinkle.kernel.reclass import own_forward, peel
from twinkle.kernel.undo import active_transaction, patch_method
from twinkle.reasons import Reason

NOTE = "in training, called with labels, the model returns None as its logits; otherwise it is as ever"


def install(model: nn.Module, target: Any, loss: Callable[..., torch.Tensor]) -> int:
    """Makes the language models in ``model`` use a loss of theirs head.

    Args:
        model: holds transformers models whose ``forward`` takes ``labels``.
        loss: see :mod:`twinkle.kernel.ops.causal_lm_loss.reference`.

    Returns:
        the number of language models.

    Raises:
        Refused: there are some, but their heads are no plain linear layers.
    """
    current = active_transaction()
    assert current is not None and current.row is not None
    row = current.row
    refused: list[str] = []
    found = 0
    for name, language_model, path in _language_models(model):
        head = language_model.get_submodule(path)
        reason = _obstacle(language_model, head, path)
        if reason is not None:
            refused.append(f"{name or 'the model'}: {reason}")
            continue
        patch_method(head, "forward", _put_off)
        patch_method(language_model, "forward", functools.partial(_fused, path=path, loss=loss, counts=row.counts))
        found += 1
    if refused and not found:
        raise Refused("; ".join(refused))
    row.notes += [*refused, NOTE] if found else []
    return found


def _language_models(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, model and path of its head, of each transformers model with a loss and a head; the outermost for a head."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:  # then it is no model of theirs
        return
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        if "labels" not in inspect.signature(type(module).forward).parameters:
            continue
        try:
            head = module.get_output_embeddings()
        except (NotImplementedError, AttributeError):
            continue
        path = next((path for path, child in module.named_modules() if child is head and path), None)
        if path is not None and id(head) not in seen:
            seen.add(id(head))
            yield name, module, path


def _obstacle(model: nn.Module, head: nn.Module, path: str) -> Reason | None:
    """Why a language model's loss can't be computed from its head's input."""
    cls = peel(type(head))
    if parametrize.is_parametrized(head):
        return Reason("parametrized", f"the weights of its head {path} are parametrised")
    if cls is not nn.Linear:
        adapted = cls.__module__.partition(".")[0] == "peft"
        hint = "leave the head out of the adapter" if adapted else None
        text = f"its head {path} is a {cls.__module__}.{cls.__qualname__}, no plain torch.nn.Linear"
        return Reason("head", text, hint)
    for module, what in ((model, "it"), (head, f"its head {path}")):
        if own_forward(module) is not None:
            return Reason("own-forward", f"{what} has a forward of its own, which would shadow the kernel")
    return None


class _Session:
    """One call of a model's forward in which a loss is wanted.

    Attributes:
        head: the model's head.
        loss: what to use.
        calls: what the head was called for.
        why: why the head was not put off.
    """

    def __init__(self, head: Any, loss: Callable[..., torch.Tensor]) -> None:
        self.head, self.loss = head, loss
        self.calls: list[Head] = []
        self.why: str | None = None


class _Current(threading.local):
    """What a thread's models are in the middle of."""

    def __init__(self) -> None:
        self.session: _Session | None = None


_current = _Current()


def _put_off(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a head, which in a model's call for a loss returns pending logits."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        session = _current.session
        if session is None or session.head is not self:
            return original(self, x)
        session.why = _why_not(self, x)
        if session.why is not None:
            return original(self, x)
        head = Head(x, self.weight, self.bias, session.loss)
        session.calls.append(head)
        return head.pending()

    return as_original(forward, original)


def _why_not(head: Any, x: torch.Tensor) -> str | None:
    """Why one call of a head can't be put off; None for the ordinary one."""
    weight = head.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or type(x) is not torch.Tensor or weight.dim() != 2:
        return "the head's weight or input is no plain tensor"
    if weight.numel() == 0:
        return "the head's weight is sharded and not gathered"
    if weight.device != x.device:
        return "the head's weight and input are on different devices"
    if not x.is_floating_point() or (weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)):
        return "the head's weight and input have different dtypes"
    return None


def _fused(original: Callable[..., Any], path: str, loss: Callable[..., Any], counts: Any) -> Callable[..., Any]:
    """The forward of a language model, which in training computes its loss without its logits."""
    position = list(signature_of(original).parameters).index("labels")
    # A compiler takes this class's loss apart by itself, and can't hand it pending logits.
    has_loss_layer = "CrossEntropyLoss" in inspect.unwrap(original).__code__.co_names

    def accepts_call(*args: Any, **kwargs: Any) -> str | None:
        self: Any = args[0]
        labels = kwargs.get("labels", args[position] if len(args) > position else None)
        if labels is None:
            return "no labels: the logits are wanted"
        if not self.training or not torch.is_grad_enabled():
            return "not in training: the logits are kept"
        if has_loss_layer and is_compiling():
            return "inside a compiler, which can't do it for this model"
        head = self.get_submodule(path)
        hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
        return "the head has hooks" if any(hooks) else None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = _Session(self.get_submodule(path), loss)
        outer, _current.session = _current.session, session
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            _current.session = outer
        fused = any(head.fused for head in session.calls)
        if not fused and not is_compiling():
            counts.kernel -= 1
            counts.fall_back(_why_not_fused(session))
        return _without_pending(outputs, fused)

    return counted(as_original(forward, original), original, counts, accepts_call=accepts_call)


def _why_not_fused(session: _Session) -> str:
    reasons = [session.why, *(head.why for head in session.calls)]
    return next((why for why in reasons if why), "its loss is no cross-entropy of its head's outputs")


def _without_pending(outputs: Any, fused: bool) -> Any:
    """A model's outputs with None, or computed logits where the loss needed them, in the place of pending ones."""

    def final(value: Any) -> Any:
        if not isinstance(value, PendingLogits):
            return value
        return None if fused and not value.has_value else value.value("the output")

    if isinstance(outputs, Mapping):
        return type(outputs)(**{name: final(value) for name, value in outputs.items()})
    if type(outputs) is tuple:  # without what is None, as transformers makes tuples
        finals = [(value, final(value)) for value in outputs]
        return tuple(after for before, after in finals if after is not None or before is None)
    return outputs
