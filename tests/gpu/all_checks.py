"""The catalogue of checks: importing it registers all."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def entries() -> dict[str, Any]:
    """Every check by its name."""
    from tests.gpu import checks, clusters, heads, runs, training

    assert clusters and heads and runs and training  # importing them has registered theirs
    return checks.CHECKS


def run(name: str, device: str, folder: Path) -> Any:
    """Makes one check on ``device`` (cuda or cpu)."""
    from mclclip.ranks.process_group import pick_device
    from tests.gpu.checks import Where

    return entries()[name].work(Where(pick_device(device), folder))
