"""Standard streams that may be closed, or whose reader may end before this process does."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _Descriptor(io.FileIO):
    """A file descriptor whose writes go nowhere once its reader has ended (`mclclip | head`)."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            try:
                rest = rest[super().write(rest) :]
            except BrokenPipeError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
        return len(data)


def outlive_readers() -> None:
    """Makes this process write its standard output and error wherever they lead, or nowhere.

    A closed stream is opened on the null device: otherwise the next file that is opened would get
    its number, and with it what libraries and child processes print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    sys.stdout, sys.stderr = _opened(1, sys.stdout), _opened(2, sys.stderr)


def _opened(number: int, stream: TextIO | None) -> TextIO:
    """A stream to the descriptor ``number`` that is buffered and encoded as ``stream`` is."""
    raw = _Descriptor(number, "w", closefd=False)
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(raw, write_through=True)
    stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
