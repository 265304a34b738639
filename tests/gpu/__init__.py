"""Checks and figures of one GPU; see README.md. Nothing here imports torch."""


class Skip(Exception):
    """A check or a figure cannot be made here; the message says why."""
