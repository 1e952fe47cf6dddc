"""The values of options that several commands have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle.commands.console import CommandError
from twinkle.platforms import PLATFORMS, Platform, platforms_called
from twinkle.reasons import did_you_mean

if TYPE_CHECKING:
    import torch

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"} | {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def accelerator() -> Platform:
    """The accelerator that this machine has; the CPU when it has none."""
    others = (platform for platform in PLATFORMS.values() if platform.name != "cpu")
    return next((platform for platform in others if platform.missing() is None), PLATFORMS["cpu"])


def parse_device(text: str | None, *, present: bool) -> tuple[str, str]:
    """A device as PyTorch names it, and how it was come by.

    Args:
        text: ``cuda``, ``cuda:1``, ``npu``, a platform's name such as ``nvidia``; None for this machine's own.
        present: whether the machine must have it.

    Raises:
        CommandError: unknown, or not there.
    """
    if text is None:
        own = accelerator()
        how = "this machine has no accelerator" if own.name == "cpu" else f"this machine has {own.name}"
        return own.device_type, how
    kind, colon, index = text.partition(":")
    platforms = platforms_called(kind)
    if not platforms or (colon and not index.isdigit()):
        known = sorted({name for p in PLATFORMS.values() for name in (p.device_type, p.name)})
        raise CommandError(f"unknown device {text!r}{did_you_mean(kind, known)}; known: {', '.join(known)}")
    missing = [platform.missing() for platform in platforms]
    if present and None not in missing:
        raise CommandError(f"no device {text!r} here: {missing[0]}; `twinkle-kernel info` lists what there is")
    return platforms[0].device_type + colon + index, "as asked"


def parse_dtype(text: str | None) -> torch.dtype | None:
    """A dtype by its name or short name.

    Raises:
        CommandError: unknown.
    """
    if text is None:
        return None
    if text not in DTYPES:
        raise CommandError(f"unknown dtype {text!r}{did_you_mean(text, DTYPES)}; known: {', '.join(DTYPES)}")
    import torch

    return getattr(torch, DTYPES[text])


def parse_chain(backends: Sequence[str] | None, option: str = "--backend", more: Iterable[str] = ()) -> tuple[str, ...]:
    """The backends of an option, which may name ``more``; empty when it wasn't given.

    Raises:
        CommandError: a backend that no op has, or no name at all.
    """
    from twinkle.kernel import registry

    chain = tuple(parse_names(option, backends))
    known = {name for op in registry.ops() for name in registry.backends_of(op)}
    known |= {*registry.KNOWN_BACKENDS, *more}
    for name in chain:
        if name not in known:
            text = f"unknown backend {name!r}{did_you_mean(name, known)}; known: {', '.join(sorted(known))}"
            raise CommandError("; ".join([text, *map(str, registry.broken_plugins())]))
    return chain


def parse_names(option: str, given: Sequence[str] | None) -> list[str]:
    """The names of an option that may be repeated and hold commas; empty when it wasn't given.

    Raises:
        CommandError: it was given without a name.
    """
    names = [name.strip() for part in given or () for name in part.split(",") if name.strip()]
    if given and not names:
        raise CommandError(f"{option} {','.join(given)!r} names nothing; leave it out, or give names: {option} A,B")
    return names


def check_writable(option: str, file: Path, may_make: Path | None = None) -> None:
    """Fails before minutes are spent on what then can't be kept. Nothing is left behind.

    Args:
        may_make: a folder that is made when it is the file's and isn't there.

    Raises:
        CommandError: the file's folder isn't there, or nothing can be written.
    """
    folder = file.parent
    try:
        if folder == may_make:
            folder.mkdir(exist_ok=True)
        if not folder.exists():
            raise CommandError(f"{option} {file}: there is no folder {folder}; make it first, or name another file")
        existed = file.exists()
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise CommandError(f"{option} {file}: {error.strerror}; name a file that can be written") from None


def check_files(files: Mapping[str, Path | None]) -> None:
    """:func:`check_writable` for the files of several options; None for one that wasn't given.

    Raises:
        CommandError: one can't be written, or two options name the same.
    """
    options: dict[Path, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        check_writable(option, file)
        other = options.setdefault(file.resolve(), option)
        if other != option:
            raise CommandError(f"{option} {file}: {other} writes there too; name another file")


def mapping_for(chain: tuple[str, ...]) -> Mapping[Any, Any]:
    """The default mapping, with every entry's backends replaced when there is a chain."""
    from twinkle.kernel import DEFAULT_KERNEL_CONFIG

    if not chain:
        return DEFAULT_KERNEL_CONFIG
    return {target: replace(choice, backends=chain) for target, choice in DEFAULT_KERNEL_CONFIG.items()}
