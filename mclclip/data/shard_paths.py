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

MAX_PATHS = 1_000_000  # most paths that one pattern of shards may expand to
MAX_FOLDERS = 50_000  # most folders that a pattern with ** may search
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
    pipes, urls of other protocols, broken braces, and a shard that is listed twice.
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
    if (number := _most_paths(pattern)) > MAX_PATHS:
        raise ValueError(
            f"{option}: {printable(pattern)!r} stands for up to {number:.0e} paths, wanted at most "
            f"{MAX_PATHS:,}: use a glob, or @FILE"
        )
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
    """Returns the files that a glob matches.

    ``**`` follows links, and a link to a folder above makes an endless tree. So ValueError is
    raised if ``**`` leads into more than ``MAX_FOLDERS`` folders.
    """
    if stars := re.search(r"(^|/)\*\*(/|$)", pattern):
        num_folders, before = 0, pattern[: stars.end(1)]
        for base in glob.glob(before) if before else [os.curdir]:
            for _, names, _ in os.walk(base, followlinks=True):
                names[:] = [name for name in names if not name.startswith(".")]
                num_folders += 1
                if num_folders > MAX_FOLDERS:
                    raise ValueError(
                        f"{option}: ** in {pattern!r} leads into more than {MAX_FOLDERS:,} folders "
                        "(links may lead back upwards): name the folders that hold shards"
                    )
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _most_paths(pattern: str) -> float:
    """Returns an upper bound of the number of paths that the braces of a pattern expand to."""
    number = 1.0
    while groups := re.findall(r"\{[^{}]*\}", pattern):
        for group in groups:
            ends = re.match(r"\{(-?[0-9]+)\.\.(-?[0-9]+)", group)
            steps = abs(float(ends[2]) - float(ends[1])) if ends else group.count(",")
            number *= steps + 1
        pattern = re.sub(r"\{[^{}]*\}", "", pattern)
    return number
