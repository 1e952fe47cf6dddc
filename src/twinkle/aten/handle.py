"""What is live in a process until it is closed."""

from __future__ import annotations

from typing import Any, NoReturn, Self


class Handle:
    """Closed when it is left as a context manager; no copy of it exists, since it stands for a state of the process."""

    def close(self) -> None:
        """Takes back what it stands for. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        text = f"{self!r} belongs to this process and can't be copied or pickled"
        raise TypeError(f"{text}; another process registers its own")
