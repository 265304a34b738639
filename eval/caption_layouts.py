"""Layouts of data sets with long captions (a file per caption, lines of JSON, conversations), and
of captions in several languages.

They return files that are candidates, and (file, caption) pairs, as the readers of
``datasets.read_captions`` do. Wrong content is a ValueError of one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mclclip.files import parse_json

NamedTexts = tuple[Iterable[str], Iterable[tuple[str, str]]]
"""Files that are candidates with or without a caption, and (file, caption) pairs."""


def caption_files(folder: Path, images: Path) -> NamedTexts:
    """A folder with ``1.txt`` for the image ``1.jpg`` (or another suffix) in ``images``, as in
    Urban1k. FileNotFoundError for a caption without an image."""
    found = {path.stem: path.name for path in sorted(images.iterdir()) if path.suffix != ".txt"}
    files = sorted(path for path in folder.iterdir() if path.suffix == ".txt")
    if not files:
        raise ValueError(f"{folder} has neither .txt files, one per image, nor .tar shards")
    if strangers := [path for path in files if path.stem not in found]:
        raise FileNotFoundError(
            f"{len(strangers)} of {len(files)} captions have no image in {images}, such as "
            f"{strangers[0].name}: an image has the name of its caption"
        )
    return (), [(found[path.stem], path.read_text(encoding="utf-8-sig").strip()) for path in files]


def caption_lines(path: Path, split: str | None) -> NamedTexts:
    """An object per line with ``image_file``, ``description`` and perhaps ``split``, as in
    DOCCI."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path} line {number}")
        fields = ("image_file", "description", *(["split"] if split else []))
        found: list[Any] = [row.get(field) for field in fields] if isinstance(row, dict) else [0]
        if not all(isinstance(value, str) for value in found):
            raise ValueError(f"{path} line {number} wants the texts {', '.join(fields)}")
        if not split or found[2] == split:
            pairs.append((found[0], found[1]))
    return (), pairs


def conversations(entries: list[Any]) -> NamedTexts:
    """ShareGPT4V's list: ``image``, and ``conversations`` of which the first ``value`` that is
    ``from`` "gpt" is the caption. KeyError and TypeError for other content."""
    pairs = []
    for entry in entries:
        said = [turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt"]
        if not said:
            raise KeyError("a conversation with a turn from 'gpt'")
        pairs.append((entry["image"], said[0]))
    return (), pairs


def languages_of_lines(path: Path) -> dict[str, NamedTexts]:
    """Crossmodal-3600's lines: ``image/key``, the name of a .jpg without its suffix, and, for each
    language, an object whose ``caption`` is a list of captions.

    All images are candidates in every language. ValueError for a line of another kind.
    """
    names: list[str] = []
    pairs: dict[str, list[tuple[str, str]]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path} line {number}")
        key = row.get("image/key") if isinstance(row, dict) else None
        if not isinstance(key, str):
            raise ValueError(f"{path} line {number} has no image/key, as Crossmodal-3600's have")
        names.append(f"{key}.jpg")
        for language, said in row.items():
            if isinstance(said, dict):
                captions = said.get("caption")
                if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
                    raise ValueError(f"{path} line {number} has no list caption in {language!r}")
                pairs.setdefault(language, []).extend((names[-1], text) for text in captions)
    return {language: (names, found) for language, found in sorted(pairs.items())}
