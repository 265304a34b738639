"""Makes standard output and error safe to write to if they are closed or their reader ends."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _Descriptor(io.FileIO):
    """A file descriptor that drops all output once its reader has ended, as in `mclclip | head`."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            try:
                rest = rest[super().write(rest) :]
            except BrokenPipeError:
                null_device = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null_device, self.fileno())
                os.close(null_device)
        return len(data)


def outlive_readers() -> None:
    """Keeps this process running if the reader of its output or errors ends; drops what follows.

    Opens a closed standard stream on the null device. Otherwise the next file that is opened would
    get its descriptor, and libraries and child processes would print into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is ``number``
    sys.stdout, sys.stderr = _wrap(1, sys.stdout), _wrap(2, sys.stderr)


def _wrap(number: int, stream: TextIO | None) -> TextIO:
    """Returns a stream to the descriptor ``number``, buffered and encoded like ``stream``."""
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
