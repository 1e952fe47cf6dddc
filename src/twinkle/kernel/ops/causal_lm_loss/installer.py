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
from twinkle.kernel.ops.causal_lm_loss.lost_gradients import LEAVE_OUT
from twinkle.kernel.ops.causal_lm_loss.own_losses import may_ask_what_they_are
from twinkle.kernel.ops.causal_lm_loss.pending_logits import Head, PendingLogits
from twinkle.kernel.ops.hooks import hooks_for_all, hooks_on
from twinkle.kernel.ops.torch_support import transformed
from twinkle.kernel.reclass import own_forward, peel
from twinkle.kernel.transaction import active_transaction
from twinkle.kernel.undo import patch_method
from twinkle.naming import top_package
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
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is not None and issubclass(cls, sharded):
        return Reason("head", f"its head {path} is sharded for itself", "call kernelize() before fully_shard()")
    if cls is not nn.Linear:
        adapted = top_package(cls.__module__) == "peft"
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
        saved: what tensors saved for backward go through.
        calls: what the head was called for.
        why: why the head was not put off.
    """

    def __init__(self, head: Any, loss: Callable[..., torch.Tensor]) -> None:
        self.head, self.loss, self.saved = head, loss, _saved_tensors_hooks()
        self.calls: list[Head] = []
        self.why: str | None = None


def _saved_tensors_hooks() -> Any:
    """A checkpoint within the model would call the head again, outside of the model's call, and needs the same then."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if is_compiling() or top is None else top(True)


class _Current(threading.local):
    """What a thread's models are in the middle of."""

    def __init__(self) -> None:
        self.session: _Session | None = None


_current = _Current()


def _put_off(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a head, which in a model's call for a loss returns pending logits."""

    def forward(self: Any, input: torch.Tensor) -> Any:  # the name that a linear layer gives it
        session = _current.session
        if session is None or session.head is not self:
            return original(self, input)
        why = _why_not(self, input)
        if why is None and session.saved != _saved_tensors_hooks():
            why = "the head is called within a checkpoint of the model's own"
        if why is not None:
            session.why = session.why or why
            return original(self, input)
        head = Head(input, self.weight, self.bias, session.loss)
        session.calls.append(head)
        return head.pending()

    return as_original(forward, original)


def _why_not(head: Any, x: torch.Tensor) -> str | None:
    """Why one call of a head can't be put off; None for the ordinary one."""
    weight = head.weight
    if not torch.is_grad_enabled():
        return "the head is called without gradients"
    if type(weight) not in (nn.Parameter, torch.Tensor) or type(x) is not torch.Tensor or weight.dim() != 2:
        return "the head's weight or input is no plain tensor"
    if weight.numel() == 0:
        return "the head's weight is sharded and not gathered"
    if weight.device != x.device:
        return "the head's weight and input are on different devices"
    autocast = torch.is_autocast_enabled(x.device.type)
    if not x.is_floating_point() or (weight.dtype != x.dtype and not autocast):
        return "the head's weight and input have different dtypes"
    if autocast and torch.float64 in (x.dtype, weight.dtype):
        return "fp64, which autocast leaves as it is"
    return None


def _fused(original: Callable[..., Any], path: str, loss: Callable[..., Any], counts: Any) -> Callable[..., Any]:
    """The forward of a language model, which in training computes its loss without its logits."""
    position = list(signature_of(original).parameters).index("labels")
    # A compiler takes this class's loss apart by itself, and can't hand it pending logits.
    code = getattr(inspect.unwrap(original), "__code__", None)
    has_loss_layer = code is not None and "CrossEntropyLoss" in code.co_names

    def accepts_call(*args: Any, **kwargs: Any) -> str | None:
        self: Any = args[0]
        labels = kwargs.get("labels", args[position] if len(args) > position else None)
        if labels is None:
            return "no labels: the logits are wanted"
        if not self.training or not torch.is_grad_enabled():
            return "not in training: the logits are kept"
        if has_loss_layer and is_compiling():
            return "inside a compiler, which can't do it for this model"
        if may_ask_what_they_are(getattr(self, "loss_function", None)):
            return "its loss_function asks whether something is a tensor, which logits that aren't computed are not"
        return transformed() or _hooked(self, path)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = _Session(self.get_submodule(path), loss)
        outer, _current.session = _current.session, session
        try:
            outputs = original(self, *args, **kwargs)
        except Exception as error:
            if PendingLogits.__name__ in str(error):  # of code that can be handed nothing but tensors
                error.add_note(f"its logits aren't computed yet; {LEAVE_OUT}")
            raise
        finally:
            _current.session = outer
        if not any(head.fused for head in session.calls) and not is_compiling():
            counts.kernel -= 1
            counts.fall_back(_why_not_fused(session))
        return _without_pending(outputs)

    return counted(as_original(forward, original), original, counts, accepts_call=accepts_call, blames=False)


def _hooked(model: Any, path: str) -> str | None:
    """Why somebody would see pending logits, or miss the head's gradients; None where nobody does."""
    head = model.get_submodule(path)
    if hooks_on(head):
        return "the head has hooks"
    if own_forward(head) is not None:
        return "the head has a forward of its own"
    names = path.split(".")[:-1]
    around = [model.get_submodule(".".join(names[: depth + 1])) for depth in range(len(names))]
    return "a module around the head has hooks" if any(map(hooks_on, around)) else hooks_for_all()


def _why_not_fused(session: _Session) -> str:
    reasons = [session.why, *(head.why for head in session.calls)]
    if not session.calls and session.why is None:
        return "the head was not called as kernelize() had found it; was it replaced since?"
    return next((why for why in reasons if why), "its loss is no cross-entropy of its head's outputs")


def _without_pending(value: Any) -> Any:
    """A model's outputs with None, or computed logits where its loss needed them, in the place of pending ones."""
    if isinstance(value, PendingLogits):
        return None if value.head.fused and not value.has_value else value.value("the output")
    if isinstance(value, Mapping):
        finals = {key: _without_pending(item) for key, item in value.items()}
        changed = [key for key, item in value.items() if finals[key] is not item]
        if changed and hasattr(value, "to_tuple"):  # transformers' own, which leave out what is None
            return type(value)(**finals)
        for key in changed:
            value[key] = finals[key]  # type: ignore[index]
        return value
    if isinstance(value, (tuple, list)):
        items = [_without_pending(item) for item in value]
        if all(after is before for after, before in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        if type(value) is tuple:  # without what is None, as transformers makes them
            return tuple(item for item, before in zip(items, value, strict=True) if item is not None or before is None)
        return type(value)(items)
    # An object of the model's own making; transformers' caches hold no logits, and compilers before 2.13 can't look in.
    own = not isinstance(value, torch.Tensor) and not type(value).__module__.startswith("transformers.")
    if own and hasattr(value, "__dict__"):
        for name, before in vars(value).items():
            if isinstance(before, PendingLogits):
                object.__setattr__(value, name, _without_pending(before))
    return value
