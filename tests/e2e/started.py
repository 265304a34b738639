"""What a training of stage 0 left, for tests of ``Started`` commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mclclip.checkpoint import step_files

TRAINING = Path("stage_0/train")
# Columns of metrics.jsonl that do not hang on the machine, also below a term of an objective.
KEPT = ("step", "samples_seen", "loss", "lr", "logit_scale", "grad_norm", "bad_samples")


def steps_of(run_dir: Path) -> list[int]:
    """The checkpoints of stage 0."""
    return step_files.steps(run_dir / TRAINING / "checkpoints")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of stage 0's metrics, without half a last one."""
    path = run_dir / TRAINING / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def result_of(run_dir: Path) -> dict[str, Any]:
    """The last weights and moments of stage 0 bit for bit, and its rows."""
    directory, last = run_dir / TRAINING / "checkpoints", steps_of(run_dir)[-1]
    found: dict[str, Any] = {"step": last}
    for part in ("model", "optimizer"):
        state = step_files.load_model_state(directory, last, part)
        found[part] = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    rows = [{n: v for n, v in row.items() if n.split("/")[-1] in KEPT} for row in rows_of(run_dir)]
    assert all({*KEPT} <= {name.split("/")[-1] for name in row} for row in rows)
    found["rows"] = rows
    return found
