"""Inputs of the filters: embeddings, captions, clusters, evaluation images, and CLIP scores.

A CLIP score says how well captions fit an image. Source: Schuhmann et al., LAION-400M (2021) and
LAION-5B (NeurIPS 2022), which left out pairs whose cosine is below 0.3 or 0.28; DataComp (Gadre et
al., NeurIPS 2023), whose baseline keeps the 30 % of the samples with the highest scores. Both score
the one caption of a sample. Here it may have several, of which training draws one: the score is
that of the caption that fits best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip.config import Config
from mclclip.curate.near import cuts
from mclclip.data.arrays import open_given_npy
from mclclip.data.row_store import RowStore
from mclclip.data.sample_index import SampleIndex
from mclclip.run import runlog
from mclclip.run.artifacts import Manifest, RunPaths, find_run_dir, is_finished, read_manifest
from mclclip.run.opened import Run
from mclclip.util import files
from mclclip.util.options import split_named_path
from mclclip.util.search import Floats, Rows, cosines


@dataclass(frozen=True)
class EvaluationImages:
    """Images that must not be trained on: their embeddings [M, D], the digest of these, and the
    index that has their keys, where it is known."""

    name: str
    rows: Rows
    digest: str
    index: SampleIndex | None = None


@dataclass(frozen=True)
class CurateInputs:
    """The embeddings of a stage and what they are compared with, opened and checked.

    index      of N samples
    images     the samples' embeddings [N, D]
    texts      [T, D], all captions of a sample after each other; None where there are no scores
    no_scores  why there are none
    labels     [N], the nearest cluster, -1 for none, within which samples are compared; None where
               all are compared with all
    others     evaluation images, by name
    digests    of what is read, by name
    """

    index: SampleIndex
    images: RowStore
    texts: RowStore | None
    no_scores: str
    labels: NDArray[np.integer] | None
    others: Sequence[EvaluationImages]
    digests: Mapping[str, str]

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """bool [N]: samples that have an embedding."""
        usable = np.ones(len(self.index), bool)
        usable[self.images.left_out()] = False
        return usable

    @cached_property
    def scores(self) -> NDArray[np.float32] | None:
        """The CLIP scores [N], NaN for none; None where there are none at all. Reads every
        embedding once, also where there are no scores, and stops at one that is not finite."""
        if self.texts is None:
            for cut in _blocks(len(self.images)):
                finite(self.images, cut, f"embeddings at {self.images.directory}")
            return None
        scores = clip_scores(self.images, self.texts, self.index.num_captions)
        scores[~self.usable] = np.nan
        return scores


def open_inputs(
    config: Config, stage: int, *, scores: bool, clusters: bool | None, against: Sequence[str]
) -> CurateInputs:
    """Opens the inputs of the filters of a stage; the errors are those of ``filter.run``.

    scores    whether samples are left out by their scores, so that captions must be there
    clusters  whether samples are compared within clusters; None: where there are some
    against   evaluation images, ``[NAME=]FOLDER`` or ``.npy``
    """
    run = Run.of(config)
    index, images = run.index, run.stage(stage).embeddings
    digests = {"index": index.digest, "embeddings": images.manifest.digest}
    texts, no_scores = None, _why_no_scores(run, config, stage, images)
    if no_scores and scores:
        raise ValueError(f"CLIP scores are asked for, and {no_scores}")
    if not no_scores:
        texts = run.stage(0).text_embeddings
        digests["text_embeddings"] = texts.manifest.digest
    labels = None
    if run.stage(stage).has("clusters") if clusters is None else clusters:
        clustered = run.stage(stage).clusters
        if clustered.manifest.inputs.get("embeddings") != images.manifest.digest:
            raise RuntimeError(
                f"clusters at {clustered.directory} are of other embeddings than those at "
                f"{images.directory}: run 'mclclip cluster --stage {stage} --force', or compare "
                "with --within all"
            )
        digests["clusters"] = clustered.manifest.digest
        labels = np.array(clustered.labels[:, 0])
    others = sorted((_evaluation_images(text, images) for text in against), key=lambda o: o.name)
    if len({other.name for other in others}) < len(others):
        raise ValueError("--against names two sets alike: give each a NAME=FOLDER of its own")
    digests |= {f"against_{other.name}": other.digest for other in others}
    return CurateInputs(index, images, texts, no_scores, labels, others, digests)


def _why_no_scores(run: Run, config: Config, stage: int, images: RowStore) -> str:
    """Why images cannot be compared with their captions; empty where they can be."""
    index, directory = run.index, run.layout.text_embeddings
    if not index.num_captions.any():
        return f"no sample of the index at {index.directory} has a caption"
    if not is_finished(directory):
        return (
            f"no finished text embeddings at {directory}: run 'mclclip embed --stage 0 --text' "
            "first"
        )
    if images.manifest.config.get("feature") != "projected":
        return (
            f"embeddings at {images.directory} are features before the projection, which captions "
            "are not compared with: embed with embed.feature=projected"
        )
    texts = index.manifest_of(directory, "text_embeddings")
    same = texts.inputs.get("encoder") == images.manifest.inputs.get("encoder")
    if stage == 0 and not same:
        raise RuntimeError(
            f"text embeddings at {directory} are of another encoder than the images': run "
            "'mclclip embed --stage 0 --text --force'"
        )
    if not same and not config.shares_text_tower:
        return f"stage {stage} trained a text tower of its own, which embeds no captions"
    return ""


# --- evaluation images ---------------------------------------------------------------------------


def _evaluation_images(text: str, images: RowStore) -> EvaluationImages:
    """Evaluation images that ``--against`` names, after a comparison of width and encoder."""
    name, path = split_named_path(text, "--against", "evaluation images")
    name = name or str(path.resolve())
    if path.suffix == ".npy":
        try:
            rows: Any = open_given_npy(path, "rows")
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"--against: {error}") from None
        if rows.ndim != 2 or rows.dtype.kind != "f" or not len(rows):
            raise ValueError(
                f"--against: {path} holds {rows.dtype} {list(rows.shape)}, wanted floating-point "
                "rows [M, D]"
            )
        evaluation = EvaluationImages(name, rows, files.digest_array(rows))
    else:
        manifest = read_manifest(path, "embeddings")
        _check_encoder(path, manifest, images)
        # The index of the run that the embeddings lie in has their keys.
        above = find_run_dir(path)
        beside = None if above is None else RunPaths(above).index
        index = SampleIndex.open(beside) if beside and is_finished(beside) else None
        if index is not None and index.digest != manifest.inputs.get("index"):
            index = None
        rows = RowStore.open(path, manifest)
        evaluation = EvaluationImages(name, rows, manifest.digest, index)
    dim, expected = rows[:1].shape[1], images[:1].shape[1]
    if dim != expected:
        raise ValueError(
            f"--against: {path} has rows of {dim} numbers, the embeddings at {images.directory} of "
            f"{expected}: embed the evaluation images by the same encoder"
        )
    for cut in cuts(len(rows)):
        finite(rows, cut, f"--against {path}")
    return evaluation


def _check_encoder(path: Path, manifest: Manifest, images: RowStore) -> None:
    """Raises ValueError where a manifest tells that another model, or another feature of it, made
    these embeddings. Equal weights make one model, in whichever run they were exported."""
    ours = images.manifest
    if manifest.config.get("feature") != ours.config.get("feature"):
        raise ValueError(
            f"--against: embeddings at {path} are of the feature {manifest.config.get('feature')}, "
            f"and those at {images.directory} of {ours.config.get('feature')}: embed both alike"
        )
    if manifest.inputs.get("encoder") == ours.inputs.get("encoder"):
        return
    weights = []
    for directory in (path, images.directory):  # of the export beside the embeddings
        export = directory.resolve().parent / "export"
        records = read_manifest(export, "export").records if is_finished(export) else {}
        weights.append({n: record for n, record in records.items() if n.endswith(".safetensors")})
    if weights[0] and weights[0] == weights[1]:
        return
    raise ValueError(
        f"--against: embeddings at {path} are of another encoder than those at {images.directory}: "
        "cosines between them say nothing; embed the evaluation images in a run with base=null "
        f"model.name=local-dir:{images.directory.parent / 'export'}"
    )


# --- scores --------------------------------------------------------------------------------------


def clip_scores(
    images: Rows, texts: Rows, num_captions: NDArray[np.integer]
) -> NDArray[np.float32]:
    """float32 [N]: the largest cosine of a sample's image with its captions; NaN without a caption.

    images        rows [N, D], which need not have unit length
    texts         rows [T, D], all captions of a sample after each other
    num_captions  [N], which add up to T

    Computed in float64, each from its two rows alone, so that blocks change no bit. Raises
    RuntimeError, one line, for a row that is not finite, and for widths that differ.
    """
    scores = np.full(len(num_captions), -np.inf, np.float32)
    first = 0
    for block in _blocks(len(num_captions)):
        rows = finite(images, block, "image embeddings")
        owners = np.repeat(np.arange(len(rows)), num_captions[block])
        best = np.full(len(rows), -np.inf)
        for cut in cuts(len(owners)):
            texts_here = finite(texts, slice(first + cut.start, first + cut.stop), "captions")
            if texts_here.shape[1] != rows.shape[1]:
                raise RuntimeError(
                    f"image embeddings have {rows.shape[1]} numbers and those of captions "
                    f"{texts_here.shape[1]}: embed both again with embed.feature=projected"
                )
            np.maximum.at(best, owners[cut], cosines(rows[owners[cut]], texts_here))
        scores[block] = best
        first += len(owners)
    scores[np.isneginf(scores)] = np.nan
    return scores


def _blocks(num_samples: int) -> Iterator[slice]:
    """Blocks of samples, in order, whose embeddings are read; shows how many are done."""
    blocks = cuts(num_samples)
    return runlog.progress(blocks, total=len(blocks), description="filter, embeddings")


def finite(rows: Rows, cut: slice, what: str) -> Floats:
    """The rows of a cut. Raises RuntimeError, one line, for the first row that is not finite."""
    block = np.asarray(rows[cut])
    # A sum is finite only where all its numbers are; float64 sums of float32 do not overflow.
    bad = np.flatnonzero(~np.isfinite(block.sum(axis=1, dtype=np.float64)))
    if len(bad):
        raise RuntimeError(
            f"row {cut.start + int(bad[0]):,} of {what} is not finite ({len(bad)} of these "
            f"{len(block)}): the encoder has diverged, export another one and embed again"
        )
    return block
