"""Zero-shot classification by class names, with prompt ensembling.

Source: Radford et al., CLIP (2021), section 3.1: the vector of a class is the mean of the unit text
features of its prompts, scaled to unit length. The metric of each data set is that of CLIP's table
9. Ties count against the model. CLIP's names for ImageNet hold "missile" and "sunglasses" twice
each, so the images of these four classes tie, and top1 is at most 99.6; published code counts half
of them as right.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from mclclip.eval import prompts
from mclclip.eval.classification import (
    Metric,
    area,
    area_figures,
    check_metric,
    mean_of_top1_and_top5,
    precision_figure,
    precisions,
    ranked_figures,
)
from mclclip.eval.features import Extractor, Features, rank_queries, similarity
from mclclip.eval.images import image_items, labels_of, read_labelled
from mclclip.eval.metrics import IntArray
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.prompts import Classes, find_names, find_templates
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Measurement
from mclclip.ranks.collectives import raise_on_every_rank

log = logging.getLogger("mclclip")


def _warn(names: Mapping[str, str], classes: Classes) -> None:
    """Warns of class names that lower the figures: names of several classes, and numbers."""
    if shared := [name for name, count in Counter(names.values()).items() if count > 1]:
        log.warning(
            "%d names stand for several classes, such as %r: their images tie and count as wrong",
            len(shared),
            shared[0],
        )
    numbers = {label: name for label, name in names.items() if name.strip().isdecimal()}
    if classes is None and numbers:
        some = shorten(", ".join(numbers.values()), 60, placeholder=" ...")
        log.warning(
            "%d of %d class names are bare numbers (%s), which prompts take for names: set "
            "classes=FILE with a line '%s<TAB>name' for each, unless numbers are what is shown",
            *(len(numbers), len(names), some, min(numbers)),
        )


def classifier(
    extractor: Extractor, class_names: Sequence[str], templates: Sequence[str]
) -> Features:
    """Returns unit vectors [K, E] of the classes: the means of the features of their prompts."""
    texts = [t.replace("{}", name) for name in class_names for t in templates]
    vectors = extractor.texts(texts).astype(np.float64)
    means = vectors.reshape(len(class_names), len(templates), -1).mean(axis=1)
    norms = np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    unit: Features = (means / norms).astype(np.float32)
    return unit


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    labels: str | None = None,
    classes: Classes = None,
    templates: str | Sequence[str] = "simple",
    metric: Metric = "accuracy",
) -> list[Measurement]:
    """Figures of zero-shot classification in percent.

    There are ``top1``, ``top5`` if there are more than 5 classes, and ``mean_per_class``, the mean
    of top1 over classes with images. ``metric`` is the headline, and may add a figure:
      - ``accuracy``: the headline is top1.
      - ``mean_of_top1_and_top5``: the mean of top1 and top5 (Kinetics700).
      - ``roc_auc``: the area under the ROC curve, for two classes (Hateful Memes).
      - ``map_11_point``: the mean over classes of the 11-point average precision, for images with
        several labels (PASCAL VOC 2007; ``read_labelled``). It is the only figure.

    labels     a table of labels below ``root``; None: a folder per class, or shards
    classes    the names of the classes (``prompts.find_names``), such as 'imagenet1k' for folders
               named by WordNet ids; None: labels are names
    templates  the prompts (``prompts.find_templates``), such as 'clip_80', CLIP's for ImageNet

    Raises ValueError and FileNotFoundError for names, templates, tables and metrics that do not
    fit, and for images that cannot be read.
    """
    root = Path(root)
    names = raise_on_every_rank(lambda: find_names(labels_of(root, labels), classes, root))
    raise_on_every_rank(lambda: check_metric(metric, len(names), labels))
    if extractor.context.is_main:
        _warn(names, classes)
    texts = raise_on_every_rank(lambda: find_templates(templates, root))
    protocol: dict[str, Any] = {
        "name": "zero_shot",
        "trials": "images",
        "classes": classes if isinstance(classes, str) else "own" if classes else "labels",
        "templates": templates if isinstance(templates, str) else "own",
        "num_templates": len(texts),
        "num_classes": len(names),
        "precision": extractor.precision,
        "ties": "against the model",
    }
    several = metric == "map_11_point"
    data = raise_on_every_rank(lambda: read_labelled(root, names, labels, several=several))
    vectors = classifier(extractor, data.class_names, texts)
    features, items = extractor.images(data.images), image_items(data.images, root)
    truth = data.labels.astype(np.int64, copy=False)
    if several:
        near = similarity(features, vectors, extractor.context.device)
        return [precision_figure(precisions(near, truth, items, [*names]), len(items), protocol)]
    rows = np.arange(len(truth))
    is_right = csr_array((np.ones(len(rows), bool), (rows, truth)), (len(rows), len(vectors)))
    ranks, optimistic = rank_queries(features, vectors, is_right, context=extractor.context)
    protocol |= {"tied_images": int(np.count_nonzero(ranks != optimistic))}
    figures = _of_ranks(ranks, items, truth, [*names], metric, protocol)
    if metric == "roc_auc":
        near = similarity(features, vectors, extractor.context.device).astype(np.float64)
        figures = area_figures(area(near[:, 1] - near[:, 0], truth == 1, items), protocol) + figures
    return figures


def _of_ranks(
    ranks: IntArray,
    items: Sequence[str],
    labels: IntArray,
    classes: Sequence[str],
    metric: Metric,
    protocol: Mapping[str, Any],
) -> list[Measurement]:
    """The figures of images with one label each, from the rank [N] of each image's class.

    ``labels`` [N] are numbers of ``classes``.
    """
    first, chance = ranks <= 1, 100 / len(classes)
    outcomes = {"top1": (Outcomes(items, first), chance)}
    if len(classes) > 5:
        outcomes["top5"] = (Outcomes(items, ranks <= 5), 500 / len(classes))
        if metric == "mean_of_top1_and_top5":
            both = mean_of_top1_and_top5(ranks, items)
            outcomes = {metric: (both, 300 / len(classes))} | outcomes
    by_class = Outcomes(items, first, strata=[classes[n] for n in labels])
    outcomes["mean_per_class"] = (by_class, chance)
    return ranked_figures(outcomes, "top1" if metric == "accuracy" else metric, protocol)


EVALUATOR = Evaluator(
    evaluate,
    needs="a folder of images per class, such as cat/1.jpg, or images and a table (option labels)",
    reads_text=True,
    check=prompts.check,
)
