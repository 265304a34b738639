"""Packs some classes of an ImageNet folder, named by a list of their WordNet ids.

The list ``in1p`` has the ten dog breeds of SimLAP's IN1P (appendix D.1). The paper prints its IN25,
25 classes in 5 superclasses, only as pictures: to use it, write its list into a file.
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
    """Reads ``train/WNID/*``, and ``val/WNID/*`` as test, of ``--source imagenet=FOLDER``.

    ``subset`` is ``in1p`` or a file with a WordNet id on each line, after which the name of its
    superclass may stand. Attributes are class (the id), and name or superclass. ``size`` is as for
    the data set ``folder``.
    """
    check_size(size)
    if subset in SUBSETS:
        facts = {wnid: {"name": name} for wnid, name in SUBSETS[subset].items()}
    else:
        facts = read_list(Path(subset).expanduser())
    folder = sources.folder("imagenet")
    train, test = (class_folders(folder / split, [*facts]) for split in ("train", "val"))
    return {
        "train": class_samples(train, seed, size, facts),
        "test": class_samples(test, seed, size, facts),
    }


def read_list(path: Path) -> dict[str, dict[str, str]]:
    """Reads the file of a subset: {WordNet id: {'superclass': NAME} or {}}.

    Empty lines and those with # are skipped. Raises FileNotFoundError, and ValueError for another
    line and for an id that occurs twice.
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
