"""Counts of calls in a file that outlives its process: it is mapped into memory, so whoever is killed has told all.

The file is a header and one :class:`MappedCounts` per operator, all of fixed size. Its blocks are written once, before
it is mapped: where the disk is full that is an error then, while a page that can't be stored later would kill the
process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

REASONS = 32
"""So many reasons are told apart for each operator."""

OTHERS = "others"
"""The reason that the calls beyond those are counted under."""

_MAGIC = b"twinkle1"


class _Header(ctypes.Structure):
    _fields_ = [("magic", ctypes.c_char * 8), ("operators", ctypes.c_uint64)]


class _Fallback(ctypes.Structure):
    reason: bytes
    calls: int
    _fields_ = [("reason", ctypes.c_char * 56), ("calls", ctypes.c_uint64)]


class MappedCounts(ctypes.Structure):
    """What became of the calls of one operator: a :class:`twinkle.reasons.Counting` whose memory is a file's.

    Its numbers are read and written by C code, so that ``counts.kernel += 1`` lets no other thread in between.

    Attributes:
        places: where each reason is counted.
        claiming: held while one gets its place.
    """

    places: dict[str, _Fallback]
    claiming: threading.Lock

    operator: bytes
    kernel: int
    errors: int
    compiled: bool
    _fields_ = [
        ("operator", ctypes.c_char * 64),
        ("kernel", ctypes.c_uint64),
        ("errors", ctypes.c_uint64),
        ("compiled", ctypes.c_bool),
        ("_slots", _Fallback * REASONS),
    ]

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that PyTorch's own kernel served, by reason."""
        return {slot.reason.decode(errors="replace"): slot.calls for slot in self._slots if slot.reason}

    def fall_back(self, reason: str) -> None:
        """Counts one call that PyTorch's own kernel served."""
        (self.places.get(reason) or self._place(reason)).calls += 1

    def _place(self, reason: str) -> _Fallback:
        with self.claiming:
            name = reason.encode()[:55]
            *own, last = self._slots
            found = next((slot for slot in own if slot.reason in (name, b"")), last)
            found.reason = name if found is not last else OTHERS.encode()
            return self.places.setdefault(reason, found)

    def __repr__(self) -> str:
        return f"<MappedCounts kernel={self.kernel}, fallbacks={self.fallbacks}, errors={self.errors}>"


def create(file: Path, operators: Sequence[str]) -> dict[str, MappedCounts]:
    """Makes a file and maps it; it stays mapped as long as somebody has one of the counts.

    Raises:
        OSError: it can't be written, or not all of it.
    """
    size = ctypes.sizeof(_Header) + len(operators) * ctypes.sizeof(MappedCounts)
    with file.open("xb+") as stream:
        stream.write(bytes(size))
        stream.flush()
        os.fsync(stream.fileno())  # where writing is put off, only now is it known whether there is room
        memory = mmap.mmap(stream.fileno(), size)
    header = _Header.from_buffer(memory)
    header.magic, header.operators = _MAGIC, len(operators)
    found = _all(memory, len(operators), copy=False)
    for counts, operator in zip(found, operators, strict=True):
        counts.operator = operator.encode()[:63]
    return dict(zip(operators, found, strict=True))


def read(file: Path) -> dict[str, MappedCounts]:
    """What a file says now, by operator; its process may be running, or gone.

    Raises:
        OSError: it can't be read.
        ValueError: it is no such file, or was cut short.
    """
    found = file.read_bytes()
    if len(found) < ctypes.sizeof(_Header) or found[:8] != _MAGIC:
        raise ValueError(f"{file} holds no counts")
    number = _Header.from_buffer_copy(found).operators
    if len(found) != ctypes.sizeof(_Header) + number * ctypes.sizeof(MappedCounts):
        raise ValueError(
            f"{file} holds the counts of {number} operators in {len(found)} bytes, which is not their size"
        )
    return {counts.operator.decode(): counts for counts in _all(found, number, copy=True)}


def _all(memory: mmap.mmap | bytes, number: int, *, copy: bool) -> list[MappedCounts]:
    made = MappedCounts.from_buffer_copy if copy else MappedCounts.from_buffer
    begin, size = ctypes.sizeof(_Header), ctypes.sizeof(MappedCounts)
    found = [made(memory, begin + place * size) for place in range(number)]  # type: ignore[arg-type]
    for counts in found:
        counts.places, counts.claiming = {}, threading.Lock()  # what is made of memory goes through no __init__
    return found
