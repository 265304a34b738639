"""Explains file names that are not found because they are spelt differently on disk."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from urllib.parse import unquote

FILE_URL = "file://"


def explain_missing(folder: Path, name: str) -> str | None:
    """Says why ``folder`` has no file of this name; None if it has no similar name.

    It knows the usual causes: file:// urls, backslashes, another Unicode form (macOS stores letters
    and accents apart), capital letters, and a missing suffix.
    """
    plain, causes = name, []
    if plain.startswith("file:/"):  # pathlib makes one slash of two
        plain = "/" + unquote(plain).removeprefix("file:").lstrip("/")
        causes.append(f"it begins with {FILE_URL}, which is no part of a name")
    if "\\" in plain:
        plain = plain.replace("\\", "/")
        causes.append("it has backslashes, where / is wanted")
    place = folder
    for part in Path(plain).parts:
        near = place / part
        if not os.path.exists(near):
            if os.path.islink(near):
                return f"{near} is a link to nothing: {os.readlink(near)}"
            nearest = _nearest(place, part)
            if nearest is None:
                return None
            near, cause = nearest
            causes.append(f"{cause} ({near})")
        place = near
    return f"{name} is not there under this name: {'; '.join(causes)}" if causes else None


def _nearest(folder: Path, part: str) -> tuple[Path, str] | None:
    """Finds the entry of a folder that is spelt like ``part`` except for one cause; or None."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for cause, spell in (
        ("the file's name has another Unicode form", _composed),
        ("the file's name has other capital letters", lambda text: _composed(text).casefold()),
    ):
        for entry in entries:
            if spell(entry.name) == spell(part):
                return entry, cause
    for entry in entries:
        if _composed(entry.stem) == _composed(part):
            return entry, f"the file's name ends with {entry.suffix}"
    return None


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
