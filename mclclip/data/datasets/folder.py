"""Any folder of classes: ``train/CLASS/*`` and ``test/CLASS/*``, or ``CLASS/*`` split by seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mclclip.data.datasets.sources import (
    Sources,
    Splits,
    check_size,
    file_sample,
    in_random_order,
    suffix_of,
)
from mclclip.data.decode import IMAGE_EXTENSIONS
from mclclip.data.shard_writer import PackedSample

Classes = Mapping[str, Iterable[Path]]


def build(
    sources: Sources, seed: int, *, size: int | None = None, test_share: float = 0.2
) -> Splits:
    """The images of ``--source folder=FOLDER``; attribute class is the folder's name.

    Files are stored as they are; with ``size`` as PNG with a shorter side of so many pixels. Where
    there is no ``train`` and ``test``, this share of each class (rounded; at least one image of two
    or more, and never all) is drawn for the test set.
    """
    check_size(size)
    if not 0 < test_share < 1:
        raise ValueError(f"test_share is {test_share}: wanted more than 0 and less than 1")
    folder = sources.folder("folder")
    splits: Mapping[str, Classes]
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        splits = {split: class_folders(folder / split) for split in ("train", "test")}
    else:
        splits = _drawn(class_folders(folder), seed, test_share)
    return {split: class_samples(classes, seed, size) for split, classes in splits.items()}


def class_folders(folder: Path, only: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """The image files of every class below ``folder``, both sorted; hidden ones are ignored.

    ``only`` names the classes that are wanted. Raises ValueError for a class without images and
    where there is no class, FileNotFoundError for a wanted class that is not there.
    """
    found = {path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}
    names = sorted(found) if only is None else list(only)
    if missing := [name for name in names if name not in found]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(names)} classes have no folder in {folder}, such as "
            f"{missing[0]}"
        )
    if not names:
        raise ValueError(f"{folder} holds no folder: wanted one per class, with images in it")
    classes = {}
    for name in names:
        paths = sorted(p for p in (folder / name).iterdir() if p.name[0] != "." and p.is_file())
        classes[name] = [path for path in paths if suffix_of(path) in IMAGE_EXTENSIONS]
        if not classes[name]:
            raise ValueError(
                f"the class folder {folder / name} holds no image ({', '.join(IMAGE_EXTENSIONS)}): "
                "remove it, or put its images in"
            )
    return classes


def class_samples(
    classes: Classes,
    seed: int,
    size: int | None,
    facts: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[PackedSample]:
    """Samples in an order drawn by the seed; attribute class, and the ``facts`` of a class where
    there are."""
    named = ((name, path) for name, paths in classes.items() for path in paths)
    for number, (name, path) in enumerate(in_random_order(named, seed)):
        about = {"class": name, **(facts or {}).get(name, {}), "file": path.name}
        yield file_sample(number, path, about, size)


def _drawn(classes: Mapping[str, list[Path]], seed: int, share: float) -> dict[str, Classes]:
    train, test = {}, {}
    for number, (name, paths) in enumerate(classes.items()):
        wanted = min(max(1, round(share * len(paths))), len(paths) - 1)
        drawn = {*np.random.default_rng([seed, number]).permutation(len(paths))[:wanted].tolist()}
        train[name] = [path for place, path in enumerate(paths) if place not in drawn]
        test[name] = [path for place, path in enumerate(paths) if place in drawn]
    return {"train": train, "test": test}
