"""Verb: embeddings on disk -> which samples of the index to train on, as weights for the plan.

Three filters, each of what those before it left: copies of evaluation images (decontamination),
CLIP scores, and near-duplicates. They read embeddings in blocks, and hold some numbers of every
sample (about 150 bytes each in all), never all embeddings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mclclip.analysis import clip_scores, near_duplicates
from mclclip.analysis.near_duplicates import Subset
from mclclip.config import Config
from mclclip.filter import survey
from mclclip.filter.material import (
    Material,
    Options,
    Within,
    equal_pairs,
    near_pairs,
    opened,
    scores_of,
    tell_scores,
)
from mclclip.filter.verdict import CODES, Verdict, by_reason, write
from mclclip.options import named_path
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, Force, refuse_foreign
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")


def run(
    config: Config,
    context: Context,
    *,
    stage: int = 0,
    name: str = "filter",
    min_clip_score: float | None = None,
    keep_share: float | None = None,
    near_duplicates: float | None = None,
    within: Within | None = None,
    against: Sequence[str] = (),
    against_cosine: float | None = None,
    force: Force = False,
) -> Path | None:
    """Says which samples to train on, by the embeddings of ``stage``; returns the directory.

    against, against_cosine  samples whose cosine with an image of an evaluation set is above
                             ``against_cosine`` are left out: ``[NAME=]FOLDER`` of embeddings by the
                             same encoder, or ``.npy`` [M, D]
    min_clip_score           samples with a lower CLIP score are left out, and those without caption
    keep_share               so are all but this share of the samples with a score that are left
                             then, those of the highest ones
    near_duplicates, within  of samples whose cosine is above ``near_duplicates`` one is kept; they
                             are compared within the stage's clusters, or ``all`` with all (None:
                             within clusters where there are some)

    Writes ``filters/NAME/``: weights.npy float32 [N] in index order, 1 kept and 0 left out, which
    ``train.plan.weights`` reads; reasons.npy uint8 [N] (the manifest names the codes); scores.npy
    float32 [N], NaN for none; left_out.jsonl, a line per copy and per sample without embedding.
    Without any filter it shows scores and near pairs, writes nothing, and returns None.

    Raises FileNotFoundError where embeddings are missing, RuntimeError where they are of another
    index or damaged, and ValueError for options that do not fit, for another encoder's embeddings,
    and where nothing is left; then nothing is written.
    """
    options = Options(
        min_clip_score, keep_share, near_duplicates, within, tuple(against), against_cosine
    )
    return collectives.on_main(partial(_run, config, stage, name, options, force))


def _run(config: Config, stage: int, name: str, options: Options, force: Force) -> Path | None:
    named_path(f"{name}=", "--name", "its folder")
    layout = Layout.of(config)
    material = opened(config, layout, stage, options)
    if not options.filters:
        survey.show(material, config.seed)
        return None
    within = "all" if material.clusters is None else "clusters"
    fields = asdict(options) | {
        "stage": stage,
        "within": None if options.near_duplicates is None else within,
        "against": [other.name for other in material.others],
        "against_cosine": options.copy_cosine if material.others else None,
    }
    open_artifact = partial(
        Artifact.open, layout.filters(name), kind="filter", inputs=material.inputs(), force=force,
        config=fields,
    )  # fmt: skip
    refuse_foreign(layout.filters(name), "--name")
    if (artifact := open_artifact(write=False)).finished:
        log.info("%s is finished: skipped", artifact.directory)
        return artifact.directory
    verdict = _judge(material, options)
    # Opened for writing only now: where nothing is left, nothing is left behind.
    artifact = open_artifact(write=True)
    write(artifact, material, verdict)
    return artifact.directory


# --- the filters ----------------------------------------------------------------------------------


def _judge(material: Material, options: Options) -> Verdict:
    """Every filter in turn, of what those before it left."""
    count = len(material.index)
    reasons = np.where(material.usable, 0, CODES.index("no_embedding")).astype(np.uint8)
    scores = scores_of(material)
    tell_scores(material, scores)
    verdict = Verdict(
        reasons, scores, np.full(count, -1), np.zeros(count, np.int16), np.full(count, np.nan), {}
    )
    _leave_out_evaluation(material, options, verdict)
    if options.scores and scores is not None:
        _leave_out_scores(options, verdict, scores)
    if options.near_duplicates is not None:
        _leave_out_near_duplicates(material, options.near_duplicates, verdict)
    if not (reasons == 0).any():
        raise ValueError(
            f"all {count:,} samples would be left out ({by_reason(reasons)}): ask for less"
        )
    return verdict


def _leave_out_evaluation(material: Material, options: Options, verdict: Verdict) -> None:
    """Copies of evaluation images; of several the nearest is named."""
    counts = {}
    for number, other in enumerate(material.others):
        ids = np.flatnonzero(material.usable)
        found = near_duplicates.nearest_other(
            Subset(material.rows, ids), other.rows, options.copy_cosine, what="filter"
        )
        near = found.rows >= 0
        # Not ">": a sample that has no cosine yet has NaN.
        better = near & ~(found.cosines <= verdict.cosines[ids])
        verdict.reasons[ids[near]] = CODES.index("against")
        verdict.of[ids[better]] = found.rows[better]
        verdict.which[ids[better]] = number
        verdict.cosines[ids[better]] = found.cosines[better]
        counts[other.name] = {
            "images": len(other.rows),
            "images_with_copies": int(found.matched.sum()),
            "samples": int(near.sum()),
        }
        log.info(
            "filter: %s samples are copies (cosine above %g) of %s of the %s images of %s",
            f"{near.sum():,}", options.copy_cosine, f"{found.matched.sum():,}",
            f"{len(other.rows):,}", other.name,
        )  # fmt: skip
    verdict.counts["against"] = counts


def _leave_out_scores(options: Options, verdict: Verdict, scores: NDArray[np.float32]) -> None:
    """Samples without a caption, and those whose score is too low, of those that are left."""
    left = verdict.reasons == 0
    if options.min_clip_score is not None:
        high = scores >= options.min_clip_score
    else:
        own = np.where(left, scores, np.float32(np.nan))
        high = clip_scores.top_share(own, options.keep_share or 1.0)
    verdict.reasons[left & np.isnan(scores)] = CODES.index("no_caption")
    verdict.reasons[left & ~np.isnan(scores) & ~high] = CODES.index("low_score")
    verdict.counts["lowest_score"] = float(scores[high].min()) if high.any() else None


def _leave_out_near_duplicates(material: Material, above: float, verdict: Verdict) -> None:
    """Near-duplicates of samples that are kept."""
    left = verdict.reasons == 0
    found = near_duplicates.copies_among(
        material.rows, left, verdict.scores, above,
        partial(near_pairs, material, above), equal=equal_pairs(material, left, above),
    )  # fmt: skip
    ids = np.flatnonzero(left & (found.of != np.arange(len(left))))
    verdict.reasons[ids] = CODES.index("near_duplicate")
    verdict.of[ids] = found.of[ids]
    verdict.cosines[ids] = near_duplicates.cosines_of(material.rows, ids, found.of[ids])
    verdict.counts["near_duplicates"] = {
        "pairs": found.pairs,
        "groups": found.groups,
        "largest_group": found.largest_group,
        "by_chain": found.by_chain,
    }
