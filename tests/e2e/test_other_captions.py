"""Captions that changed under the same keys: what was trained on the old ones is made again."""

from __future__ import annotations

from pathlib import Path

from mclclip.data.sample_index import SampleIndex
from tests import tiny
from tests.e2e.conftest import Shell


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
