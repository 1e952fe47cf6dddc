"""What is live in a process until it is closed."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from twinkle.aten.errors import RegistrationError


class Handle:
    """Closed when it is left as a context manager; no copy of it exists, since it stands for a state of the process."""

    def close(self) -> None:
        """Takes back what it stands for. A second call does nothing."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether it was taken back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if self.closed:  # what follows would run without the kernel, and nobody be told
            raise RegistrationError.of(repr(self), "closed", "it isn't made again by entering it", "register anew")
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        text = f"{self!r} belongs to this process and can't be copied or pickled"
        raise TypeError(f"{text}; another process registers its own")
