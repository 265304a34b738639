"""Fetching files of public models, and libraries kept from the terminal meanwhile."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants as hub

T = TypeVar("T")


def fetched(what: str, fetch: Callable[[], T]) -> T:
    """Calls ``fetch`` quietly and returns its result.

    Raises FileNotFoundError, one line about ``what``, where it fails.
    """
    try:
        with quiet(), _offline_where_unreachable():
            return fetch()
    except Exception as error:  # the hub client raises dozens of kinds of errors
        raise FileNotFoundError(
            f"{what} are neither cached nor reachable ({one_line(error)}): fetch them once on a "
            "machine with a network, or give the path of a copy"
        ) from error


@contextmanager
def _offline_where_unreachable() -> Iterator[None]:
    """Makes the hub client use its cache only, if the hub's host name does not resolve.

    Otherwise it would retry for most of a minute and print a line for every attempt.
    """
    before = hub.HF_HUB_OFFLINE
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # these resolve names
    if not any(os.environ.get(name) for name in proxies):
        try:
            socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, 443)
        except OSError:
            hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = before


def one_line(error: Exception) -> str:
    """The kind and the beginning of an error's message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what open_clip logs through the root logger, which would set up a handler on it."""
    root, null = logging.getLogger(), logging.NullHandler()

    def drop(record: logging.LogRecord) -> bool:
        return False

    root.addHandler(null)
    root.addFilter(drop)
    try:
        yield
    finally:
        root.removeFilter(drop)
        root.removeHandler(null)
