"""Output, progress bars and errors for people."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.document import Part
from twinkle.layout import WITHOUT_TERMINAL, Block, laid_out

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class CommandError(Exception):
    """What the user can mend: one line that names the thing and the remedy."""


def first_line(error: BaseException) -> str:
    """An exception's message on one line, at most 200 characters long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def stdout() -> Console:
    """The console of results. Text is printed as it is: names hold brackets, which mean nothing."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WITHOUT_TERMINAL  # rich would assume 80 in a pipe or a file
    return console


def show(console: Console, blocks: Iterable[Block]) -> None:
    """Prints blocks in their styles, with a rule below a table's header. They are laid out already: no line is cut."""
    rule = "-" if console.options.ascii_only else "─"
    for block in blocks:
        header = block.style == "header"
        for line in block.lines:
            console.print(line.rstrip(), style="bold" if header else block.style, soft_wrap=True)
        if header:
            console.print(rule * max(map(len, block.lines)), soft_wrap=True)


def show_parts(console: Console, parts: Iterable[Part]) -> None:
    """Prints a report's parts, laid out for the console."""
    show(console, laid_out(parts, console.width))


@contextmanager
def kept(option: str, file: Path | None, write: Callable[[Path], object], *, silent: bool) -> Iterator[None]:
    """Writes what the block then prints to a file, if one was named; afterwards says so unless ``silent``.

    First the file, for a terminal may go away; but one that can't be written doesn't keep the block from printing.

    Raises:
        CommandError: the file can't be written, although it could when the command began: a full disk, say.
    """
    failed = None
    try:
        if file is not None:
            write(file)
    except OSError as error:
        failed = error
    yield
    if failed is not None:
        raise CommandError(f"{option} {file}: {failed.strerror}; it isn't whole, but what was found is above")
    if file is not None and not silent:
        stdout().print(f"written: {file}", soft_wrap=True)


def answer(data: Any, parts: Iterable[Part], *, as_json: bool) -> None:
    """Prints what a command found, as plain data or as a report."""
    if as_json:
        print_json(data)
    else:
        show_parts(stdout(), parts)


def write_page(file: Path | None, title: str, parts: Iterable[Part], *, silent: bool) -> None:
    """Writes a report's parts, which were printed, as a page for ``--html``, if that was given: see :func:`kept`."""
    if file is None:
        return
    from twinkle.bench.results import packages
    from twinkle.page import page

    # A file's name need not be text: what of it can't be written is no reason to lose what was measured.
    text = page(title, parts, packages())
    with kept("--html", file, lambda at: at.write_text(text, encoding="utf-8", errors="replace"), silent=silent):
        pass


def print_json(data: Any) -> None:
    """Plain JSON on stdout, and nothing else there. Not a number and infinity become null."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and (data != data or data in (float("inf"), float("-inf"))):
        return None
    return data


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr that goes away when it is done; none when ``quiet`` or stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        yield bar


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keeps our own log lines back where the command's output says the same."""
    logger = logging.getLogger("twinkle.kernel")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def size(number: float) -> str:
    """Bytes: ``3_200_000`` -> ``3.2 MB``."""
    return _three_digits(number, (" B", " kB", " MB", " GB", " TB"))


def count(number: float) -> str:
    """A number of parameters: ``3_200_000`` -> ``3.2M``, thousands of millions being ``B``."""
    return _three_digits(number, ("", "k", "M", "B", "T"))


def _three_digits(number: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"
