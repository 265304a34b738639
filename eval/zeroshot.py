"""Zero-shot classification by class names, with prompt ensembling.

Source: Radford et al., CLIP (2021), section 3.1: a class is the mean of the unit text vectors of
its prompts, normalised again. Ties count against the model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mclclip.eval.features import Extractor, Features
from mclclip.eval.labelled_features import mean_per_class_figure
from mclclip.eval.labelled_folders import LabelledImages, read_folders, read_table
from mclclip.eval.metrics import hits_at
from mclclip.eval.prompts import find_names, find_templates, labels_of
from mclclip.eval.results import Figure, proportion
from mclclip.eval.retrieval import rank_queries
from mclclip.ranks.collectives import together

log = logging.getLogger("mclclip")


def _read(root: Path, table: str | None, classes: str | None) -> LabelledImages:
    names = find_names(labels_of(root, table), classes, root)
    shared = [name for name, count in Counter(names.values()).items() if count > 1]
    if shared:
        log.warning(
            "%d names stand for several classes, such as %r: their images tie and count as wrong",
            len(shared),
            shared[0],
        )
    return read_table(root / table, root, names) if table else read_folders(root, names)


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

    Images: a folder per class under ``root``, or ``labels``, a CSV filepath,label below it.
    ``classes`` names the classes (``prompts.find_names``: ``imagenet1k`` for folders called by
    WordNet ids, ``clip_benchmark:DATASET``, a file, or nothing where the labels are names), and
    ``templates`` the prompts (``prompts.find_templates``: ``clip_80`` are CLIP's for ImageNet).
    CLIP's names of ImageNet hold "missile" and "sunglasses" twice each. The images of those four
    classes tie, so top1 is 99.6 at most; published code gives half of the ties to the model.

    Raises ValueError and FileNotFoundError for names, templates and tables that do not fit
    (``prompts.check`` says so beforehand) and for images that cannot be read.
    """
    data = together(lambda: _read(Path(root), labels, classes))
    prompts = together(lambda: find_templates(templates, Path(root)))
    vectors = classifier(extractor, data.class_names, prompts)
    features = extractor.images(data.images)
    rows = np.arange(len(vectors), dtype=np.int64)
    ranks, optimistic = rank_queries(
        features, data.labels, vectors, rows, device=extractor.context.device
    )
    protocol = {
        "name": "zero_shot",
        "classes": classes or "labels",
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
