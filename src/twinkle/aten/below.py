"""What stood at a dispatch key before our kernel: PyTorch's own, or that of somebody else, who may take it out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class Below:
    """What stands below our kernel at one dispatch key, and serves what ours doesn't take.

    Attributes:
        kernel: its handle.
    """

    def __init__(
        self, overload: torch._ops.OpOverload, key: str, find_anew: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        """Looks up what stands there now.

        Args:
            find_anew: makes all of a registration look again at what stands below ours, after that was taken out.
        """
        self._overload, self._key = overload, key
        self._find_anew = find_anew
        self.find()

    def find(self) -> None:
        """Looks up what stands at the key now, where ours doesn't."""
        self.kernel = torch.library.get_kernel(self._overload, self._key)

    def call(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Passes a call on."""
        kernel = self.kernel
        try:
            return kernel.call_boxed(keyset, *args, **kwargs)
        except RuntimeError as error:
            if not _was_taken_out(kernel, error):
                raise
        find_anew = self._find_anew()
        if self.kernel is kernel and find_anew is not None:  # another thread may have come upon it, too
            find_anew()
        return self.kernel.call_boxed(keyset, *args, **kwargs)


def _was_taken_out(kernel: Any, error: RuntimeError) -> bool:
    """Whether PyTorch couldn't call that very kernel: before the call, so that nothing of it was done."""
    said = "SafeKernelFunction has been invalidated "
    return str(error).startswith(said) and str(error).removeprefix(said) in repr(kernel)
