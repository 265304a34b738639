"""Adds more tensors to every sample of a training, beside its picture and its caption.

`BaseFeatures` adds stored embeddings of stage 0 and of teachers. `EditedCaptions` adds captions
that are wrong for the picture: edits of the drawn caption by the rules of ``caption_rules``, or
texts of a field of the sample's ``.json``. If there are too few, the right caption fills their
places, and a mask says where. `EqualityDigests` adds numbers that are equal for equal captions and
pictures.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.data.bytes import Bytes, RawSample
from mclclip.data.locations import CAPTION
from mclclip.data.options import DataConfig
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Tokenizer, cut_text, tokenize
from mclclip.data.shard_scan import caption_fields, parse_captions
from mclclip.run.artifacts import RunPaths, is_finished, read_manifest
from mclclip.util.caption_rules import HardCaptions, draw, false_edits, spoken
from mclclip.util.files import digest_of_64_bits, printable

log = logging.getLogger("mclclip")
SURVEYED = 512
"""Number of samples that are searched for edits before a training."""


class BaseFeatures:
    """Adds stored embeddings of a sample, float32 of unit length.

    ``read`` has for each name an encoder (None: stage 0's) and what is read of it: 'image_features'
    [D], which are of the centre crop, or 'text_features' [D] of the drawn caption. Stage 0's
    ``edited_features`` [h, D] of h edits of the drawn caption come if ``edits`` are given; rows of
    missing edits are zeros. Raises FileNotFoundError if ``mclclip embed`` has not written them, and
    RuntimeError if another encoder wrote them.
    """

    reads_text = False

    def __init__(
        self,
        layout: RunPaths,
        index: SampleIndex,
        read: Mapping[str, tuple[str | None, str]],
        edits: HardCaptions | None = None,
    ) -> None:
        self._edits: StoredRows | None = None
        self._stored = dict[str, StoredRows]()
        for name, source in read.items():
            self._stored[name] = _open_embeddings(layout, index, *source)
        if edits is not None:
            self._edits = StoredRows(directory_of(layout, edits), index)
            self._per_caption = edits.per_caption

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """Reads the embeddings of one sample."""
        stored = {n: rows.get(raw.sample_id, caption_number) for n, rows in self._stored.items()}
        if self._edits is not None:
            rows = self._edits.get(raw.sample_id, caption_number)
            stored["edited_features"] = rows.reshape(self._per_caption, -1)
        return {
            name: functional.normalize(torch.from_numpy(row.astype(np.float32)), dim=-1)
            for name, row in stored.items()
        }


def embeddings_of(layout: RunPaths, encoder: str | None, what: str) -> tuple[Path, str]:
    """Returns folder and kind of the stored embeddings of an encoder (None: stage 0's).

    ``what`` is 'image_features' or 'text_features'. Raises FileNotFoundError if those of a teacher
    are not finished.
    """
    kind = "embeddings" if what == "image_features" else "text_embeddings"
    folder = layout.encoder(encoder) / kind
    if encoder is not None and not is_finished(folder):
        raise FileNotFoundError(
            f"no finished {kind} at {folder}: run 'mclclip embed --encoder {encoder}' first"
        )
    return folder, kind


def _open_embeddings(
    layout: RunPaths, index: SampleIndex, encoder: str | None, what: str
) -> StoredRows:
    folder, kind = embeddings_of(layout, encoder, what)
    rows = StoredRows(folder, index, kind)
    export = layout.encoder(encoder) / "export"
    if encoder is not None:
        made_by = read_manifest(folder, kind).inputs["encoder"]
        if made_by != read_manifest(export, "teacher").digest:
            raise RuntimeError(
                f"{folder} was made by another encoder than {export}: run 'mclclip embed --encoder "
                f"{encoder} --force'"
            )
    return rows


def directory_of(layout: RunPaths, edits: HardCaptions | None) -> Path:
    """Returns the folder of the embeddings of edited captions; for None that of all captions."""
    return layout.text_embeddings if edits is None else layout.edited_texts(edits.drawn_by)


@dataclass
class EditedCaptions:
    """Adds ``edited_text``, int64 [h, context], and ``has_edit``, bool [h], to every sample.

    h is ``options.per_caption``. Which edits are drawn depends only on the sample's random key.
    """

    options: HardCaptions
    tokenizer: Tokenizer
    reads_text: bool = True

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """Tokenizes the edits of the drawn caption, filled up with the caption itself."""
        texts = draw_edits(self.options, raw.text, captions, caption_number, key)
        num = self.options.per_caption
        padded = texts + [captions[caption_number]] * (num - len(texts))
        tokens = tokenize(self.tokenizer, padded)
        return {"edited_text": tokens, "has_edit": torch.arange(num) < len(texts)}


def draw_edits(
    options: HardCaptions, member: bytes, captions: Sequence[str], caption_number: int, key: int
) -> list[str]:
    """Draws at most ``options.per_caption`` captions that are wrong for the picture of a sample.

    ``member`` is its .json, which may have them in a field. Texts of that field that are also
    captions of the sample do not count.
    """
    if options.field is None:
        edits = draw(options.rule_names, captions, caption_number, key, options.per_caption)
        return [edit.text for edit in edits]
    true = {*map(spoken, captions)}
    texts = dict.fromkeys(_texts_of(options.field, member))
    wrong = [text for text in texts if spoken(text) not in true]
    start = key % max(len(wrong), 1)
    return (wrong[start:] + wrong[:start])[: options.per_caption]


def _texts_of(field: str, member: bytes) -> list[str]:
    """Returns the texts of a field of a .json; none if it is missing or of another type."""
    try:
        return parse_captions(member, f"json:{field}")
    except ValueError:
        return []


def report_edits(wanted: HardCaptions, index: SampleIndex, data: DataConfig, option: str) -> None:
    """Logs which share of the captions has an edit, by rule, in up to ``SURVEYED`` samples.

    The samples are evenly spaced in the index. ``option`` names the training in messages, such as
    'train'. Raises ValueError if no caption has an edit, and for a field that cannot be read.
    """
    where = f"{option}.objective.hard_captions"
    for shard in index.shards:
        if wanted.field is not None and not caption_fields(shard.captions):
            raise ValueError(
                f"{where}.field={wanted.field} is of the samples' .json, and data.sources."
                f"{shard.source}.captions=txt reads their .txt: set it to json:FIELD, such as "
                "json:caption"
            )
    with_captions = np.flatnonzero(index.num_captions)
    step = max(len(with_captions) // SURVEYED, 1)
    read = Bytes(index, data)
    fitting, counts, num_captions, with_field, example = 0, Counter[str](), 0, 0, None
    raws = read.read(with_captions[::step][:SURVEYED], [CAPTION])
    for raw in raws:
        if not isinstance(raw, RawSample):
            continue
        captions = read.captions_in(raw)
        with_field += wanted.field is not None and bool(_texts_of(wanted.field, raw.text))
        for number, caption in enumerate(captions):
            num_captions += 1
            fits = [r for r in wanted.rule_names if false_edits(r, captions, number)]
            counts.update(fits)
            edits = draw_edits(wanted, raw.text, captions, number, raw.sample_id)
            fitting += bool(edits)
            example = example or (edits and (caption, edits[0])) or None
    what = f"rules {', '.join(wanted.rule_names)}"
    if wanted.field is not None:
        what = f"field {wanted.field!r}, a text in {with_field:,} of {len(raws):,} samples,"
    if example is None:
        raise ValueError(
            f"{where}: {what} gave no wrong caption for any of {num_captions:,} captions, of "
            f"{len(raws):,} samples that were looked at: name other rules, which are for English "
            "sentences, or a field with a string or a list of strings that are not the captions"
        )
    shares = [f"{rule} {counts[rule] / num_captions:.1%}" for rule in wanted.rule_names]
    log.info(
        "%s: of %s captions, of %s samples that were looked at, %.1f %% have a wrong one%s, such "
        "as %r for %r",
        where, f"{num_captions:,}", f"{len(raws):,}", 100 * fitting / num_captions,
        f" ({', '.join(shares)})" if shares else f" in the {what.rstrip(',')}",
        printable(example[1]), printable(example[0]),
    )  # fmt: skip


# --- equal captions and pictures ---------------------------------------------------------------

Integers = npt.NDArray[np.int64]
CAPTION_DIGEST, PICTURE_DIGEST = "caption_digest", "picture_digest"


@dataclass(eq=False)
class EqualityDigests:
    """Adds those ``names`` of ``caption_digest`` and ``picture_digest`` to every sample that are
    read, 0-dimensional int64.

    They are equal for equal captions and pictures. ``clean`` is open_clip's cleaning of a caption,
    of which the first 4,096 visible characters count. Pictures are compared by their bytes; where
    stored rows are read instead, by size and checksum in the ``index``.
    """

    clean: Callable[[str], str]
    index: SampleIndex | None = None
    names: Collection[str] = (CAPTION_DIGEST, PICTURE_DIGEST)

    def __post_init__(self) -> None:
        self.reads_text = CAPTION_DIGEST in self.names
        if self.index is not None and PICTURE_DIGEST in self.names:
            check_checksums(self.index)

    def __call__(
        self, raw: RawSample, captions: Sequence[str], caption_number: int, key: int
    ) -> dict[str, Tensor]:
        """Computes the digests of the drawn caption and of the picture."""
        digests = {}
        if CAPTION_DIGEST in self.names:
            digests[CAPTION_DIGEST] = caption_digest(captions[caption_number], self.clean)
        if PICTURE_DIGEST in self.names and self.index is None:
            digests[PICTURE_DIGEST] = digest_of_64_bits(raw.image)
        elif PICTURE_DIGEST in self.names and self.index is not None:
            digests[PICTURE_DIGEST] = int(picture_marks(self.index, np.array([raw.sample_id]))[0])
        return {name: torch.tensor(digest) for name, digest in digests.items()}


def check_checksums(index: SampleIndex) -> None:
    """Raises ValueError if the index has no checksums of pictures."""
    if index.image_crc32 is None:
        raise ValueError(
            "train.objective.near_copies tells equal pictures by their checksums where "
            f"rows stand for them, and {index.directory} has none: run 'mclclip index' with "
            "data.verify=full, which adds them"
        )


def caption_digest(caption: str, clean: Callable[[str], str]) -> int:
    """Returns a digest of the cleaned caption, 64 bits as a signed number."""
    return digest_of_64_bits(clean(cut_text(caption)).encode(errors="surrogatepass"))


def picture_marks(index: SampleIndex, sample_ids: Integers) -> Integers:
    """Returns numbers int64 [n], equal for pictures of equal checksum and size."""
    assert index.image_crc32 is not None
    sizes = index.image_size[sample_ids].astype(np.int64) & 0x7FFFFFFF
    marks: Integers = sizes << 32 | index.image_crc32[sample_ids].astype(np.int64)
    return marks
