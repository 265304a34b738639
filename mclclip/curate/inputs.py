"""Inputs of the filters: embeddings, captions, clusters, evaluation images, and CLIP scores.

A CLIP score says how well a caption fits an image: it is the cosine of their embeddings. LAION-400M
(Schuhmann et al., 2021) and LAION-5B (NeurIPS 2022) left out pairs below 0.3 or 0.28; the baseline
of DataComp (Gadre et al., NeurIPS 2023) keeps the 30 % of the samples with the highest scores.
There a sample has one caption. Here it may have several, and its score is that of the best one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from mclclip.util.options import check_folder_name, prefix_errors, split_named_path
from mclclip.util.search import Rows, cosines


@dataclass(frozen=True)
class EvaluationImages:
    """Images that must not be trained on: their embeddings ``rows`` [M, D], the digest of these,
    and the index with their keys, if there is one."""

    name: str
    rows: Rows
    digest: str
    index: SampleIndex | None = None


@dataclass(frozen=True)
class CurateInputs:
    """The embeddings of a stage, and all that they are compared with; opened and checked.

    index      index of N samples
    images     embeddings [N, D] of the samples
    texts      embeddings [T, D] of the captions, sample after sample; None: no scores are computed
    no_scores  the reason why no scores are computed, else ''
    labels     [N], nearest clusters, -1 for none; only samples of one cluster are compared. None:
               all are compared with all
    others     evaluation images, sorted by name
    digests    digests of all inputs, by name
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
        """bool [N]: True for samples with an embedding."""
        usable = np.ones(len(self.index), bool)
        usable[self.images.left_out()] = False
        return usable

    @cached_property
    def scores(self) -> NDArray[np.float32] | None:
        """The CLIP scores [N], NaN for samples without one; None if no scores are computed."""
        if self.texts is None:
            return None
        scores = clip_scores(self.images, self.texts, self.index.num_captions)
        scores[~self.usable] = np.nan
        return scores


def open_inputs(
    config: Config, stage: int, *, scores: bool, clusters: bool | None, against: Sequence[str]
) -> CurateInputs:
    """Opens the inputs of the filters of a stage; the errors are those of ``filter.run``.

    scores    True: a filter reads scores, so it is an error if none can be computed
    clusters  True: samples are compared within clusters; None: if the stage has clusters
    against   evaluation images, each ``[NAME=]FOLDER`` or a ``.npy`` file
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
    """Says why images cannot be compared with their captions; '' if they can."""
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
    """Opens evaluation images that ``--against`` names; ValueError if width or encoder differ."""
    name, where = split_named_path(text)
    path = Path(where)
    if name is None:
        name = str(path.resolve())
    else:
        check_folder_name(name, "--against", "evaluation images")
    if path.suffix == ".npy":
        with prefix_errors("--against"):
            rows: Any = open_given_npy(path, "rows")
        if rows.ndim != 2 or rows.dtype.kind != "f" or not len(rows):
            raise ValueError(
                f"--against: {path} holds {rows.dtype} {list(rows.shape)}, wanted floating-point "
                "rows [M, D]"
            )
        if not all(np.isfinite(rows[cut]).all() for cut in cuts(len(rows))):
            raise ValueError(f"--against: {path} holds NaN or infinity: leave these rows out")
        evaluation = EvaluationImages(name, rows, files.digest_array(rows))
    else:
        manifest = read_manifest(path, "embeddings")
        _check_encoder(path, manifest, images)
        # If the folder lies in a run, the index of that run has the keys.
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
    return evaluation


def _check_encoder(path: Path, manifest: Manifest, images: RowStore) -> None:
    """Raises ValueError if the embeddings of a manifest are of another feature or another encoder
    than ``images``. Encoders are the same if their weights are equal, even in different runs."""
    ours = images.manifest
    if manifest.config.get("feature") != ours.config.get("feature"):
        raise ValueError(
            f"--against: embeddings at {path} are of the feature {manifest.config.get('feature')}, "
            f"and those at {images.directory} of {ours.config.get('feature')}: embed both alike"
        )
    if manifest.inputs.get("encoder") == ours.inputs.get("encoder"):
        return
    weights = []
    for directory in (path, images.directory):  # the export lies beside the embeddings
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
    """Returns float32 [N], for each sample the largest cosine of its image with its captions; NaN
    without a caption.

    images        [N, D], rows of any length
    texts         [T, D], rows of captions, sample after sample
    num_captions  [N], the number of captions of each sample; they add up to T

    Each cosine is computed in float64 from its two rows alone, so the size of blocks changes no
    bit.
    """
    scores = np.full(len(num_captions), -np.inf, np.float32)
    first, blocks = 0, cuts(len(num_captions))
    for block in runlog.progress(blocks, total=len(blocks), description="filter, embeddings"):
        rows = np.asarray(images[block])
        owners = np.repeat(np.arange(len(rows)), num_captions[block])
        best = np.full(len(rows), -np.inf)
        for cut in cuts(len(owners)):
            texts_here = np.asarray(texts[first + cut.start : first + cut.stop])
            np.maximum.at(best, owners[cut], cosines(rows[owners[cut]], texts_here))
        scores[block] = best
        first += len(owners)
    scores[np.isneginf(scores)] = np.nan
    return scores
