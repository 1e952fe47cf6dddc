"""The backends of ``moe_experts`` under names in transformers' registry of experts, to be chosen by the configuration.

register_experts_functions()
model.set_experts_implementation("twinkle_triton")  # or from_pretrained(..., experts_implementation=...)

Nothing of the model is changed: transformers' own dispatch calls the kernel, or its own code where the kernel doesn't
fit, and a warning says why, once for each reason. Whoever uses ``kernelize`` needs none of this; its report is more
than a log line.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import weakref
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling

from twinkle.kernel.ops.moe import experts_reference
from twinkle.kernel.ops.moe.grouped_mm import has_grouped_mm
from twinkle.kernel.passed import watched_at
from twinkle.kernel.reclass import peel
from twinkle.kernel.registry import availability, backends_of, get_impl, load_impl, refusal
from twinkle.kernel.targets import Site
from twinkle.reasons import Reason

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PREFIX = "twinkle_"


def register_experts_functions() -> tuple[str, ...]:
    """Registers every backend that this machine can use; calling it again takes up new ones.

    Returns:
        the names, ``twinkle_`` and the backend.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    names = []
    for backend in backends_of("moe_experts"):
        impl = get_impl("moe_experts", backend)
        if not isinstance(impl, Reason) and availability(impl) is None:
            ALL_EXPERTS_FUNCTIONS.register(PREFIX + backend, _Function(backend))
            names.append(PREFIX + backend)
    return tuple(names)


def unregister_experts_functions() -> None:
    """Takes the names out again. Configurations that have one are to be set to another first."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    functions = ALL_EXPERTS_FUNCTIONS._global_mapping
    for name in [name for name, function in functions.items() if isinstance(function, _Function)]:
        del functions[name]


class _Function:
    """What transformers calls with an experts module, its tokens, choices and weights."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._kernels: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self._told: set[tuple[str, str]] = set()

    def __call__(
        self, module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        arguments = module, hidden_states, top_k_index, top_k_weights
        kernel = None if is_compiling() else self._kernel(module, hidden_states)
        if kernel is not None:
            forward, accepts_call = kernel
            refused = accepts_call(*arguments) if accepts_call is not None else None
            if refused is None:
                return forward(*arguments)  # type: ignore[no-any-return]
            self._tell(module, refused)
        return _theirs(module, hidden_states.device)(*arguments)  # type: ignore[no-any-return]

    def _kernel(self, module: Any, hidden_states: torch.Tensor) -> Any:
        """The forward that fits the module as it is now, and its ``accepts_call``; None and a warning without one."""
        state = type(module), module.act_fn, hidden_states.device, hidden_states.dtype
        known, kernel = self._kernels.get(module, (None, None))
        if known != state:
            kernel = self._find(module, hidden_states)
            if isinstance(kernel, Reason):
                self._tell(module, kernel)
                kernel = None
            self._kernels[module] = state, kernel
        return kernel

    def _find(self, module: Any, hidden_states: torch.Tensor) -> Any:
        owner: Any = peel(type(module))
        site = Site(module, owner.__name__, owner, "forward", owner.forward, hidden_states.device, hidden_states.dtype)
        variant, impl = experts_reference.probe(site), get_impl("moe_experts", self.backend)
        if isinstance(variant, Reason) or isinstance(impl, Reason):
            return variant if isinstance(variant, Reason) else impl
        site = dataclasses.replace(site, variant=variant)
        loaded = refusal(impl, site) or load_impl(impl, owner.forward, site)
        if isinstance(loaded, Reason):
            return loaded
        accepts_call = getattr(loaded, "accepts_call", None)
        return loaded.forward, watched_at(site, experts_reference).guard(accepts_call)

    def _tell(self, module: Any, reason: Reason | str) -> None:
        name = peel(type(module)).__name__
        if (name, str(reason)) not in self._told:
            self._told.add((name, str(reason)))
            logger.warning("%s: %s%s doesn't serve it: %s", name, PREFIX, self.backend, reason)


def _theirs(module: Any, device: torch.device) -> Any:
    """What transformers takes by itself: grouped products where PyTorch has them, else the class's own loop."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward if has_grouped_mm(device) else inspect.unwrap(type(module).forward)
