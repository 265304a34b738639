"""What a check may say beside success, and one line of text; needs no torch."""

from __future__ import annotations


class Skip(Exception):
    """The check cannot be made here; the message says why."""


def one_line(text: str, most: int = 160) -> str:
    """Text without line breaks, cut to so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
