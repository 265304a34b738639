"""Zero-shot classification by class names, with prompt ensembling.

Source: Radford et al., CLIP (2021), section 3.1: a class is the mean of the unit text vectors of
its prompts, normalised again. Ties count against the model.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mclclip.eval.features import Extractor, Features
from mclclip.eval.labelled_features import mean_per_class_figure
from mclclip.eval.labelled_folders import LabelledImages, read_folders, read_table
from mclclip.eval.metrics import hits_at
from mclclip.eval.results import Figure, proportion
from mclclip.eval.retrieval import rank_queries
from mclclip.parallel.collectives import together

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


def _read(root: Path, labels: str | None, classes: str | None) -> LabelledImages:
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: zero-shot evaluation needs images")
    names = root / classes if classes else None
    return read_table(root / labels, root, names) if labels else read_folders(root, names)


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
    return [*figures, mean_per_class_figure(ranks == 1, data.labels, protocol)]
