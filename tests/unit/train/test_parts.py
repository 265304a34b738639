"""A training from its options: its name in the log, and what its identity is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Layout
from mclclip.train import verb
from mclclip.train.parts import Job


@pytest.mark.parametrize(
    ("kind", "variant", "stage", "expected"),
    [
        ("nt_xent", "mcl", 0, "nt_xent"),
        ("nt_xent", "mcl", 1, "mcl"),
        ("info_nce", "mcl", 0, "info_nce"),
        ("info_nce", "ungrouped", 1, "ungrouped"),
        ("simlap", "mcl", 1, "simlap"),
    ],
)
def test_stage_0_is_named_by_its_objective(
    tmp_path: Path, kind: str, variant: str, stage: int, expected: str
) -> None:
    """It has no groups: it is SimCLR or CLIP, and not MCL."""
    options = config.load(None, [f"run_dir={tmp_path}", f"train.objective.kind={kind}"])
    unread: Any = None  # the index
    job = Job.of(options, options.train, SINGLE, Layout(tmp_path, variant), stage, unread)
    assert job.title == expected


def test_an_option_that_came_later_counts_where_it_is_set(tmp_path: Path) -> None:
    """A training that was begun before it keeps its identity, also in the terms of a sum."""

    def counted(objective: str) -> Any:
        options = config.load(None, [f"run_dir={tmp_path}", f"train.objective={objective}"])
        unread: Any = None  # the index
        job = Job.of(options, options.train, SINGLE, Layout(tmp_path), 1, unread)
        return verb._settings(job)["train"]["objective"]

    plain = {"kind": "info_nce", "temperature": None}
    masked = plain | {"equal_captions": "masked"}
    assert counted("{kind: info_nce}") == plain
    assert counted("{kind: info_nce, equal_captions: negatives}") == plain
    assert counted("{kind: info_nce, equal_captions: masked}") == masked
    both = "{objective: {kind: info_nce}}, {objective: {kind: info_nce, equal_captions: masked}}"
    terms = counted(f"{{kind: weighted_sum, terms: [{both}]}}")["terms"]
    assert [term["objective"] for term in terms] == [plain, masked]
