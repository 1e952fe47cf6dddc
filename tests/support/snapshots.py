"""Whether a model, and what it shares with others, is exactly as it was: the same objects, the same bits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from twinkle.kernel.undo import unkernelize


def state_of(model: nn.Module) -> dict[str, Any]:
    """Where -> what, for everything that a replacement could touch.

    Classes, attributes, parameters and children of every module; all that the classes define; all names of the Python
    modules that define them; what torch.nn and torch.nn.functional hold; transformers' attention functions.
    """
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"{name}.__class__"] = type(module)
        for key, value in vars(module).items():
            state[f"{name}.{key}"] = value
            if key in ("_parameters", "_buffers", "_modules"):
                state |= {f"{name}.{key}.{k}": v for k, v in value.items()}
        for cls in type(module).__mro__:
            state |= {f"{cls.__module__}.{cls.__qualname__}.{k}": v for k, v in vars(cls).items()}
            python_module = sys.modules.get(cls.__module__)
            if python_module is not None:
                state |= {f"{cls.__module__}:{k}": v for k, v in vars(python_module).items()}
    for shared in (nn, F):
        state |= {f"{shared.__name__}:{k}": v for k, v in vars(shared).items()}
    state |= {f"torch.nn.{n}.forward": vars(c)["forward"] for n, c in vars(nn).items() if "forward" in vars_of(c)}
    if "transformers.modeling_utils" in sys.modules:
        functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        state |= {f"attention {k}": v for k, v in type(functions)._global_mapping.items()}
    return state


def vars_of(value: Any) -> dict[str, Any]:
    return dict(vars(value)) if isinstance(value, type) else {}


_CHANGES_BY_ITSELF = ("__abstractmethods__", "_abc_impl", "__annotations_cache__", "__annotate_func__")


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not the same object any more, has gone or has come."""
    same = {where for where in before.keys() & after.keys() if before[where] is after[where]}
    return sorted(w for w in (before.keys() | after.keys()) - same if not w.endswith(_CHANGES_BY_ITSELF))


def bits(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The model's output, for comparison with ``torch.equal``."""
    with torch.no_grad():
        result = model(*args, **kwargs)
    for name in ("logits", "last_hidden_state"):
        result = getattr(result, name, result)
    return result.clone()


@contextlib.contextmanager
def unchanged(model: nn.Module, *args: Any, undo: bool = True, **kwargs: Any) -> Iterator[nn.Module]:
    """Afterwards the model, and what it shares with others, must be what it was before.

    Args:
        model: given back.
        undo: unkernelize it first.
        args, kwargs: what to call it with to compare the bits.
    """
    before, output = state_of(model), bits(model, *args, **kwargs)
    yield model
    if undo:
        unkernelize(model)
    assert differences(before, state_of(model)) == []
    assert torch.equal(bits(model, *args, **kwargs), output)
