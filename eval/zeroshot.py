"""Zero-shot classification by class names, with prompt ensembling.

Source: Radford et al., CLIP (2021), section 3.1: a class is the mean of the unit text vectors of
its prompts, normalised again. Ties count against the model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np

from mclclip.eval.datasets import labels_of, read_labelled
from mclclip.eval.features import Extractor, Features
from mclclip.eval.metrics import hits_at
from mclclip.eval.prompts import find_names, find_templates
from mclclip.eval.ranking import rank_queries
from mclclip.eval.results import Figure, class_mean, proportion
from mclclip.ranks.collectives import together

READS_TEXT = True  # whether images are compared with texts

log = logging.getLogger("mclclip")


def _warn(names: Mapping[str, str], classes: str | None) -> None:
    """Warns of class names that can be used but make the figures worse."""
    if shared := [name for name, count in Counter(names.values()).items() if count > 1]:
        log.warning(
            "%d names stand for several classes, such as %r: their images tie and count as wrong",
            len(shared),
            shared[0],
        )
    if classes is None and (numbers := [label for label in names if label.strip().isdecimal()]):
        shown = shorten(", ".join(numbers), 60, placeholder=" ...")
        log.warning(
            "%d of %d class names are bare numbers (%s), which prompts take for names: set "
            "classes=FILE with a line '%s<TAB>name' for each, unless numbers are what is shown",
            *(len(numbers), len(names), shown, numbers[0]),
        )


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
    root = Path(root)
    names = together(lambda: find_names(labels_of(root, labels), classes, root))
    if extractor.context.is_main:
        _warn(names, classes)
    data = together(lambda: read_labelled(root, names, labels))
    prompts = together(lambda: find_templates(templates, root))
    vectors = classifier(extractor, data.class_names, prompts)
    features = extractor.images(data.images)
    rows = np.arange(len(vectors), dtype=np.int64)
    ranks, optimistic = rank_queries(
        features, data.labels, vectors, rows, context=extractor.context
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
    return [*figures, class_mean("mean_per_class", ranks == 1, data.labels, protocol)]
