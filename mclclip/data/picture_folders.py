"""Reads a folder of pictures, with texts beside them, as a table; finds a table's pictures in it.

Every file in it is a picture, the text of a picture, or is counted in the findings.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from urllib.parse import unquote

from mclclip.data.decode import PICTURE_SUFFIXES, suffix_of
from mclclip.data.findings import Findings
from mclclip.data.shard_scan import MAX_TEXT_BYTES, TextFault, form_of_texts, parse_captions
from mclclip.data.table_formats import Format, Rows
from mclclip.util.files import Roots, read_bounded

log = logging.getLogger("mclclip")

_ABSOLUTE = re.compile(r"/|[A-Za-z]:/")
UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)
"""Numbers of errors of one file or folder, which too many open files are not."""


def walk(folder: Path, roots: Roots, findings: Findings) -> Iterator[Path]:
    """Yields the files below a folder in order, including linked folders that lie below ``roots``.
    Each folder is read once.

    Other linked folders, hidden files and unreadable folders are counted in the findings.
    """
    base = os.path.realpath(folder)
    inside, seen = Roots(Path(base)), {base}

    def enters(path: Path) -> bool:
        if path.is_symlink() and inside.real_path(path) is not None:
            return False  # a link within the folder leads to files that are read
        if path.is_symlink() and roots.real_path(path) is None:
            findings.add("linked_folder", os.path.relpath(path, folder))
            return False
        real = os.path.realpath(path)
        is_new = real not in seen  # a link to a folder above leads to this one again
        seen.add(real)
        return is_new

    def count_unreadable(error: OSError) -> None:
        if error.errno not in UNREADABLE:
            raise error
        findings.add("unreadable", os.path.relpath(error.filename, folder))

    for place, folders, names in os.walk(folder, followlinks=True, onerror=count_unreadable):
        bad = [name for name in (*folders, *names) if not _is_text(name)]
        paths = (os.path.relpath(Path(place, name), folder) for name in bad)
        findings.add("bad_name", *(os.fsencode(path).decode(errors="replace") for path in paths))
        folders[:], names = filter(_is_text, folders), [*filter(_is_text, names)]
        hidden = [name for name in (*folders, *names) if name.startswith(".")]
        findings.add("hidden", *(os.path.relpath(Path(place, name), folder) for name in hidden))
        folders[:] = [n for n in sorted(folders) if n[0] != "." and enters(Path(place, n))]
        for path in (Path(place, name) for name in sorted(names) if name[0] != "."):
            # Reading something else than a file, such as a pipe, may never end.
            if os.path.exists(path) and not os.path.isfile(path):
                findings.add("other_file", os.path.relpath(path, folder))
            else:
                yield path


def _is_text(name: str) -> bool:
    """Returns True if a file name is UTF-8; in Python other bytes are surrogates."""
    return name.encode(errors="replace").decode() == name


def _spellings(folder: str) -> dict[tuple[str, bool], list[str]]:
    """Returns the names of a folder's pictures by their composed (NFC) names, beside True, and by
    these without the suffix, beside False."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    spelt = defaultdict[tuple[str, bool], list[str]](list)
    for name in (name for name in names if suffix_of(name) in PICTURE_SUFFIXES):
        composed = unicodedata.normalize("NFC", name)
        spelt[composed, True].append(name)
        spelt[composed.rpartition(".")[0], False].append(name)
    return spelt


def find_pictures(
    names: Iterable[str],
    root: Path,
    table: Path,
    roots: Roots,
    ask: Callable[[str, Path], ValueError],
) -> dict[str, str]:
    """Returns the path below ``root`` of each picture that a table names, by its name.

    Names start from ``root``, or from the folder of the table within it: the first of them with a
    picture. A file:// url is the path in it. If neither has one, names may be absolute paths of
    another machine, which end like files below ``root``; or else each name is looked for in all
    sub-folders, as those of COCO's train2017. A name without a suffix is that of the only picture
    in its folder that it fits, and so is one whose accents macOS stores apart. Names that lead out
    of ``root`` stay, and so do those of missing pictures. Two spellings of one path give the same
    path.

    Raises the error of ``ask``, of a message and a folder, if a name has files in two sub-folders.
    """
    names = [name for name in names if "\0" not in name]
    base, pictures_in = os.path.abspath(root), cache(_spellings)
    beside = os.path.abspath(table if table.is_dir() else table.parent)

    def file_at(folder: str, name: str) -> str:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
        place, last = os.path.split(path)
        has_suffix = suffix_of(last) in PICTURE_SUFFIXES
        fitting = pictures_in(place).get((unicodedata.normalize("NFC", last), has_suffix), [])
        return os.path.join(place, fitting[0]) if len(fitting) == 1 else path

    for start in (base, *[beside] * beside.startswith(base + os.sep)):
        paths = {name: file_at(start, _plain_path(name)) for name in names}
        if any(map(os.path.isfile, paths.values())):
            return {name: _path_below(base, path, name) for name, path in paths.items()}
    if (elsewhere := _folder_elsewhere(names, root, roots, file_at)) is not None:
        log.info("%s names pictures in %s: they are read from %s", table, elsewhere, root)
        tails = {name: _plain_path(name).removeprefix(elsewhere) for name in names}
        return {n: _path_below(base, file_at(base, tail), n) for n, tail in tails.items()}
    bare = {os.path.basename(name) for name in names if not os.path.isabs(name)}
    places = defaultdict[str, list[str]](list)
    for path in walk(root, roots, Findings()) if bare else ():
        if path.name in bare:
            places[path.name].append(os.path.abspath(path))
    paths = {}
    for name in names:
        ends = os.path.join(os.sep, os.path.normpath(name))
        files = [path for path in places.get(os.path.basename(name), ()) if path.endswith(ends)]
        if len({os.path.realpath(path) for path in files}) > 1:
            folders = [root / os.path.relpath(path.removesuffix(ends), base) for path in files]
            raise ask(f"{name} is in {folders[0]} and in {folders[-1]}, choose one", folders[0])
        paths[name] = _path_below(base, files[0] if files else os.path.join(base, name), name)
    return paths


def _folder_elsewhere(
    names: Iterable[str], root: Path, roots: Roots, file_at: Callable[[str, str], str]
) -> str | None:
    """Returns the folder that absolute names begin with, where its pictures lie in ``root`` here:
    what they have behind it are files in ``root``. None if no name ends so.

    Of several such folders it is the one that the others lie in, or that is called like ``root``.
    Raises ValueError if there is no such.
    """
    base, folders = os.path.abspath(root), set[str]()
    names = [name for name in map(_plain_path, names) if _ABSOLUTE.match(name)]
    files = walk(root, roots, Findings()) if names else ()
    here = {name for path in files for name in (path.name, path.stem)}
    for name in names:
        if name.rpartition("/")[2] not in here:
            continue
        if any(os.path.isfile(file_at(base, name.removeprefix(f))) for f in folders):
            continue
        parts = name.split("/")
        for at in range(1, len(parts)):
            if os.path.isfile(file_at(base, os.path.join(*parts[at:]))):
                folders.add("/".join([*parts[:at], ""]))
                break
    if not folders:
        return None
    shortest = min(folders, key=len)
    alike = [each for each in folders if os.path.basename(each[:-1]) == os.path.basename(base)]
    if all(each.startswith(shortest) for each in folders):
        return shortest
    if len(alike) == 1:
        return alike[0]
    raise ValueError(
        f"the pictures in {' and '.join(sorted(folders)[:2])} have names of files in {root}: write "
        f"them as they lie in {root}"
    )


def _plain_path(name: str) -> str:
    """Returns the path of a file:// url, and an absolute path with single slashes; another name
    stays."""
    if name.startswith("file:/"):
        name = "/" + unquote(name.removeprefix("file:")).lstrip("/")
    return name[:1] + re.sub("/+", "/", name[1:]) if _ABSOLUTE.match(name) else name


def _path_below(base: str, path: str, name: str) -> str:
    path = os.path.normpath(path)
    return os.path.relpath(path, base) if path.startswith(base + os.sep) else os.path.normpath(name)


def folder_format(folder: Path, roots: Roots, elsewhere: TextsOf | None = None) -> Format:
    """Opens a folder of pictures as a table: the text of ``a.jpg`` is ``a.txt`` or ``a.jpg.txt``.

    ``elsewhere`` are the texts, if they do not lie beside the pictures. Every other file is counted
    in the findings.
    """
    place = folder if elsewhere is None else elsewhere.captions

    def texts() -> Iterator[bytes]:
        for path in walk(place, roots, Findings()):
            real = roots.real_path(path) if suffix_of(path) == "txt" else None
            if real is not None and real.is_file() and real.stat().st_size <= MAX_TEXT_BYTES:
                with suppress(OSError):  # it is counted where its caption is read
                    yield real.read_bytes()

    form = form_of_texts(texts(), str(place))

    def rows(findings: Findings) -> Rows:
        files = walk(folder, roots, findings)
        if elsewhere is not None:
            others = (p for p in elsewhere.walk(findings) if suffix_of(p) not in PICTURE_SUFFIXES)
            files = itertools.chain(files, others)
            yield from rows_with(files, elsewhere.texts, elsewhere.of, findings)
            return
        for _, group in itertools.groupby(files, key=lambda path: path.parent):
            beside = [*group]
            texts = {path.stem: path for path in beside if suffix_of(path) == "txt"}
            yield from rows_with(beside, texts.values(), partial(_first_of, texts), findings)

    def rows_with(
        files: Iterable[Path],
        texts: Collection[Path],
        text_of: Callable[[Path], Path | None],
        findings: Findings,
    ) -> Rows:
        unread, read = {*texts}, set()
        for path in files:
            name = os.path.relpath(path, folder)
            if suffix_of(path) in PICTURE_SUFFIXES:
                if (text := text_of(path)) is not None:
                    findings.add("shared_text", *[name] * (text in read))
                    read.add(text)
                captions_of = _read_captions(text, form, roots, name, findings)
                yield name, {"file_name": name, "text": captions_of}
            elif path not in unread:
                findings.add("other_file", name)
        for path in sorted(unread - read):
            findings.add("lone_text", os.path.relpath(path, folder))

    return Format({"file_name": "", "text": ""}, rows, fixed=("file_name", "text"))


def _first_of(texts: Mapping[str, Path], path: Path) -> Path | None:
    """Returns the text ``a`` or ``a.jpg`` of a picture ``a.jpg``."""
    return texts.get(path.stem, texts.get(path.name))


class TextsOf:
    """The texts below the folder ``captions``, which have the names of those below ``pictures``.

    The text of ``train/a.jpg`` is ``train/a.txt``, or ``a.txt`` if no other picture ends so. The
    text of ``a.jpg``, if no other picture ends so, is also the only ``a.txt`` in any sub-folder.
    """

    def __init__(self, pictures: Path, captions: Path, roots: Roots) -> None:
        inside, real = pictures.resolve(), captions.resolve()
        self._is_below = real.is_relative_to(inside)
        if self._is_below:  # its files have the paths that they have among the pictures
            captions = pictures / real.relative_to(inside)
        self.pictures, self.captions, self.roots = pictures, captions, roots
        files = walk(captions, roots, Findings())
        self.texts = [path for path in files if suffix_of(path) == "txt"]
        self._texts = {os.path.relpath(path.with_suffix(""), captions): path for path in self.texts}
        count = Counter(path.stem for path in self.texts)
        self._unique = {path.stem: path for path in self.texts if count[path.stem] == 1}
        files = walk(pictures, roots, Findings())
        self.files = [path for path in files if suffix_of(path) in PICTURE_SUFFIXES]
        self._ends = Counter(end for path in self.files for end in self._ends_of(path))

    def _ends_of(self, path: Path) -> list[str]:
        """Returns what the path of a picture ends with, the longest first, without its suffix and
        with it: ['b/a', 'b/a.jpg', 'a', 'a.jpg'] of b/a.jpg."""
        parts = Path(os.path.relpath(path, self.pictures)).parts
        ends = (os.path.join(*parts[at:]) for at in range(len(parts)))
        return [end for whole in ends for end in (os.path.splitext(whole)[0], whole)]

    def walk(self, findings: Findings) -> Iterator[Path]:
        """Yields the files of ``captions``, unless they lie among the pictures."""
        return iter(()) if self._is_below else walk(self.captions, self.roots, findings)

    def of(self, path: Path) -> Path | None:
        """Returns the text of a picture; None if it has none."""
        ends = self._ends_of(path)
        for number, end in enumerate(ends):
            if end in self._texts and (number < 2 or self._ends[end] == 1):
                return self._texts[end]
        is_alone = len(ends) == 2 and self._ends[ends[0]] == self._ends[ends[1]] == 1
        return _first_of(self._unique, path) if is_alone else None


def _read_captions(
    text: Path | None, form: str, roots: Roots, name: str, findings: Findings
) -> list[str]:
    """Reads the captions of the picture ``name`` from its ``text``.

    ``form`` is 'txt' (one caption) or 'lines' (one on each line).
    """
    if text is None:
        return []
    real = roots.real_path(text)
    try:
        if real is not None:
            return parse_captions(read_bounded(real, MAX_TEXT_BYTES), form)
        findings.add("outside_folder", f"the text of {name}")
    except TextFault as fault:
        findings.add(fault.reason, f"the text of {name}")
    except OSError:
        findings.add("unreadable", f"the text of {name}")
    return []


# --- names that are spelt otherwise on disk -------------------------------------------------------


def explain_missing(folder: Path, name: str) -> str | None:
    """Says how the missing file ``name`` is spelt in ``folder``; None if no file is called so.

    It may have another suffix, other capital letters, or another Unicode form, as macOS stores
    letters and accents apart.
    """
    place = folder
    for part in Path(name).parts:
        entries = sorted(place.iterdir()) if place.is_dir() else []
        alike = [e for e in entries if _spelling(part) in (_spelling(e.name), _spelling(e.stem))]
        exact = [entry for entry in alike if entry.name == part]
        if not alike:
            return None
        place = (exact or alike)[0]
    if place.exists() and place != folder / name:
        return f"{name} is there as {place}, with other letters, accents or another suffix"
    return None


def _spelling(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
