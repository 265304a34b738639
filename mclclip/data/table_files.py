"""Finds the files of a data set: of a folder, of a pattern, or one file.

If a folder holds several data sets or splits, the error says what to type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from glob import escape, glob
from pathlib import Path

from mclclip.data.decode import PICTURE_SUFFIXES
from mclclip.data.findings import LFS_POINTER, Findings
from mclclip.data.picture_folders import TextsOf, walk
from mclclip.data.shard_writer import refuse_unfinished
from mclclip.data.table_formats import DELIMITERS, KINDS, LINES, Ask
from mclclip.data.text_tables import is_table
from mclclip.util.files import Roots

_FEW = 100  # so many texts of a folder are looked at
_TABLES = (*(suffix for suffix in DELIMITERS if suffix != ".txt"), *LINES, ".json", ".parquet")
_SHARDED = (".arrow", ".tar", ".parquet")  # the first kind in a folder is read
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")
# The number of a file, such as -00001-of-00007, and the hash that Spark or the hub puts behind it.
_NUMBER = re.compile(r"[-_.]?\d+(-of-\d+)?(-[0-9a-f]{8,}.*)?$")


def find_files(path: Path, roots: Roots, ask: Ask) -> list[Path]:
    """Returns the files of the data set at a path or pattern, in order; none for a folder of
    pictures.

    Raises FileNotFoundError if there is none; ValueError for files of several data sets, for
    compressed ones, for pointers of git-lfs, and for shards that were not finished.
    """
    files = _list(path, roots, ask)
    refuse_unfinished(files)
    _refuse_compressed(files)
    return files


def _list(path: Path, roots: Roots, ask: Ask) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_folder(path, roots, ask)
    if "{" in str(path):
        from mclclip.data.shard_paths import expand_shards  # imports torch

        return [*map(Path, expand_shards(str(path), "images"))]
    files = [*map(Path, sorted(glob(str(path), recursive=True)))]
    if not files:
        raise FileNotFoundError(
            f"no {path}: wanted a folder of pictures or of shards, or a table ({', '.join(KINDS)})"
        )
    return files


def _files_of_folder(folder: Path, roots: Roots, ask: Ask) -> list[Path]:
    refuse_unfinished([folder / "*" / "*"])  # else in_progress.json is offered as a table
    splits = sorted(path.parent for path in folder.glob("*/state.json"))
    if splits:
        names = ", ".join(path.name for path in splits)
        raise ask(f"{folder} holds the splits {names}, choose one", min(splits, key=_not_train))
    by_suffix: dict[str, list[Path]] = {}
    findings = Findings()
    for path in walk(folder, roots, findings):
        by_suffix.setdefault(path.suffix.lower(), []).append(path)
    pictures = [path for suffix in PICTURE_SUFFIXES for path in by_suffix.get(f".{suffix}", [])]
    texts = {*by_suffix.get(".txt", [])}
    if any(
        beside in texts for p in pictures for beside in (p.with_suffix(".txt"), Path(f"{p}.txt"))
    ):
        return []
    sharded = next((by_suffix[suffix] for suffix in _SHARDED if suffix in by_suffix), [])
    tables = [path for suffix in _TABLES for path in by_suffix.get(suffix, [])]
    tables += _tables_among(sorted(texts), roots)
    stems = {path.stem for path in pictures}
    tables = [path for path in tables if path.suffix != ".json" or path.stem not in stems]
    tables = _likeliest_first(tables, folder)
    elsewhere = {path.parent for path in texts if path.stem in stems}
    if pictures:
        if tables:
            raise ask(
                f"{folder} holds pictures without texts beside them, and "
                f"{tables[0].relative_to(folder)}, which may be the table of their captions",
                "--captions", tables[0],
            )  # fmt: skip
        if elsewhere:
            place = Path(os.path.commonpath(elsewhere))
            raise ask(
                f"{folder} holds pictures without texts beside them, and texts of their names in "
                f"{place}: give the folder of the pictures alone, or, if these are their captions",
                "--captions", place,
            )  # fmt: skip
        if sharded:
            pattern = Path(escape(str(folder)), "**", f"*{sharded[0].suffix}")
            raise ask(f"{folder} holds pictures, and {sharded[0].name} too", pattern)
        return []
    if sharded:
        return _one_split(folder, sharded, ask)
    if tables:
        first = tables[0].relative_to(folder)
        raise ask(f"{folder} holds no pictures, but tables such as {first}", tables[0])
    there = [f"{len(paths)} {suffix or 'without a suffix'}" for suffix, paths in by_suffix.items()]
    facts = [*([f"it has {', '.join(there[:10])}"] if there else []), *findings.lines()]
    raise ValueError(
        f"{folder} holds no pictures ({', '.join(PICTURE_SUFFIXES)}), no table and no shards"
        f"{': ' * bool(facts)}{'; '.join(facts)}"
    )


def _tables_among(texts: Sequence[Path], roots: Roots) -> list[Path]:
    """Returns those of the first texts that are tables and can be read."""
    tables = []
    for path in texts[:_FEW]:
        with suppress(OSError):  # a link to nothing, or a text that may not be read
            if roots.real_path(path) is not None and is_table(path):
                tables.append(path)
    return tables


def _likeliest_first(tables: Sequence[Path], folder: Path) -> list[Path]:
    """Sorts tables in a folder: those of pictures first, of these those of a training split."""

    def rank(path: Path) -> tuple[bool, bool, Path]:
        is_other = "train" not in str(path.relative_to(folder))
        with suppress(OSError):  # it may not be read
            return path.suffix.lower() in DELIMITERS and not is_table(path), is_other, path
        return True, is_other, path

    return sorted(tables, key=rank)


def refuse_other_than_texts(texts: TextsOf, ask: Ask) -> None:
    """Raises ValueError if a folder of captions holds none of the pictures' texts; the message
    names a table in it, if there is one."""
    if any(map(texts.of, texts.files)):
        return
    files = [*walk(texts.captions, texts.roots, Findings())]
    tables = [path for path in files if path.suffix.lower() in _TABLES]
    alone = [path for path in files if path.suffix.lower() == ".txt"]
    tables += _tables_among(alone, texts.roots)
    if tables:
        table = _likeliest_first(tables, texts.captions)[0]
        raise ask(f"{texts.captions} holds the table {table.name}", "--captions", table)
    raise ValueError(
        f"none of the {len(alone)} texts in {texts.captions} has the name of a picture in "
        f"{texts.pictures}, such as a.txt for a.jpg"
    )


def _one_split(folder: Path, files: list[Path], ask: Ask) -> list[Path]:
    """Returns the files; raises ValueError if they are of several splits, by name or folder."""
    # The folder and the name of each split. Folders that are numbers are of one split.
    splits: dict[Path, tuple[Path, str]] = {}
    for path in files:
        parts = path.relative_to(folder).parent.parts
        place = folder.joinpath(*(part for part in parts if not part.isdigit()))
        name = _NUMBER.sub("", path.stem)
        deep = "[0-9]*/" * sum(map(str.isdigit, parts))
        splits.setdefault(place / name, (place, f"{deep}{escape(name)}*{path.suffix}"))
    if len(splits) > 1:
        names = ", ".join(str(split.relative_to(folder)) for split in sorted(splits))
        place, pattern = splits[min(splits, key=_not_train)]
        message = f"{folder} holds several data sets or splits ({names}), choose one"
        raise ask(message, Path(escape(str(place)), pattern))
    return files


def _not_train(split: Path) -> tuple[bool, Path]:
    return "train" not in split.name, split


def _refuse_compressed(files: Sequence[Path]) -> None:
    """Raises ValueError for compressed files and for pointers of git-lfs."""
    for path in files:
        if path.suffix.lower() in _COMPRESSED:
            raise ValueError(f"{path} is compressed: unpack it first, and give what comes out")
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{path} is a pointer of git-lfs, not the file itself: run 'git lfs pull' in "
                    "its repository"
                )
