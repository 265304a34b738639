"""Opens what the filters read: embeddings, captions, clusters, and evaluation images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip import files
from mclclip.config import Config
from mclclip.curate.clip_scores import finite
from mclclip.curate.near import cuts
from mclclip.data.arrays import open_given_npy
from mclclip.data.row_store import RowStore
from mclclip.data.sample_index import SampleIndex
from mclclip.opened_run import Run
from mclclip.options import named_path
from mclclip.run.artifacts import Manifest, is_finished, read_manifest
from mclclip.run.layout import Layout, folders_above
from mclclip.search import Rows


@dataclass(frozen=True)
class EvaluationImages:
    """Images that must not be trained on: their embeddings [M, D], the digest of these, and the
    index that has their keys, where it is known."""

    name: str
    rows: Rows
    digest: str
    index: SampleIndex | None = None


@dataclass(frozen=True)
class Inputs:
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


def open_inputs(
    config: Config, stage: int, *, scores: bool, clusters: bool | None, against: Sequence[str]
) -> Inputs:
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
    return Inputs(index, images, texts, no_scores, labels, others, digests)


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
    name, path = named_path(text, "--against", "evaluation images")
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
        indexes = [Layout(folder).index for folder in folders_above(path)]
        beside = next(filter(is_finished, indexes), None)
        index = None if beside is None else SampleIndex.open(beside)
        if index is not None and index.digest != manifest.inputs.get("index"):
            index = None
        shards = 0 if index is None else len(index.shards)
        rows = RowStore.open(path, manifest, shards)
        evaluation = EvaluationImages(name, rows, manifest.digest, index)
    dim, wanted = rows[:1].shape[1], images[:1].shape[1]
    if dim != wanted:
        raise ValueError(
            f"--against: {path} has rows of {dim} numbers, the embeddings at {images.directory} of "
            f"{wanted}: embed the evaluation images by the same encoder"
        )
    for cut in cuts(len(rows)):
        finite(rows, cut, f"--against {path}")
    return evaluation


def _check_encoder(path: Path, manifest: Manifest, images: RowStore) -> None:
    """Raises ValueError where a manifest tells that another model, or another feature of it, made
    these embeddings. Equal weights make one model, in whichever run they were exported."""
    own = images.manifest
    if manifest.config.get("feature") != own.config.get("feature"):
        raise ValueError(
            f"--against: embeddings at {path} are of the feature {manifest.config.get('feature')}, "
            f"and those at {images.directory} of {own.config.get('feature')}: embed both alike"
        )
    if manifest.inputs.get("encoder") == own.inputs.get("encoder"):
        return
    if (weights := _weights(path)) and weights == _weights(images.directory):
        return
    raise ValueError(
        f"--against: embeddings at {path} are of another encoder than those at {images.directory}: "
        "cosines between them say nothing; embed the evaluation images in a run with base=null "
        f"model.name=local-dir:{images.directory.parent / 'export'}"
    )


def _weights(directory: Path) -> dict[str, Any]:
    """The records of the weights of the export beside embeddings; empty where there are none."""
    export = directory.resolve().parent / "export"
    if not is_finished(export):
        return {}
    records = read_manifest(export, "export").records
    return {name: record for name, record in records.items() if name.endswith(".safetensors")}
