"""What was found out once, kept for the next time."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Memory(dict[Any, T]):
    """What was found out about layouts of tensors, by a key that tells them apart."""

    MOST = 4096
    """Every shape leaves an entry; when that many have come, all are forgotten."""

    def add(self, key: Any, value: T) -> T:
        if len(self) >= self.MOST:
            self.clear()
        self[key] = value
        return value
