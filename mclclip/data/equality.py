"""Equal captions and equal pictures of a batch: digests that tell them, and how many there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.data.batches import TrainingBatches
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import RawSample, cut_text

Integers = npt.NDArray[np.int64]
log = logging.getLogger("mclclip")
_MOST_READ = 4096  # captions that are read before training, to count equal ones


@dataclass(eq=False)
class EqualityDigests:
    """The extras ``caption_digest`` and ``picture_digest`` of a sample, 0-dimensional int64.

    ``clean`` is open_clip's cleaning of a caption; of a long one its first 4,096 visible characters
    count. The picture is told by its bytes, and where it is not read (``index`` is given, and rows
    of the trunk's cache stand for pictures) by the checksum and the size of its bytes in the index.
    """

    clean: Callable[[str], str]
    index: SampleIndex | None = None
    reads_text: bool = True

    def __post_init__(self) -> None:
        if self.index is not None:
            check_checksums(self.index)

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """The digests of the drawn caption and of the picture."""
        if self.index is None:
            picture = _digest(raw.image)
        else:
            picture = int(_picture_marks(self.index, np.array([raw.sample_id]))[0])
        caption = caption_digest(captions[caption_number], self.clean)
        return {
            "caption_digest": torch.tensor(caption),
            "picture_digest": torch.tensor(picture),
        }


def check_checksums(index: SampleIndex) -> None:
    """Raises ValueError where the index does not tell equal pictures."""
    if index.image_crc32 is None:
        raise ValueError(
            "train.objective.equal_captions tells equal pictures by their checksums where the "
            f"trunk's cache is read, and {index.directory} has none: run 'mclclip index' with "
            "data.verify=full, which adds them"
        )


def caption_digest(caption: str, clean: Callable[[str], str]) -> int:
    """64 bits of the caption after cleaning, as a signed number."""
    return _digest(clean(cut_text(caption)).encode(errors="surrogatepass"))


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


def _picture_marks(index: SampleIndex, sample_ids: Integers) -> Integers:
    """Numbers int64 [n] that are equal where the pictures have equal checksums and sizes."""
    assert index.image_crc32 is not None
    sizes = index.image_size[sample_ids].astype(np.int64) & 0x7FFFFFFF
    marks: Integers = sizes << 32 | index.image_crc32[sample_ids].astype(np.int64)
    return marks


# --- coverage ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EqualRows:
    """Equal rows of global batches, within groups: the means over ``num_batches`` of the number of
    pairs and of the share of rows that have an equal one, of ``num_rows`` rows of each; and
    ``all_pairs``, equal or not."""

    num_batches: int
    num_rows: int
    pairs: float
    share: float
    all_pairs: float


def equal_rows(
    batches: TrainingBatches, clean: Callable[[str], str]
) -> tuple[EqualRows, EqualRows | None]:
    """Rows with equal captions, and rows with equal pictures (None: the index has no checksums).

    Exact for the batches that are counted, which are spread over the first epoch, but for samples
    that turn out to be unusable. Their captions are read from the shards, at most 4,096: of larger
    batches every n-th row. Raises the errors of ``TarDataset.captions_of``.
    """
    plan, dataset = batches.plan(0), batches.dataset
    num = min(plan.steps_per_epoch, max(1, _MOST_READ // plan.global_batch))
    every_nth = -(-plan.global_batch // _MOST_READ)
    captions, pictures = [], []
    for step in np.arange(num) * plan.steps_per_epoch // num:
        planned = plan.batch(int(step))
        numbers = batches.caption_numbers(planned.ids, 0, planned.occurrence)[::every_nth].tolist()
        parts = batches.sentence_draws(planned.ids, 0, planned.occurrence)[::every_nth]
        ids, labels = planned.ids[::every_nth], planned.labels[::every_nth]
        drawn = zip(dataset.captions_of(ids.tolist()), numbers, parts, strict=True)
        texts = [part(own[n]) if part else own[n] for own, n, part in drawn]
        digests = [caption_digest(text, clean) for text in texts]
        captions.append(_counted(labels, np.array(digests)))
        if dataset.index.image_crc32 is not None:
            pictures.append(_counted(labels, _picture_marks(dataset.index, ids)))
    num_rows = -(-plan.global_batch // every_nth)
    means = [np.mean(found, axis=0) for found in (captions, pictures) if found]
    of_captions, *of_pictures = [EqualRows(num, num_rows, *mean.tolist()) for mean in means]
    return of_captions, of_pictures[0] if of_pictures else None


def _counted(labels: Integers, marks: Integers) -> tuple[float, float, float]:
    """Pairs of rows with one label and one mark, the share of the rows that are in one, and pairs
    of rows with one label."""
    counts = np.unique(np.stack([labels, marks]), axis=1, return_counts=True)[1]
    pairs, all_pairs = (
        float((n * (n - 1)).sum() / 2) for n in (counts, np.unique(labels, return_counts=True)[1])
    )
    return pairs, float(counts[counts > 1].sum() / len(labels)), all_pairs


def report_equal(batches: TrainingBatches, clean: Callable[[str], str]) -> None:
    """Logs ``equal_rows``, or why they are not known."""
    try:
        both = equal_rows(batches, clean)
    except (RuntimeError, OSError) as error:
        log.info("coverage of equal captions is not known: %s", error)
        return
    for name, found in zip(("captions", "pictures"), both, strict=True):
        if found is None:
            log.info("coverage of equal pictures is not known: data.verify=full indexes checksums")
            continue
        log.info(
            "coverage of equal %s: of %s rows of a global batch %.1f pairs, with %.1f %% of the "
            "rows, counted in %s of the %s batches of an epoch",
            name, f"{found.num_rows:,}", found.pairs, 100 * found.share,
            f"{found.num_batches:,}", f"{batches.steps_per_epoch:,}",
        )  # fmt: skip
        if 0 < found.pairs == found.all_pairs:
            log.warning(
                "all rows of a batch have equal %s, so that nothing tells their pairs apart and "
                "nothing is learned: see data.sources.NAME.captions and the data (mclclip doctor "
                "--data)", name,
            )  # fmt: skip
