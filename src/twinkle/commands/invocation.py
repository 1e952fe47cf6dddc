"""What the command line's modules share: the option ``--json``, and how a command's work is run and ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from twinkle.commands.console import CommandError
from twinkle.exits import MISUSED

Json = Annotated[bool, typer.Option("--json", help="Print pure JSON on stdout, and no progress bar.")]


def run_command(work: Callable[..., int], *arguments: Any, **options: Any) -> NoReturn:
    """Runs a command's work and exits with what it returns; what the user can mend is one line and exit code 2."""
    try:
        code = work(*arguments, **options)
    except CommandError as error:
        print(f"twinkle-kernel: {error}", file=sys.stderr)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(code)
