"""From patterns in ``data.sources.NAME.shards`` to the paths and urls of shards."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from webdataset.shardlists import expand_urls

from mclclip.data.remote import Remote, RemoteOptions, check_protocol
from mclclip.util.files import printable
from mclclip.util.options import protocol_of

_IN_URL = re.compile(r"::(?![\w.+-]+://|[/.~@${])")  # a ``::`` that is a part of a url


def expand_shards(
    patterns: str | Sequence[str], option: str, remote: RemoteOptions | None = None
) -> list[str]:
    """Expands ``patterns`` to sorted absolute paths and urls.

    A pattern is a path, a glob, a brace list such as ``{00..03}.tar``, or ``@FILE``, a file with
    one pattern per line. Braces expand as in webdataset: ``::`` separates patterns, and ``${x}`` is
    the environment variable WDS_x. In a pattern with a url, ``::`` separates only if a url or path
    follows it, since IPv6 addresses and queries may contain it. An existing file is taken literally
    even if its name looks like a pattern. A url is not opened, unless it is a glob. ``option``,
    such as 'data.sources.pets.shards', begins the messages.

    Raises FileNotFoundError for a pattern without files and for missing shards; ValueError for
    pipes, urls of other protocols, broken braces, text files, and a shard that is listed twice.
    """
    lines: list[str] = []
    for entry in [patterns] if isinstance(patterns, str) else patterns:
        if not entry.startswith("@"):
            lines.append(entry)
            continue
        file = os.path.expanduser(entry[1:])
        if not os.path.isfile(file):
            raise FileNotFoundError(f"{option}: no list of shards at {file}")
        stripped = [line.strip() for line in Path(file).read_text("utf-8-sig").splitlines()]
        lines += [line for line in stripped if line and not line.startswith("#")]
    paths = sorted(
        path if protocol_of(path) else os.path.abspath(path)
        for line in lines
        for path in _expand(line, option, Remote(remote))
    )
    if not paths:
        raise FileNotFoundError(f"{option} names no shard: {printable(str(patterns))}")
    if text := next((path for path in paths if path.lower().endswith(".txt")), None):
        raise ValueError(f"{option}: {text} is a text file: for a list of shards write @{text}")
    for path, following in itertools.pairwise(paths):
        if path == following:
            raise ValueError(f"{option} names {printable(path)} twice: list each shard once")
    return paths


def _expand(pattern: str, option: str, remote: Remote) -> list[str]:
    """Returns the files of a brace list or glob; each of its alternatives must match a file."""
    literal = os.path.expanduser(pattern)
    if os.path.isfile(literal):
        return [literal]
    if files := _glob(literal, option):
        return files
    whole = _IN_URL.sub("\0", pattern) if "://" in pattern else pattern
    try:
        candidates = [os.path.expanduser(path.replace("\0", "::")) for path in expand_urls(whole)]
    except (ValueError, AssertionError) as error:  # unbalanced braces; no such variable
        raise ValueError(f"{option}: {printable(pattern)!r} does not expand: {error}") from None
    paths: list[str] = []
    missing: list[str] = []
    for path in candidates:
        if path.startswith("pipe:") or protocol_of(path) is not None:
            check_protocol(path, option)
            urls = remote.glob(path) if "*" in path else [path]
            paths += urls
            missing += [] if urls else [path]
            continue
        is_glob = glob.has_magic(path) and not os.path.exists(path)
        files = _glob(path, option) if is_glob else [path] * os.path.isfile(path)
        paths += files
        missing += [] if files else [path]
    if missing:
        raise FileNotFoundError(
            f"{option}: {missing[0]} is a folder: use {missing[0]}/*.tar"
            if os.path.isdir(missing[0])
            else f"{option}: {len(missing)} of the {len(candidates)} paths of "
            f"{printable(pattern)!r} match no file, such as {printable(missing[0])}"
        )
    return paths


def _glob(pattern: str, option: str) -> list[str]:
    """Returns the files that match, without folders. A link that leads nowhere is a missing file:
    raises FileNotFoundError."""
    paths = glob.glob(pattern, recursive=True)
    if dead := [path for path in paths if os.path.islink(path) and not os.path.exists(path)]:
        raise FileNotFoundError(
            f"{option}: {len(dead)} of the {len(paths)} files of {printable(pattern)!r} are links "
            f"that lead nowhere, such as {printable(dead[0])}"
        )
    return [path for path in paths if os.path.isfile(path)]
