"""Zero-shot classification by class names, with prompt ensembling.

Source: Radford et al., CLIP (2021), section 3.1: a class is the mean of the unit text vectors of
its prompts, normalised again. Ties count against the model.
"""

from __future__ import annotations

import csv
import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mclclip.eval.features import Extractor, Features
from mclclip.eval.metrics import IntArray, hits_at, mean_per_class, stratified_interval
from mclclip.eval.results import Figure, proportion
from mclclip.eval.retrieval import rank_queries
from mclclip.parallel.collectives import together

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

TEMPLATES: dict[str, tuple[str, ...]] = {
    "simple": ("a photo of a {}.",),
    "bare": ("{}",),
    "clip_7": (
        "itap of a {}.",
        "a bad photo of the {}.",
        "a origami {}.",
        "a photo of the large {}.",
        "a {} in a video game.",
        "art of the {}.",
        "a photo of the small {}.",
    ),
}
"""Prompt sets by name; ``clip_7`` are the seven that CLIP's authors recommend for ImageNet."""

CLIP_BENCHMARK = "clip_benchmark:"


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes; ``labels`` [N] are rows of ``class_names`` [K]."""

    images: list[Path]
    labels: IntArray
    class_names: list[str]


def read_classes(path: Path) -> dict[str, str]:
    """A file of classes, one a line: ``LABEL`` or ``LABEL<TAB>class name``; label -> name.

    Without a name the label is it, underscores as spaces. ValueError for a label that stands twice.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file of classes at {path}")
    names: dict[str, str] = {}
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        label, tab, name = line.strip().partition("\t")
        if not label:
            continue
        if label in names:
            raise ValueError(f"{path} names the class {label!r} twice")
        names[label] = name.strip() if tab else _readable(label)
    return names


def _readable(label: str) -> str:
    return label.replace("_", " ")


def read_folders(root: Path, classes: Path | None = None) -> LabelledImages:
    """A folder per class under ``root``; names from the folders or from a file of classes."""
    folders = {
        path.name: path
        for path in sorted(Path(root).iterdir())
        if path.is_dir() and not path.name.startswith(".")
    }
    names = read_classes(classes) if classes else {label: _readable(label) for label in folders}
    pairs = [
        (path, label)
        for label, folder in folders.items()
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    return _labelled(pairs, names, str(root))


def read_table(path: Path, root: Path, classes: Path | None = None) -> LabelledImages:
    """A CSV (or .tsv) with the columns filepath (below ``root``) and label."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        if missing := [n for n in ("filepath", "label") if n not in (rows.fieldnames or [])]:
            raise ValueError(f"{path} has the columns {rows.fieldnames}, missing {missing}")
        pairs = [(Path(root) / row["filepath"], row["label"].strip()) for row in rows]
    labels = sorted({label for _, label in pairs})
    names = read_classes(classes) if classes else {label: _readable(label) for label in labels}
    return _labelled(pairs, names, str(path))


def _read(root: Path, labels: str | None, classes: str | None) -> LabelledImages:
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: zero-shot evaluation needs images")
    names = root / classes if classes else None
    return read_table(root / labels, root, names) if labels else read_folders(root, names)


def _labelled(
    pairs: Sequence[tuple[Path, str]], names: dict[str, str], where: str
) -> LabelledImages:
    if not pairs:
        raise ValueError(f"{where} has no images")
    if strangers := sorted({label for _, label in pairs} - names.keys()):
        raise ValueError(
            f"{where} has {len(strangers)} classes that the file of classes does not name, such as "
            f"{strangers[0]!r}"
        )
    row = {label: number for number, label in enumerate(names)}
    labels = np.array([row[label] for _, label in pairs], dtype=np.int64)
    return LabelledImages([path for path, _ in pairs], labels, list(names.values()))


def find_templates(templates: str | Sequence[str]) -> list[str]:
    """Prompt templates with ``{}`` where the class name goes.

    ``templates``: the templates themselves; a name of ``TEMPLATES``; ``clip_benchmark:DATASET``,
    the set that clip-benchmark ships for a data set (``imagenet1k``: CLIP's 80; needs the extra
    ``eval``); or a text file with one per line.
    """
    if not isinstance(templates, str):
        found = list(templates)
    elif templates in TEMPLATES:
        found = list(TEMPLATES[templates])
    elif templates.startswith(CLIP_BENCHMARK):
        found = _clip_benchmark_templates(templates.removeprefix(CLIP_BENCHMARK))
    elif Path(templates).is_file():
        found = [line for line in Path(templates).read_text("utf-8").splitlines() if line.strip()]
    else:
        raise ValueError(
            f"unknown templates {templates!r}: use {', '.join(TEMPLATES)}, clip_benchmark:DATASET, "
            f"a file with one per line, or a list"
        )
    if wrong := [template for template in found if template.count("{}") != 1]:
        raise ValueError(f"template {wrong[0]!r} must have one {{}} for the class name")
    if not found:
        raise ValueError(f"there are no templates in {templates!r}")
    return found


def _clip_benchmark_templates(dataset: str) -> list[str]:
    try:
        package = importlib.resources.files("clip_benchmark")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "templates of clip-benchmark need it: pip install mclclip[eval]"
        ) from error
    file = package / "datasets" / "en_zeroshot_classification_templates.json"
    sets = json.loads(file.read_text(encoding="utf-8"))
    if dataset not in sets:
        raise ValueError(f"clip-benchmark has no templates for {dataset!r}: {', '.join(sets)}")
    return [template.replace("{c}", "{}") for template in sets[dataset]]


def classifier(
    extractor: Extractor, class_names: Sequence[str], templates: Sequence[str]
) -> Features:
    """Unit class vectors [K, E]: the normalised mean of each class's unit prompt vectors."""
    prompts = [t.replace("{}", name) for name in class_names for t in templates]
    vectors = extractor.texts(prompts).astype(np.float64)
    means = vectors.reshape(len(class_names), len(templates), -1).mean(axis=1)
    norms = np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    unit: Features = (means / norms).astype(np.float32)
    return unit


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    labels: str | None = None,
    classes: str | None = None,
    templates: str | Sequence[str] = "simple",
) -> list[Figure]:
    """Zero-shot accuracy in percent: top1, top5 (where there are more than 5 classes), and
    ``mean_per_class`` (of top1, over the classes that have images).

    Images: a folder per class under ``root``, or ``labels``, a CSV filepath,label. ``classes``: a
    file of classes (``read_classes``); both lie below ``root``.
    """
    data = together(lambda: _read(Path(root), labels, classes))
    prompts = find_templates(templates)
    vectors = classifier(extractor, data.class_names, prompts)
    features = extractor.images(data.images)
    rows = np.arange(len(vectors), dtype=np.int64)
    ranks, optimistic = rank_queries(
        features, data.labels, vectors, rows, device=extractor.context.device
    )
    protocol = {
        "name": "zero_shot",
        "templates": templates if isinstance(templates, str) else "own",
        "num_templates": len(prompts),
        "num_classes": len(vectors),
        "precision": extractor.precision,
        "ties": "against the model",
        "tied_images": int(np.count_nonzero(ranks != optimistic)),
    }
    figures = [
        proportion(f"top{k}", hits_at(ranks, k), len(ranks), protocol)
        for k in (1, 5)
        if k == 1 or len(vectors) > k
    ]
    mean, shares, counts = mean_per_class(ranks == 1, data.labels)
    low, high = stratified_interval(shares, counts)
    percent = (100 * mean, len(ranks), 100 * low, 100 * high)
    return [*figures, Figure("mean_per_class", *percent, protocol)]
