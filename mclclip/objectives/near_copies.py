"""Near copies: samples whose captions or pictures are so alike that they are no negatives.

In a batch of one group, where all samples are alike, many a negative is false: its caption is right
for the row's picture too. Such pairs are found by what stage 0 sees in them. Let c_pq be a cosine
of its stored embeddings: of two captions, of two pictures, or of the picture of one sample and the
caption of the other. Sample q is a near copy of p if

    threshold   c_pq > threshold; at a threshold of 1, if their cleaned captions, or the bytes of
                their pictures, are equal
    margin      c_pq >= c_pp - margin, where c_pp is the cosine of p's own picture and caption (up
                to 1e-5, by which fp32 rounds)

A near copy is left out of the negatives, or it is a further positive, whose weight in a soft target
is c_pq (1 where bytes are compared, and of a repeated sample).

Source: Solatorio, "GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding
Fine-tuning" (2024), arXiv:2402.16829, section 3 (there the margin is 0 and the guide is another
model). Soft targets: Gao et al., "SoftCLIP: Softer Cross-modal Alignment Makes CLIP Stronger"
(AAAI 2024), arXiv:2303.17561, section 3.2 (there every pair of the batch has a weight).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveFloat
from torch import Tensor

from mclclip.objectives.base import BatchFields, stored_name
from mclclip.objectives.pairs import Pairs
from mclclip.objectives.row_losses import count_columns
from mclclip.ranks import collectives
from mclclip.util.options import STRICT, each_once

Compared = Literal["captions", "pictures", "pairs"]
DIGESTS = {"captions": "caption_digest", "pictures": "picture_digest"}
"""The extras of a batch that tell equal captions (after open_clip's cleaning) and equal bytes of
pictures, int64 [b] each: samples that are equal have equal digests."""
_IMAGES, _TEXTS = "image_features", "text_features"
_ROUNDING = 1e-5  # of a cosine; so an equal caption is a near copy also with a margin of 0
# The embeddings of a row and those of a column that it is compared with.
_SIDES: dict[Compared, tuple[tuple[str, str], ...]] = {
    "captions": ((_TEXTS, _TEXTS),),
    "pictures": ((_IMAGES, _IMAGES),),
    "pairs": ((_IMAGES, _TEXTS), (_TEXTS, _IMAGES)),
}


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class NearCopies:
    """Which samples are near copies of each other, and what these are to each other."""

    threshold: PositiveFloat = 1.0
    """Samples with a larger cosine of stage 0's embeddings are near copies. 1 compares captions
    (after open_clip's cleaning) and the bytes of pictures instead, and reads no embeddings. Above
    1 there are none."""
    margin: NonNegativeFloat | None = None
    """In the place of the threshold: near copies of a sample have a cosine above the one of its own
    picture and caption, less this margin, such as 0.05."""
    of: Annotated[tuple[Compared, ...], Field(min_length=1), AfterValidator(each_once)] | None = (
        None
    )
    """What is compared, one of which suffices: ``captions``, ``pictures``, or ``pairs``, the
    picture of one sample with the caption of the other. null: captions and pictures; with a margin
    pairs; between views pictures."""
    role: Literal["masked", "positives"] = "masked"
    """``masked``: near copies are left out of each other's negatives; ``positives`` (of info_nce
    between captions, and sigmoid): they belong together, each by a weight that is its cosine."""

    def __post_init__(self) -> None:
        if self.margin is not None and self.threshold != 1.0:
            raise ValueError(
                f"threshold={self.threshold:g} and margin={self.margin:g} both say what is near: "
                "leave one out"
            )

    def resolved(self, *, views: bool) -> NearCopies:
        """Returns the same with ``of`` filled in, for a loss of captions or of views. Raises
        ValueError for what such a loss cannot compare."""
        default: tuple[Compared, ...] = ("pairs",)
        if self.margin is None:
            default = ("pictures",) if views else ("captions", "pictures")
        of = self.of or default
        if views and (self.margin is not None or of != ("pictures",)):
            raise ValueError(
                "near_copies between views compares pictures by a threshold, since views read no "
                f"captions: set of=[pictures] and a threshold (got of=[{', '.join(of)}])"
            )
        if self.by_bytes and "pairs" in of:
            raise ValueError(
                "near_copies: of=[pairs] compares pictures with captions, which are never equal: "
                "set a margin, or a threshold below 1"
            )
        return replace(self, of=of)

    @property
    def by_bytes(self) -> bool:
        """True if digests are compared, and no embeddings."""
        return self.margin is None and self.threshold == 1.0

    @property
    def digests(self) -> frozenset[str]:
        """Names of the digests that are compared, of ``DIGESTS``."""
        return frozenset(DIGESTS[each] for each in self.of or () if self.by_bytes)

    @property
    def base(self) -> frozenset[Any]:
        """Names of stage 0's embeddings that are read: 'image_features', 'text_features'."""
        if self.by_bytes:
            return frozenset()
        own_pair = {_IMAGES, _TEXTS} if self.margin is not None else set()
        return frozenset(
            own_pair.union(*(names for each in self.of or () for names in _SIDES[each]))
        )

    @property
    def encoders(self) -> frozenset[tuple[None, Any]]:
        """Returns what is read of stage 0, as ``Reads.encoders`` has it."""
        return frozenset((None, name) for name in self.base)


def pairs_of(
    batch: BatchFields, tile: int, near: NearCopies | None, *, num_rows: int | None = None
) -> Pairs:
    """Returns which samples of all ranks are negatives of which of this rank's samples.

    ``near`` are options with ``of`` filled in (`NearCopies.resolved`). With ``num_rows`` the batch
    is a global one, of which so many first samples are compared with all of it. A collective,
    unless ``num_rows`` is given.
    """
    groups, sample_id = batch.group_ids[:, 0], batch.sample_id
    gather = collectives.gather if num_rows is None else (lambda every: every)
    if num_rows is None:
        pairs = Pairs.over_ranks(groups, sample_id, tile)
    else:
        pairs = Pairs(groups[:num_rows], sample_id[:num_rows], groups, sample_id, 0, tile)
    if near is None:
        return pairs
    if near.by_bytes:
        digests = [batch.extras[name] for name in sorted(near.digests)]
        of_rows = tuple(each[:num_rows] for each in digests)
        return replace(pairs, digests=of_rows, all_digests=tuple(map(gather, digests)))
    extras = {name: batch.extras[stored_name(None, name)] for name in sorted(near.base)}
    rows = {name: each[:num_rows] for name, each in extras.items()}
    every = {name: gather(each) for name, each in extras.items()}
    sides = [names for each in near.of or () for names in _SIDES[each]]
    if near.margin is None:
        bounds = next(iter(rows.values())).new_full((len(pairs.groups),), near.threshold)
    else:
        bounds = (rows[_IMAGES] * rows[_TEXTS]).sum(dim=1) - near.margin - _ROUNDING
    return replace(
        pairs,
        base=tuple(rows[of_row] for of_row, _ in sides),
        all_base=tuple(every[other] for _, other in sides),
        bounds=bounds,
    ).keeping_near()


def count_near(pairs: Pairs) -> dict[str, Tensor]:
    """Returns ``near_copies``, how many near copies the samples of the global batch have in their
    groups: two copies of each other count twice. A collective."""
    rows = count_columns(replace(pairs, columns="near")).sum()
    return {"near_copies": collectives.all_reduce_sum(rows)}
