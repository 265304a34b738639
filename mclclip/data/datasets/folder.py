"""Any folder with a sub-folder for each class.

It is ``train/CLASS/*`` and ``test/CLASS/*``, or ``CLASS/*``, which is then split at random.
"""

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
)
from mclclip.data.decode import IMAGE_EXTENSIONS, suffix_of
from mclclip.data.shard_writer import PackedSample

Classes = Mapping[str, Iterable[Path]]


def build(
    sources: Sources, seed: int, *, size: int | None = None, test_share: float = 0.2
) -> Splits:
    """Reads the images of ``--source folder=FOLDER``; attribute class is the sub-folder's name.

    Files are stored unchanged, or, with a ``size``, as PNG whose shorter side has so many pixels.
    If there is no ``train`` and ``test``, ``test_share`` of each class is drawn for the test set:
    the number is rounded, is at least one for two images or more, and leaves one for training.
    """
    check_size(size)
    if not 0 < test_share < 1:
        raise ValueError(f"test_share is {test_share}: wanted more than 0 and less than 1")
    folder = sources.folder("folder")
    splits: Mapping[str, Classes]
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        splits = {split: class_folders(folder / split) for split in ("train", "test")}
    else:
        splits = _split(class_folders(folder), seed, test_share)
    return {split: class_samples(classes, seed, size) for split, classes in splits.items()}


def class_folders(folder: Path, only: Sequence[str] | None = None) -> dict[str, list[Path]]:
    """Lists the image files of every class below ``folder``, both sorted, without hidden ones.

    ``only`` names the classes to list; None: all. Raises ValueError if there is no class, or a
    class has no images, FileNotFoundError if a class of ``only`` is missing.
    """
    present = {path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."}
    names = sorted(present) if only is None else list(only)
    if missing := [name for name in names if name not in present]:
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
    """Yields samples in a random order; attributes class, and the ``facts`` of the class."""
    images = ((name, path) for name, paths in classes.items() for path in paths)
    for number, (name, path) in enumerate(in_random_order(images, seed)):
        about = {"class": name, **(facts or {}).get(name, {}), "file": path.name}
        yield file_sample(number, path, about, size)


def _split(classes: Mapping[str, list[Path]], seed: int, share: float) -> dict[str, Classes]:
    train, test = {}, {}
    for number, (name, paths) in enumerate(classes.items()):
        num_test = min(max(1, round(share * len(paths))), len(paths) - 1)
        order = np.random.default_rng([seed, number]).permutation(len(paths))
        drawn = {*order[:num_test].tolist()}
        train[name] = [path for place, path in enumerate(paths) if place not in drawn]
        test[name] = [path for place, path in enumerate(paths) if place in drawn]
    return {"train": train, "test": test}
