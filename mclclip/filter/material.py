"""Options of the filters, and the embeddings, clusters and evaluation images that they read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mclclip import files, search
from mclclip.analysis import clip_scores, near_duplicates
from mclclip.analysis.near_duplicates import Groups
from mclclip.config import Config
from mclclip.data.arrays import open_given_npy, open_npy
from mclclip.data.embeddings import Embedded, StoredRows, num_files
from mclclip.data.sample_index import SampleIndex
from mclclip.options import named_path
from mclclip.run import runlog
from mclclip.run.artifacts import Manifest, is_finished, read_manifest
from mclclip.run.layout import Layout, folders_above

log = logging.getLogger("mclclip")

AGAINST = 0.95
"""The cosine above which a sample is a copy of an evaluation image, where none is given."""

Within = Literal["clusters", "all"]


@dataclass(frozen=True)
class Options:
    """The thresholds of the filters, a field for each flag of the verb (None: not given).

    Raises ValueError for numbers out of range and for flags that exclude or need each other.
    """

    min_clip_score: float | None = None
    keep_share: float | None = None
    near_duplicates: float | None = None
    within: Within | None = None
    against: tuple[str, ...] = ()
    against_cosine: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("min_clip_score", -1.0, 1.0), ("keep_share", 0.0, 1.0),
            ("near_duplicates", 0.0, 1.0), ("against_cosine", 0.0, 1.0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {value}, wanted a number between {low:g} and "
                    f"{high:g}, without these"
                )
        if self.min_clip_score is not None and self.keep_share is not None:
            raise ValueError(
                "--min-clip-score and --keep-share both say which scores are high enough: leave "
                "one of them out"
            )
        if self.against_cosine is not None and not self.against:
            raise ValueError("--against-cosine says how near is a copy of what: name --against too")
        if self.within is not None and self.filters and self.near_duplicates is None:
            raise ValueError(
                "--within says among what near-duplicates are looked for: name --near-duplicates "
                "too, or leave it out"
            )

    @property
    def scores(self) -> bool:
        """Whether samples are left out by their score."""
        return self.min_clip_score is not None or self.keep_share is not None

    @property
    def filters(self) -> bool:
        """Whether anything is left out; otherwise the data are surveyed."""
        return self.scores or self.near_duplicates is not None or bool(self.against)

    @property
    def copy_cosine(self) -> float:
        """The cosine above which a sample is a copy of an evaluation image."""
        return self.against_cosine or AGAINST


@dataclass(frozen=True)
class Others:
    """Evaluation images: their embeddings, digest, and keys where their index is known."""

    name: str
    rows: search.Rows
    digest: str
    index: SampleIndex | None = None


@dataclass(frozen=True)
class Material:
    """All that the filters read, opened and checked.

    ``texts`` is None where there is no score, for the reason ``no_scores``; ``clusters`` None where
    all samples are compared with all.
    """

    index: SampleIndex
    images: Embedded
    texts: Manifest | None
    text_directory: Path
    no_scores: str
    clusters: Manifest | None
    cluster_directory: Path
    others: Sequence[Others]

    @cached_property
    def rows(self) -> StoredRows:
        """The samples' embeddings."""
        return self.images.rows()

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """[N]: samples that have an embedding."""
        usable = np.ones(len(self.index), bool)
        usable[self.images.left_out()] = False
        return usable

    @cached_property
    def held_rows(self) -> int:
        """Rows of small groups that are read together."""
        return int(near_duplicates.HELD_BYTES // max(self.rows[:1].nbytes, 1))

    def inputs(self) -> dict[str, str]:
        """Digests of what is read, by name."""
        found = {"index": self.index.digest, "embeddings": self.images.manifest.digest}
        for name, manifest in (("text_embeddings", self.texts), ("clusters", self.clusters)):
            if manifest is not None:
                found[name] = manifest.digest
        return found | {f"against_{other.name}": other.digest for other in self.others}


# --- opening -------------------------------------------------------------------------------------


def opened(config: Config, layout: Layout, stage: int, options: Options) -> Material:
    """Opens all that the filters read, after checks that it fits; errors as of ``run``."""
    if not options.scores or len(options.against) or options.near_duplicates is not None:
        search.library("filter")  # before embeddings are read
    index = SampleIndex.open(layout.index)
    images = Embedded.of_stage(layout, stage, index)
    texts, no_scores = _texts(config, layout, stage, index, images)
    if texts is None and options.scores:
        raise ValueError(f"CLIP scores are asked for, and {no_scores}")
    clusters = _clusters(layout, stage, index, images, options)
    others = sorted(
        (_others(text, images, len(index)) for text in options.against), key=lambda o: o.name
    )
    if len({other.name for other in others}) < len(others):
        raise ValueError("--against names two sets alike: give each a NAME=FOLDER of its own")
    return Material(
        index, images, texts, layout.text_embeddings, no_scores, clusters, layout.clusters(stage),
        others,
    )  # fmt: skip


def _texts(
    config: Config, layout: Layout, stage: int, index: SampleIndex, images: Embedded
) -> tuple[Manifest | None, str]:
    """The captions' embeddings that belong to the images'; None, and why, where there are none."""
    if not index.num_captions.any():
        return None, f"no sample of the index at {index.directory} has a caption"
    if not is_finished(layout.text_embeddings):
        return None, (
            f"no finished text embeddings at {layout.text_embeddings}: run 'mclclip embed --stage "
            "0 --text' first"
        )
    if images.manifest.config.get("feature") != "projected":
        return None, (
            f"embeddings at {images.directory} are features before the projection, which captions "
            "are not compared with: embed with embed.feature=projected"
        )
    texts = index.manifest_of(layout.text_embeddings, "text_embeddings")
    same = texts.inputs.get("encoder") == images.manifest.inputs.get("encoder")
    if stage == 0 and not same:
        raise RuntimeError(
            f"text embeddings at {layout.text_embeddings} are of another encoder than the images': "
            "run 'mclclip embed --stage 0 --text --force'"
        )
    if not same and not config.shares_text_tower:
        return None, f"stage {stage} trained a text tower of its own, which embeds no captions"
    return texts, ""


def _clusters(
    layout: Layout, stage: int, index: SampleIndex, images: Embedded, options: Options
) -> Manifest | None:
    """The clusters within which samples are compared; None where all are compared with all."""
    directory = layout.clusters(stage)
    compares = options.near_duplicates is not None or not options.filters
    if not compares or options.within == "all":
        return None
    if options.within is None and not is_finished(directory):
        return None
    manifest = index.manifest_of(directory, "clusters")
    if manifest.inputs.get("embeddings") != images.manifest.digest:
        raise RuntimeError(
            f"clusters at {directory} are of other embeddings than those at {images.directory}: "
            f"run 'mclclip cluster --stage {stage} --force', or compare with --within all"
        )
    return manifest


def _others(text: str, images: Embedded, num_samples: int) -> Others:
    """Evaluation images that ``--against`` names, after a comparison of width and encoder."""
    name, path = named_path(text, "--against", "evaluation images")
    name = name or str(path.resolve())
    if path.suffix == ".npy":
        try:
            rows: Any = open_given_npy(path, "rows")
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"--against: {error}") from None
        if rows.ndim != 2 or rows.dtype.kind != "f" or not len(rows):
            raise ValueError(f"--against: {path} holds {rows.dtype} {list(rows.shape)}, wanted "
                             "floating-point rows [M, D]")  # fmt: skip
        found = Others(name, rows, files.digest_array(rows))
    else:
        manifest = read_manifest(path, "embeddings")
        _check_encoder(path, manifest, images)
        index = _index_of(path, manifest)
        shards = len(index.shards) if index is not None else 0
        rows = StoredRows(path, manifest, num_files(manifest, shards))
        found = Others(name, rows, manifest.digest, index)
    dim, wanted = rows[:1].shape[1], images.rows()[:1].shape[1]
    if dim != wanted:
        raise ValueError(
            f"--against: {path} has rows of {dim} numbers, the embeddings at {images.directory} of "
            f"{wanted}: embed the evaluation images by the same encoder"
        )
    for cut in clip_scores.cuts(len(found.rows)):
        clip_scores.finite(found.rows, cut, f"--against {path}")
    return found


def _check_encoder(path: Path, manifest: Manifest, images: Embedded) -> None:
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


def _index_of(directory: Path, manifest: Manifest) -> SampleIndex | None:
    """The index of the run that embeddings lie in, which has their keys; None where it is not
    there."""
    places = [Layout(folder).index for folder in folders_above(directory)]
    path = next(filter(is_finished, places), None)
    index = None if path is None else SampleIndex.open(path)
    return None if index is None or index.digest != manifest.inputs.get("index") else index


# --- reading -------------------------------------------------------------------------------------


def scores_of(material: Material) -> NDArray[np.float32] | None:
    """The CLIP scores [N], NaN for none; None where there are none at all. Reads every embedding
    once, also where there are no scores, and stops at one that is not finite."""
    num_samples = len(material.index)
    blocks = clip_scores.cuts(num_samples)
    shown = runlog.progress(blocks, total=len(blocks), description="filter, embeddings")
    if material.texts is None:
        for cut in shown:
            clip_scores.finite(material.rows, cut, f"embeddings at {material.images.directory}")
        return None
    shards = len(material.index.shards)
    texts = StoredRows(material.text_directory, material.texts, num_files(material.texts, shards))
    if len(texts) != (wanted := int(material.index.num_captions.sum())):
        raise RuntimeError(
            f"text embeddings at {material.text_directory} has {len(texts):,} rows, the index has "
            f"{wanted:,} captions: run 'mclclip embed --stage 0 --text --force' after 'mclclip "
            "index'"
        )
    scores = clip_scores.clip_scores(material.rows, texts, material.index.num_captions, shown)
    scores[~material.usable] = np.nan
    return scores


def tell_scores(material: Material, scores: NDArray[np.float32] | None) -> None:
    """Shows quantiles of the scores, and how many samples have none."""
    bad = f"{int((~material.usable).sum()):,} without an embedding"
    if scores is None:
        log.info("filter: no CLIP scores (%s); %s", material.no_scores, bad)
        return
    without = int((material.index.num_captions[material.usable] == 0).sum())
    shown = ", ".join(f"{q} {value:.4f}" for q, value in clip_scores.quantiles(scores).items())
    log.info(
        "filter: CLIP scores of %s samples (%s without a caption, %s), below which lie: %s",
        f"{int(np.isfinite(scores).sum()):,}", f"{without:,}", bad, shown,
    )  # fmt: skip


def equal_pairs(
    material: Material, left: NDArray[np.bool_], above: float
) -> Iterator[search.Pairs]:
    """Pairs of samples with equal embeddings, each copy with the first of them."""
    blocks = clip_scores.cuts(len(left))
    shown = runlog.progress(blocks, total=len(blocks), description="filter, equal embeddings")
    return near_duplicates.equal_pairs(material.rows, left, above, shown)


def near_pairs(material: Material, above: float, left: NDArray[np.bool_]) -> Iterator[search.Pairs]:
    """Near pairs of the samples that are left, within clusters or of all."""
    if material.clusters is None:
        ids = np.flatnonzero(left)
        blocks, total = search.blocks(len(ids)), search.num_blocks(len(ids))
        over = runlog.progress(blocks, total=total, description="filter, blocks")
        return near_duplicates.near_among(material.rows, ids, above, over, what="filter")
    groups = Groups.of(labels_of(material), left)
    batches = groups.batches(material.held_rows)
    shown = runlog.progress(batches, total=len(batches), description="filter, clusters")
    return near_duplicates.near_in_groups(
        material.rows, groups, above, shown, held_rows=material.held_rows, what="filter"
    )


def labels_of(material: Material) -> NDArray[np.integer]:
    """[N]: the nearest cluster of each sample, -1 for none."""
    assert material.clusters is not None
    name = "cluster_labels.npy"
    path = material.cluster_directory / name
    return np.array(open_npy(path, "cluster", material.clusters.record(name))[:, 0])
