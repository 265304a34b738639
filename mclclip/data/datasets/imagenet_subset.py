"""Builds a data set of classes of an ImageNet folder, named by WordNet id or by a list.

``in1p`` are the ten dog breeds of SimLAP's IN1P (appendix D.1). Its IN25, 25 classes in 5
superclasses, is printed as pictures only: write its list into a file.
"""

from __future__ import annotations

import re
from pathlib import Path

from mclclip.data.datasets.folder import class_folders, class_samples
from mclclip.data.datasets.sources import Sources, Splits, check_size

SUBSETS = {
    "in1p": {
        "n02085620": "Chihuahua",
        "n02087046": "toy terrier",
        "n02089867": "Walker hound",
        "n02089973": "English foxhound",
        "n02091831": "Saluki",
        "n02099849": "Chesapeake Bay retriever",
        "n02106550": "Rottweiler",
        "n02107142": "Doberman",
        "n02108089": "boxer",
        "n02109047": "Great Dane",
    }
}


def build(sources: Sources, seed: int, *, subset: str = "in1p", size: int | None = None) -> Splits:
    """``train/WNID/*`` and ``val/WNID/*`` of ``--source imagenet=FOLDER``, the latter as test.

    ``subset`` is ``in1p`` or a file with a WordNet id per line, which the name of its superclass
    may follow. Attributes: class (the id), and name or superclass. ``size``: see ``folder``.
    """
    check_size(size)
    if subset in SUBSETS:
        facts = {wnid: {"name": name} for wnid, name in SUBSETS[subset].items()}
    else:
        facts = read_list(Path(subset).expanduser())
    folder = sources.folder("imagenet")
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"no {folder / split}: wanted train/WNID/* and val/WNID/*")
    train, test = (class_folders(folder / split, [*facts]) for split in ("train", "val"))
    return {
        "train": class_samples(train, seed, size, facts),
        "test": class_samples(test, seed, size, facts),
    }


def read_list(path: Path) -> dict[str, dict[str, str]]:
    """WordNet id -> its facts, as ``subset`` says; empty lines and those with # are skipped.

    Raises FileNotFoundError, and ValueError for a line that begins otherwise and for an id that
    comes twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no subset {str(path)!r}: wanted {', '.join(SUBSETS)}, or a file")
    facts: dict[str, dict[str, str]] = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        wnid, _, superclass = line.strip().partition(" ")
        if not wnid or wnid.startswith("#"):
            continue
        if not re.fullmatch(r"n\d{8}", wnid) or wnid in facts:
            raise ValueError(
                f"{path} line {number} begins with {wnid!r}: wanted WordNet ids such as n02085620, "
                "each once"
            )
        facts[wnid] = {"superclass": superclass.strip()} if superclass.strip() else {}
    if not facts:
        raise ValueError(f"{path} names no class: wanted a WordNet id per line")
    return facts
