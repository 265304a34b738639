"""Captions that changed under the same keys: what was trained on the old ones is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mclclip.data.sample_index import SampleIndex
from tests import tiny
from tests.e2e.conftest import Shell


def test_trainings_and_copies_of_other_captions_are_made_again(
    shell: Shell, tmp_path: Path
) -> None:
    options = ("base=null", "num_stages=1", "train.steps=1", "relocate.enabled=true",
               "export.concat=[]", "export.soup=false", "eval.suite={}")  # fmt: skip
    run = tmp_path / "run"
    data = tiny.make_data(tmp_path / "data", num_samples=48)
    path = tiny.write_config(tmp_path / "c.yaml", run, data, *options)
    shell.ok("run", "--config", path)
    first, before = tiny.digests(run / "stage_1/export"), SampleIndex.open(run / "index")
    captions = "data.sources.patterns.captions=json:shape"
    shell.ok("index", "--config", path, captions, "--force")
    after = SampleIndex.open(run / "index")
    assert after.digest == before.digest and after.pictures_digest == before.pictures_digest
    assert after.captions_digest != before.captions_digest
    train = ("train", "--stage", "1", "--config", path, captions)
    assert "captions" in shell.refused(*train)
    assert "relocate" in shell.refused(*train, "--force"), "copies of the old ones are not read"
    shell.ok("run", "--config", path, captions, "--force")
    copies = [run / "stage_1" / name / "locations.npy" for name in ("relocated.old-1", "relocated")]
    old, new = (np.load(file)[:, 1, 3] for file in copies)  # checksums of captions
    assert (old != new).all()
    assert tiny.digests(run / "stage_1/export") != first
