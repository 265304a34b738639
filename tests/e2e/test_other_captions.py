"""Captions that changed under the same keys: what was trained on the old ones is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mclclip.data.sample_index import SampleIndex
from tests import tiny
from tests.e2e.conftest import Shell


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=48)


def test_a_training_on_another_field_is_made_again(
    shell: Shell, data: Path, tmp_path: Path
) -> None:
    path = tiny.write_config(tmp_path / "c.yaml", tmp_path / "run", data)
    verbs = ("index", "train --stage 0", "export --stage 0")
    shell.through("--config", path, "base.steps=1", verbs=verbs)
    export, index = tmp_path / "run/stage_0/export", tmp_path / "run/index"
    (first,) = tiny.digests(export).values()
    before = SampleIndex.open(index)
    other = ("--config", path, "base.steps=1", "data.sources.patterns.captions=json:shape")
    shell.ok("index", *other, "--force")
    after = SampleIndex.open(index)
    assert after.digest == before.digest and after.pictures_digest == before.pictures_digest
    assert after.captions_digest != before.captions_digest
    assert "captions" in shell.refused("train", "--stage", "0", *other)
    for verb in ("train", "export"):
        shell.ok(verb, "--stage", "0", *other, "--force")
    (second,) = tiny.digests(export).values()
    assert first != second


def test_copies_of_other_captions_are_made_again(shell: Shell, data: Path, tmp_path: Path) -> None:
    options = ("base=null", "num_stages=1", "train.steps=1", "relocate.enabled=true",
               "export.concat=[]", "export.soup=false", "eval.suite={}")  # fmt: skip
    run = tmp_path / "run"
    path = tiny.write_config(tmp_path / "c.yaml", run, data, *options)
    shell.ok("run", "--config", path)
    captions = "data.sources.patterns.captions=json:shape"
    shell.ok("index", "--config", path, captions, "--force")
    train = ("train", "--stage", "1", "--config", path, captions, "--force")
    assert "relocate" in shell.refused(*train), "copies of the old captions are not read"
    shell.ok("run", "--config", path, captions, "--force")
    copies = [run / "stage_1" / name / "locations.npy" for name in ("relocated.old-1", "relocated")]
    old, new = (np.load(file)[:, 1, 3] for file in copies)  # checksums of captions
    assert (old != new).all()
