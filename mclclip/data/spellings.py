"""Names of files that lead nowhere because they are spelt otherwise than on disk."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from urllib.parse import unquote

FILE_URL = "file://"


def explain_missing(folder: Path, name: str) -> str | None:
    """Returns why no file of ``folder`` has this name, in words; None where no name is near it.

    The causes are those that people meet: urls of files, backslashes, another Unicode form (macOS
    takes accents apart), capital letters, and a suffix that was left out.
    """
    plain, causes = name, []
    if plain.startswith("file:/"):  # a path that was joined has lost a slash
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
            found = _nearest(place, part)
            if found is None:
                return None
            near, cause = found
            causes.append(f"{cause} ({near})")
        place = near
    return f"{name} is not there under this name: {'; '.join(causes)}" if causes else None


def _nearest(folder: Path, part: str) -> tuple[Path, str] | None:
    """The entry of a folder that differs from ``part`` in its spelling alone, and how."""
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
