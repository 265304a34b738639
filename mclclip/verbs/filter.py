"""Verb ``filter``: embeddings on disk -> weights of samples, which say what to train on.

Three filters run in turn, each on the samples that are left: copies of evaluation images, low CLIP
scores, and near-duplicates. They read embeddings in blocks, and hold about 150 bytes per sample.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mclclip.config import Config
from mclclip.curate import near
from mclclip.curate.inputs import CurateInputs, open_inputs
from mclclip.data.arrays import save_npy
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, refuse_foreign
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files, search
from mclclip.util.options import check_folder_name
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

AGAINST = 0.95
"""Default of --against-cosine: above it a sample is a copy of an evaluation image."""

WEIGHTS, REASONS, SCORES, LEFT_OUT = "weights.npy", "reasons.npy", "scores.npy", "left_out.jsonl"

CODES = ("kept", "no_embedding", "against", "no_caption", "low_score", "near_duplicate")
"""Names of the codes 0 to 5 in reasons.npy, in the order in which the filters run."""

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Quantiles of the scores that are logged."""

SURVEYED = (0.9, 0.95, 0.99)
"""Without any filter, pairs above each of these cosines are counted."""

SURVEYED_SAMPLES = 100_000
"""Most samples that are compared for these counts: a minute or two of one core."""

Within = Literal["clusters", "all"]


@dataclass(frozen=True)
class Options:
    """The thresholds of the filters, a field for each flag of the verb; None: not set.

    min_clip_score   leaves out samples with a lower CLIP score and those without a caption
    keep_share       keeps this share of the samples with a score, those of the highest scores
    near_duplicates  of samples whose cosine is above this it keeps one
    within           where near-duplicates are searched: within the 'clusters' of the stage, or
                     among 'all' (None: within clusters, if the stage has some)
    against          evaluation images, whose copies are left out: ``[NAME=]FOLDER`` of embeddings
                     by the same encoder, or a ``.npy`` file [M, D]
    against_cosine   a sample is a copy of an evaluation image if their cosine is above this

    Raises ValueError for numbers out of range and for flags that exclude or need each other.
    """

    min_clip_score: float | None = None
    keep_share: float | None = None
    near_duplicates: float | None = None
    within: Within | None = None
    against: Sequence[str] = ()
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
        line = None
        if self.min_clip_score is not None and self.keep_share is not None:
            line = "--min-clip-score and --keep-share both choose by scores: leave one of them out"
        elif self.against_cosine is not None and not self.against:
            line = "--against-cosine is the threshold of --against: give --against too"
        elif self.within is not None and self.filters and self.near_duplicates is None:
            line = "--within says where --near-duplicates searches: give that, or leave it out"
        if line is not None:
            raise ValueError(line)

    @property
    def scores(self) -> bool:
        """True if a filter reads the CLIP scores."""
        return self.min_clip_score is not None or self.keep_share is not None

    @property
    def filters(self) -> bool:
        """True if there is any filter; otherwise scores and near pairs are only logged."""
        return self.scores or self.near_duplicates is not None or bool(self.against)


def run(
    config: Config,
    context: Context,
    *,
    stage: int = 0,
    name: str = "filter",
    force: Remake = Remake.NOTHING,
    **filters: Any,
) -> Path | None:
    """Decides by the embeddings of ``stage`` which samples to train on; returns the directory.
    ``filters`` are fields of ``Options``.

    Writes ``filters/NAME/``: weights.npy float32 [N] in index order, 1 for a kept sample and 0 for
    others, which ``train.plan.weights`` reads; reasons.npy uint8 [N], numbers of ``CODES``;
    scores.npy float32 [N], NaN for none; left_out.jsonl, a line per copy and per sample without an
    embedding. Without any filter it only logs scores and near pairs, and returns None.

    Raises, before it writes, FileNotFoundError for missing embeddings, RuntimeError for damaged
    ones or those of another index, and ValueError for options that do not fit, for embeddings by
    another encoder, and if no sample is left.
    """
    return collectives.on_main(partial(_run, config, stage, name, Options(**filters), force))


def _run(config: Config, stage: int, name: str, options: Options, force: Remake) -> Path | None:
    check_folder_name(name, "--name", "its folder")
    if not options.scores or options.against or options.near_duplicates is not None:
        search.library("filter")  # before embeddings are read
    clusters: bool | None = {"all": False, "clusters": True}.get(options.within or "")
    if options.filters and options.near_duplicates is None:
        clusters = False
    inputs = open_inputs(
        config, stage, scores=options.scores, clusters=clusters, against=options.against
    )
    if not options.filters:
        _log_scores(inputs)
        _log_near_pairs(inputs, config.seed)
        return None
    within: Within = "all" if inputs.labels is None else "clusters"
    options = replace(
        options,
        within=None if options.near_duplicates is None else within,
        against=[other.name for other in inputs.others],
        against_cosine=(options.against_cosine or AGAINST) if inputs.others else None,
    )
    directory = Path(config.run_dir) / "filters" / name
    refuse_foreign(directory, "--name")
    make_artifact(Filter(stage, options), directory, inputs, force)
    return directory


@dataclass(frozen=True)
class Filter(Step[CurateInputs]):
    """The samples that are kept, and the reason for each of the others."""

    kind = "filter"
    stage: int
    filters: Options

    def reads(self, how: CurateInputs) -> Mapping[str, str]:
        """Returns the digests of all inputs."""
        return how.digests

    def make(self, out: Artifact, how: CurateInputs) -> Made:
        """Runs the filters. Raises ValueError, before it writes, if no sample is left."""
        decisions = _decide(how, self.filters)
        out.begin()
        return _write(out, self.filters, how, decisions)


def _log_scores(inputs: CurateInputs) -> None:
    """Logs quantiles of the scores, and how many samples have none."""
    bad = f"{int((~inputs.usable).sum()):,} without an embedding"
    if (scores := inputs.scores) is None:
        log.info("filter: no CLIP scores (%s); %s", inputs.no_scores, bad)
        return
    finite = scores[np.isfinite(scores)]
    quantiles = zip(QUANTILES, np.quantile(finite, QUANTILES), strict=True) if len(finite) else ()
    without = int((inputs.index.num_captions[inputs.usable] == 0).sum())
    log.info(
        "filter: CLIP scores of %s samples (%s without a caption, %s), below which lie: %s",
        f"{len(finite):,}", f"{without:,}", bad,
        ", ".join(f"{100 * share:g} % {value:.4f}" for share, value in quantiles),
    )  # fmt: skip


# --- the filters ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """For each of N samples the reason why it is left out, its score, and its original if it is a
    copy.

    reasons  uint8 [N], numbers of ``CODES``; 0 is kept
    scores   float32 [N], NaN for samples without a score; None if no sample has one
    of       int64 [N], of a copy: the sample that is kept instead, or the row of the evaluation
             image
    which    int16 [N], of a copy of an evaluation image: which of ``inputs.others`` it is in
    cosines  float64 [N], of a copy: its cosine with that sample or image
    counts   further figures for the manifest
    """

    reasons: NDArray[np.uint8]
    scores: NDArray[np.float32] | None
    of: NDArray[np.int64]
    which: NDArray[np.int16]
    cosines: NDArray[np.float64]
    counts: dict[str, Any] = field(default_factory=dict)

    def count_reasons(self) -> dict[str, int]:
        """Returns the number of samples for each reason."""
        counts = np.bincount(self.reasons, minlength=len(CODES)).tolist()
        return dict(zip(CODES, counts, strict=True))


def _decide(inputs: CurateInputs, options: Options) -> Decisions:
    """Runs the filters in turn, each on the samples that are left."""
    count = len(inputs.index)
    reasons = np.where(inputs.usable, 0, CODES.index("no_embedding")).astype(np.uint8)
    _log_scores(inputs)
    of, which, cosines = np.full(count, -1), np.zeros(count, np.int16), np.full(count, np.nan)
    decisions = Decisions(reasons, inputs.scores, of, which, cosines)
    _leave_out_evaluation_images(inputs, options.against_cosine or AGAINST, decisions)
    if options.scores and inputs.scores is not None:
        _leave_out_low_scores(options, inputs.scores, decisions)
    if options.near_duplicates is not None:
        _leave_out_near_duplicates(inputs, options.near_duplicates, decisions)
    if not (reasons == 0).any():
        by_reason = ", ".join(f"{name} {n:,}" for name, n in decisions.count_reasons().items() if n)
        raise ValueError(f"all {count:,} samples would be left out ({by_reason}): ask for less")
    return decisions


def _leave_out_evaluation_images(inputs: CurateInputs, above: float, decisions: Decisions) -> None:
    """Leaves out every sample whose cosine with an evaluation image is above ``above``, and records
    the nearest image."""
    counts = {}
    ids = np.flatnonzero(inputs.usable)
    for number, other in enumerate(inputs.others):
        rows, cosines, matched = near.nearest_other(
            near.Subset(inputs.images, ids), other.rows, above, what="filter"
        )
        copies = rows >= 0
        # "not <=" instead of ">", since a sample without a cosine has NaN.
        better = copies & ~(cosines <= decisions.cosines[ids])
        decisions.reasons[ids[copies]] = CODES.index("against")
        decisions.of[ids[better]] = rows[better]
        decisions.which[ids[better]] = number
        decisions.cosines[ids[better]] = cosines[better]
        counts[other.name] = {
            "images": len(other.rows),
            "images_with_copies": int(matched.sum()),
            "samples": int(copies.sum()),
        }
        log.info(
            "filter: %s samples are copies (cosine above %g) of %s of the %s images of %s",
            f"{copies.sum():,}", above, f"{matched.sum():,}", f"{len(other.rows):,}", other.name,
        )  # fmt: skip
    decisions.counts["against"] = counts


def _leave_out_low_scores(
    options: Options, scores: NDArray[np.float32], decisions: Decisions
) -> None:
    """Leaves out samples without a caption, and those whose score is too low."""
    left = decisions.reasons == 0
    if options.min_clip_score is not None:
        high = scores >= options.min_clip_score
    else:
        high = top_share(np.where(left, scores, np.float32(np.nan)), options.keep_share or 1.0)
    decisions.reasons[left & np.isnan(scores)] = CODES.index("no_caption")
    decisions.reasons[left & ~np.isnan(scores) & ~high] = CODES.index("low_score")
    decisions.counts["lowest_score"] = float(scores[high].min()) if high.any() else None


def top_share(scores: NDArray[np.floating], share: float) -> NDArray[np.bool_]:
    """Returns bool [N], True for the ``share`` of the scored samples with the highest scores.

    Their number is rounded, and at least one; of equal scores the lower rows come first.
    """
    scored = np.flatnonzero(np.isfinite(scores))
    count = min(len(scored), max(1, round(share * len(scored))))
    is_top = np.zeros(len(scores), bool)
    is_top[scored[np.argsort(-scores[scored], kind="stable")[:count]]] = True
    return is_top


def _leave_out_near_duplicates(inputs: CurateInputs, above: float, decisions: Decisions) -> None:
    """Leaves out samples whose cosine with a kept sample is above ``above``."""
    left = decisions.reasons == 0
    of, decisions.counts["near_duplicates"] = near.copies_among(
        inputs.images, left, decisions.scores, above, inputs.labels, what="filter"
    )
    ids = np.flatnonzero(left & (of != np.arange(len(left))))
    decisions.reasons[ids] = CODES.index("near_duplicate")
    decisions.of[ids] = of[ids]
    decisions.cosines[ids] = near.cosines_of(inputs.images, ids, of[ids])


def _log_near_pairs(inputs: CurateInputs, seed: int) -> None:
    """Logs how many pairs of samples are near each other, to help choose a threshold.

    If there are more than ``SURVEYED_SAMPLES``, the seed draws so many to compare. A share of the
    samples has the square of that share of the pairs; so numbers of all are estimated.
    """
    usable = np.flatnonzero(inputs.usable)
    ids = np.random.default_rng([seed, 7]).permutation(usable)[:SURVEYED_SAMPLES]
    share = len(ids) / max(len(usable), 1)
    drawn = np.zeros(len(inputs.usable), bool)
    drawn[ids] = True
    pairs = np.zeros(len(SURVEYED), np.int64)
    for piece in near.near_pairs(inputs.images, drawn, min(SURVEYED), inputs.labels, what="filter"):
        pairs += (piece.cosines > np.array(SURVEYED)[:, None]).sum(axis=1)
    for above, number in zip(SURVEYED, pairs.tolist(), strict=True):
        log.info(
            "filter: %s pairs above %g %s%s", f"{number / share**2 if number else 0:,.0f}", above,
            "among all samples" if inputs.labels is None else "within clusters",
            "" if share == 1 else f", estimated from {100 * share:.2g} % of the samples",
        )  # fmt: skip
    log.info(
        "filter: nothing is written without --min-clip-score, --keep-share, --near-duplicates or "
        "--against"
    )


# --- what is written -----------------------------------------------------------------------------


def _write(out: Artifact, options: Options, inputs: CurateInputs, decisions: Decisions) -> Made:
    """Writes the files; logs how many samples are left out, and the option that trains on the
    others."""
    directory, reasons, scores = out.directory, decisions.reasons, decisions.scores
    arrays: dict[str, Any] = {WEIGHTS: (reasons == 0).astype(np.float32), REASONS: reasons}
    arrays |= {} if scores is None else {SCORES: scores}
    for name, array in arrays.items():
        save_npy(directory / name, array)
    _write_left_out(directory / LEFT_OUT, inputs, decisions)
    by_reason = decisions.count_reasons()
    with_score = 0 if scores is None else int(np.isfinite(scores).sum())
    counts = {
        "samples": len(reasons),
        "reasons": by_reason,
        "without_score": len(reasons) - with_score,
        **decisions.counts,
    }
    log.info(
        "filter: %s of %s samples are kept; left out: %s; %s have no score",
        f"{by_reason['kept']:,}", f"{len(reasons):,}",
        ", ".join(f"{name} {by_reason[name]:,}" for name in CODES[1:]),
        f"{len(reasons) - with_score:,}",
    )  # fmt: skip
    if (copies := decisions.counts.get("near_duplicates")) is not None:
        log.info(
            "filter: %s near pairs (compared: within %s) link %s groups of samples, the largest of "
            "%s; %s samples are left out that a chain alone links to one that is kept",
            f"{copies['pairs']:,}", options.within, f"{copies['groups']:,}",
            f"{copies['largest_group']:,}", f"{copies['by_chain']:,}",
        )  # fmt: skip
    path = shlex.quote(str((directory / WEIGHTS).resolve()))
    log.info("filter: to train on what is kept: %s", f"train.plan.weights={path}")
    digest = files.digest_json([out.identity, files.digest_array(reasons)])
    return Made(counts, files.records_of(directory, *arrays, LEFT_OUT), "float32", digest)


def _write_left_out(path: Path, inputs: CurateInputs, decisions: Decisions) -> None:
    """Writes in index order a line of JSON per sample that is a copy or has no embedding."""
    codes = [CODES.index(name) for name in ("no_embedding", "against", "near_duplicate")]
    every, keys = np.flatnonzero(np.isin(decisions.reasons, codes)), inputs.index.keys
    with files.whole_file(path) as file:
        for cut in near.cuts(len(every)):
            ids = every[cut]
            of = decisions.of[ids]
            copies = decisions.reasons[ids] == CODES.index("near_duplicate")
            of_keys = dict(zip(of[copies].tolist(), keys(of[copies]), strict=True))
            for sample_id, key, row in zip(ids.tolist(), keys(ids), of.tolist(), strict=True):
                reason = CODES[decisions.reasons[sample_id]]
                line: dict[str, Any] = {"sample_id": sample_id, "key": key, "reason": reason}
                if reason == "against":
                    other = inputs.others[decisions.which[sample_id]]
                    of_key = None if other.index is None else other.index.keys([row])[0]
                    line |= {"against": other.name, "of": row, "of_key": of_key}
                elif reason == "near_duplicate":
                    line |= {"of": row, "of_key": of_keys[row]}
                if reason != "no_embedding":
                    line["cosine"] = round(float(decisions.cosines[sample_id]), 6)
                file.write(f"{json.dumps(line)}\n".encode())
