"""MLCD: each image is told from the centers of other clusters, and drawn to several of its own.

Let s_ij be ``scale`` times the cosine of image i and the learned center of class j (with ``margin``
if j is positive), P_i the sum of exp(-s_ij) over the positive classes of row i, and N_i the sum of
exp(s_ij) over its negatives. The three kinds are means over the rows of

    mlcd           log(1 + P_i) + log(1 + N_i)    (Eq. 5 and 6: each sum by itself)
    mlc            log(1 + P_i N_i)               (Eq. 4: coupled)
    single_label   mlc of the nearest class alone, which is softmax cross-entropy

Positives are the l clusters of the stage before that are nearest to the sample, or its value of an
attribute. Negatives are drawn at every step: a share ``sample_rate`` of all classes.

Source: An et al., "Multi-Label Cluster Discrimination for Visual Representation Learning" (MLCD,
ECCV 2024), arXiv:2407.17331, Eq. 4 to 6; its authors have published no code of the loss.
``single_label`` is the loss of An et al., "Unicom: Universal and Compact Representation Learning
for Image Retrieval" (ICLR 2023), arXiv:2304.05884, and of An et al., "Partial FC: Training 10
Million Identities on a Single Machine" (2020), arXiv:2010.05222. Where the paper is silent (scale,
side of the margin, how negatives are drawn) the choices are options.

Inputs: ``image_features`` [b, D] of this rank, unit length; ``classes`` [b, l], nearest first, -1
for none. Captions and groups are not read.

Use it for images in many clusters, up to millions: each rank holds a part of the centers, and
memory is linear in the batch. ``single_label`` with an ``attribute`` and ``centers: normal``
fine-tunes on labels.

Relations: ``supcon`` compares samples of a class with each other, and has no centers. MCL draws
batches from the same clusters; here they are predicted.

Example: ``train.objective={kind: mlcd, labels_per_sample: 8, sample_rate: 0.1}``.

Its slow reference is ``class_centers`` (``dense_loss``) in tests/objective_loops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
)
from mclclip.objectives.class_centers import Margin, ShardedClassCenters, class_sums, normal_rows
from mclclip.objectives.products import EXACT, ProductPrecision, Products, choose_products
from mclclip.objectives.row_losses import softplus_of_difference, to_fp32
from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.util.options import STRICT, Cosine, Share
from mclclip.util.randomness import mix, permute

Kind = Literal["mlcd", "mlc", "single_label"]
_SATURATED = 0.01  # a row is saturated if its pull is below this share of the largest
_LARGE = 65_536  # four rounds mix a permutation of at least so many classes well
_LARGEST_SCALE = 256.0  # so that exp(scale * (1 + pi / 2)), with the widest margin, fits a float64


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Images against the centers of the clusters of the stage before; captions are not read."""

    kind: Kind = "mlcd"
    """``mlcd``: one term for positive classes and one for negative ones (MLCD, Eq. 5 and 6);
    ``mlc``: both coupled in one (Eq. 4); ``single_label``: softmax with the nearest class as the
    label (UNICOM, PartialFC)."""
    labels_per_sample: PositiveInt = 8
    """How many nearest clusters are a sample's positives."""
    attribute: str | None = None
    """Attribute of the samples that is their class, to fine-tune on labels (set ``centers: normal``
    too); null: their clusters at the stage before."""
    threshold: Cosine | None = None
    """Clusters of a smaller similarity are not positives, but for the nearest."""
    scale: Annotated[float, Field(gt=0.0, le=_LARGEST_SCALE)] = 64.0
    """Multiplier of cosines in the loss, at most 256."""
    margin: Literal["arc", "cos", "none"] = "arc"
    """Margin of positives: added to the angle (``arc``, ArcFace), subtracted from the cosine
    (``cos``, CosFace), or ``none``."""
    margin_size: Annotated[float, Field(ge=0.0, le=math.pi / 2)] = 0.3
    """Size of the margin, in radians (``arc``) or as a cosine (``cos``)."""
    margin_gradient: Literal["exact", "straight_through"] = "exact"
    """``straight_through`` takes the margin's derivative as 1, as PartialFC's code does."""
    sample_rate: Share = 0.1
    """Share of the classes that are drawn as negatives of a step."""
    negatives: Literal["two_path", "exclude_positives", "partial_fc"] = "two_path"
    """Negatives of a row: ``two_path``: the drawn classes but for its own positives;
    ``exclude_positives``: those of them that are positive for no row of the batch; ``partial_fc``:
    the batch's positives, filled up with drawn classes to the share ``sample_rate``."""
    centers: Literal["centroids", "normal"] = "centroids"
    """Class centers at the start: the clusters' centroids, or random numbers with a standard
    deviation of 0.01."""
    class_centers: ProductPrecision = "auto"
    """Precision of products with class centers: ``auto``: bf16 with sums in fp32 on a GPU under
    ``precision`` bf16 or fp16; ``fp32``: always fp32. Margins, sums of exponentials and the steps
    of class centers are fp32."""
    lazy: bool = False
    """True: only class centers that a step touches move, each with its own step count; false: all
    move, as with any AdamW."""
    lr_scale: PositiveFloat = 1.0
    """Factor of the learning rate for class centers."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of class centers (their length does not matter to the loss)."""

    def __post_init__(self) -> None:
        if self.kind != "mlcd" and self.sample_rate == 0.0:
            raise ValueError(f"{self.kind} without negatives has no gradient: raise sample_rate")
        if self.attribute is not None and self.threshold is not None:
            raise ValueError(
                f"threshold={self.threshold} is of clusters, and attribute={self.attribute} takes "
                "none: leave one of them out"
            )
        if self.attribute is not None and self.centers == "centroids":
            raise ValueError(
                f"the values of attribute={self.attribute} have no centroids for class centers to "
                "start from: set centers=normal"
            )

    @property
    def reads(self) -> Reads:
        """Reads the nearest clusters of each sample, or the attribute."""
        if self.attribute is not None:
            return Reads(attribute=self.attribute)
        return Reads(
            clusters=self.labels_per_sample,
            centroids=self.centers == "centroids",
            drawn=self.sample_rate or None,
            threshold=self.threshold,
        )

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the loss with new class centers, of which each rank holds a part."""
        assert inputs.classes is not None
        classes, dim = inputs.classes, inputs.model.feature_dim
        rate, seed = self.sample_rate, inputs.seed

        def centroid_rows(start: int, stop: int) -> Tensor:
            return torch.from_numpy(np.array(classes.centroids()[start:stop]))  # copied from a file

        initial = centroid_rows if self.centers == "centroids" else normal_rows(dim, seed)
        centers = ShardedClassCenters(
            classes.num_classes,
            dim,
            None if inputs.shapes_only else initial,
            context=inputs.context,
            draw=None if rate == 1.0 else negative_draw(classes.num_classes, rate, seed),
            rule=self.negatives,
            lr_scale=self.lr_scale,
            weight_decay=self.weight_decay,
            betas=inputs.betas,
            eps=inputs.eps,
            lazy=self.lazy,
            dtype=inputs.dtype,
        )
        margin = Margin(self.margin, self.margin_size, self.margin_gradient)
        products = choose_products(self.class_centers, inputs.precision, inputs.context.device)
        return ClassCenterLoss(
            centers, self.kind, scale=self.scale, margin=margin, products=products
        )


def negative_draw(
    num_classes: int, sample_rate: float, seed: int
) -> Callable[[int], npt.NDArray[np.int64]]:
    """Returns a function of the step that draws the classes which serve as its negatives, int64
    [round(sample_rate * num_classes)].

    They are the first classes of a permutation that depends on seed and step alone, so any number
    of ranks and a resumed run draw the same. Raises ValueError if so small a rate draws none.
    """
    positions = np.arange(round(sample_rate * num_classes))
    rounds = 4 if num_classes >= _LARGE else 16
    if sample_rate > 0.0 and not len(positions):
        raise ValueError(
            f"sample_rate is {sample_rate}, which draws none of {num_classes} classes as "
            f"negatives: wanted at least {1 / num_classes:.2g}"
        )
    return lambda step: permute(positions, num_classes, mix(seed, step), rounds)


class ClassCenterLoss(Objective):
    """The loss of image features against class centers, over the global batch.

    The class centers are not parameters of this module: engines do not wrap them, and they have an
    optimizer of their own. Scores are computed in tiles of at most ``tile`` rows and columns.
    """

    def __init__(
        self,
        centers: ShardedClassCenters,
        kind: Kind = "mlcd",
        *,
        scale: float = 64.0,
        margin: Margin | None = None,
        tile: int | None = None,
        products: Products = EXACT,
    ) -> None:
        super().__init__()
        self.centers, self.kind, self.scale, self.tile = centers, kind, scale, tile
        self.products = products
        self.margin = margin or Margin()

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Returns the class centers."""
        return [self.centers]

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Computes the loss of the global batch, on every rank alike.

        Args:
            features: `image_features` [b, D], unit length, of this rank. All ranks have the same b.
            batch: `classes` [b, l], the positive classes of each sample, nearest first; -1: none.

        Returns:
            `loss`: mean over the rows of the global batch that have a positive class. Averaging
            parameter gradients over ranks, as DDP does, gives the global gradient.

            Further parts, whose mean over the ranks (the largest, if `max` is in their names) is
            that of the global batch: `positive_loss` and `negative_loss`, means of log(1 + P) and
            log(1 + N) (``mlcd`` only); `positive_cosine`, their mean; `max_negative_cosine`;
            `saturated_share`, rows whose positives together pull with less than 1 % of the most
            they could; `positives_per_row`; `distinct_positives`, the number of classes that are
            positive for some row; `conflicts`, the number of these that were also drawn as
            negatives.

        The arithmetic is fp32 (float64 for float64 features), under autocast too, but for
        ``products`` in bf16.
        """
        classes = batch.classes
        assert classes is not None
        if self.kind == "single_label":
            classes = classes[:, :1]
        log_p, log_n, has_label, figures = class_sums(
            to_fp32(features["image_features"]),
            classes,
            self.centers,
            scale=self.scale,
            margin=self.margin,
            tile=self.tile,
            products=self.products,
        )
        num_rows = has_label.to(log_p.dtype).sum().clamp_min(1.0)

        def mean(terms: Tensor) -> Tensor:
            return torch.where(has_label, terms, torch.zeros_like(terms)).sum() / num_rows

        terms: dict[str, Tensor] = {}
        if self.kind == "mlcd":
            positive = mean(softplus_of_difference(log_p))
            negative = mean(softplus_of_difference(log_n))
            loss, pull = positive + negative, log_p
            terms = {"positive_loss": positive.detach(), "negative_loss": negative.detach()}
        else:
            pull = log_p + log_n
            loss = mean(softplus_of_difference(pull))
        saturated = torch.sigmoid(pull.detach()) < _SATURATED
        terms["saturated_share"] = mean(saturated.to(loss.dtype)).detach()
        return {"loss": loss} | terms | figures
