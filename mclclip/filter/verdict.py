"""Which samples are left out, and why: as arrays in index order, and a line per copy."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip import files
from mclclip.data.arrays import save_npy
from mclclip.filter.material import Material
from mclclip.run.artifacts import Artifact

log = logging.getLogger("mclclip")

WEIGHTS, REASONS, SCORES, LEFT_OUT = "weights.npy", "reasons.npy", "scores.npy", "left_out.jsonl"

CODES = ("kept", "no_embedding", "against", "no_caption", "low_score", "near_duplicate")
"""Names of the codes in reasons.npy, in the order in which they are looked for."""

_AT_ONCE = 4096  # samples whose lines are written together
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class Verdict:
    """Per sample: why it is left out (``CODES``), its score, and what it is a copy of.

    of       int64 [N], the sample that is kept instead, or the row of the evaluation images
    which    int16 [N], the number of these evaluation images
    cosines  float64 [N], with that sample or image
    counts   further figures for the manifest
    """

    reasons: Codes
    scores: NDArray[np.float32] | None
    of: NDArray[np.int64]
    which: NDArray[np.int16]
    cosines: NDArray[np.float64]
    counts: dict[str, Any]


def write(artifact: Artifact, material: Material, verdict: Verdict) -> None:
    """Writes the files of a verdict and finishes the artifact; shows what is left out, and the
    override that trains on the rest."""
    directory, reasons = artifact.directory, verdict.reasons
    weights = (reasons == 0).astype(np.float32)
    save_npy(directory / WEIGHTS, weights)
    save_npy(directory / REASONS, reasons)
    if verdict.scores is not None:
        save_npy(directory / SCORES, verdict.scores)
    _write_left_out(directory / LEFT_OUT, material, verdict)
    counts = {
        "samples": len(reasons),
        "reasons": _counted(reasons),
        "without_score": len(reasons) - _num_scores(verdict.scores),
        **verdict.counts,
    }
    names = [name for name in (WEIGHTS, REASONS, SCORES, LEFT_OUT) if (directory / name).exists()]
    artifact.finish(
        counts,
        dtype="float32",
        content_digest=files.digest_json([artifact.identity, files.digest_array(reasons)]),
        records=files.records_of(directory, *names),
    )
    _tell(artifact, counts)


def _num_scores(scores: NDArray[np.float32] | None) -> int:
    return 0 if scores is None else int(np.isfinite(scores).sum())


def by_reason(reasons: Codes) -> str:
    """How many samples there are of each reason that occurs, for a message."""
    return ", ".join(f"{name} {count:,}" for name, count in _counted(reasons).items() if count)


def _counted(reasons: Codes) -> dict[str, int]:
    return dict(zip(CODES, np.bincount(reasons, minlength=len(CODES)).tolist(), strict=True))


def _tell(artifact: Artifact, counts: dict[str, Any]) -> None:
    reasons, near = counts["reasons"], counts.get("near_duplicates")
    shown = ", ".join(f"{name} {reasons[name]:,}" for name in CODES[1:])
    log.info(
        "filter: %s of %s samples are kept; left out: %s; %s have no score",
        f"{reasons['kept']:,}", f"{counts['samples']:,}", shown, f"{counts['without_score']:,}",
    )  # fmt: skip
    if near is not None:
        log.info(
            "filter: %s near pairs (compared: within %s) link %s groups of samples, the largest of "
            "%s; %s samples are left out that a chain alone links to one that is kept",
            f"{near['pairs']:,}", artifact.config["within"], f"{near['groups']:,}",
            f"{near['largest_group']:,}", f"{near['by_chain']:,}",
        )  # fmt: skip
    path = shlex.quote(str((artifact.directory / WEIGHTS).resolve()))
    log.info("filter: to train on what is kept: %s", f"train.plan.weights={path}")


def _write_left_out(path: Path, material: Material, verdict: Verdict) -> None:
    """A line of JSON per sample that is a copy, or has no embedding, in index order."""
    listed = [CODES.index(name) for name in ("no_embedding", "against", "near_duplicate")]
    ids = np.flatnonzero(np.isin(verdict.reasons, listed))
    with files.whole_file(path) as file:
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            lines = _lines(material, verdict, some)
            file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())


def _lines(
    material: Material, verdict: Verdict, ids: NDArray[np.int64]
) -> Iterator[dict[str, Any]]:
    """The fields of the lines of some samples."""
    of = verdict.of[ids]
    own = verdict.reasons[ids] == CODES.index("near_duplicate")
    of_keys = dict(zip(of[own].tolist(), material.index.keys(of[own]), strict=True))
    for place, (sample_id, key) in enumerate(
        zip(ids.tolist(), material.index.keys(ids), strict=True)
    ):
        reason, row = CODES[verdict.reasons[sample_id]], int(of[place])
        line: dict[str, Any] = {"sample_id": sample_id, "key": key, "reason": reason}
        if reason == "against":
            other = material.others[verdict.which[sample_id]]
            line |= {"against": other.name, "of": row}
            line["of_key"] = None if other.index is None else other.index.keys([row])[0]
        elif reason == "near_duplicate":
            line |= {"of": row, "of_key": of_keys[row]}
        if reason != "no_embedding":
            line["cosine"] = round(float(verdict.cosines[sample_id]), 6)
        yield line
