"""The built-in data set as shards and as a benchmark in MMVP-VLM's layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from mclclip.data.patterns import ATTRIBUTES
from mclclip.data.remote import StoredFile
from mclclip.data.shard_scan import scan_shard
from mclclip.eval.protocols.attributes import read_split
from mclclip.eval.protocols.mmvp import read_pairs
from mclclip.verbs import make_dataset
from tests import tiny


def test_shards_and_pairs_are_read_by_the_ordinary_readers(tmp_path: Path) -> None:
    tiny.make_data(tmp_path, num_samples=96)
    shards = sorted((tmp_path / "shards").glob("*.tar"))
    assert len(shards) == 2
    assert (
        sum(scan_shard(StoredFile(str(path)), "patterns", "txt").rows.num_rows for path in shards)
        == 96
    )
    assert scan_shard(StoredFile(str(shards[0])), "patterns", "json:captions").rows.num_rows == 48
    pairs = read_pairs(tmp_path / "pairs")
    assert len(pairs) == 2 * len(ATTRIBUTES)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = (tiny.make_data(tmp_path / name, num_samples=48) for name in ("one", "two"))
    assert tiny.digests(one, "**/*.tar") == tiny.digests(two, "**/*.tar")
    assert tiny.digests(one, "**/*.jpg") == tiny.digests(two, "**/*.jpg")


def test_shards_of_a_stranger_are_neither_joined_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "00000.tar").write_bytes(b"someone's shard")
    with pytest.raises(ValueError, match="'mclclip make-dataset' did not write.*00000.tar"):
        make_dataset.run("patterns", tmp_path)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["00000.tar"]


def test_a_source_that_a_data_set_does_not_read_is_refused(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "cat").mkdir(parents=True)
    (files / "cat" / "0.png").write_bytes(b"stored as it is")
    for name, sources, reads in (
        ("trifeature", [f"mnist={files}"], "none: its pictures are rendered"),
        ("folder", [f"folder={files}", f"zebra={files}"], "folder"),
    ):
        with pytest.raises(ValueError, match=f"the data set reads {reads}; leave it out"):
            make_dataset.run(name, tmp_path / name, source=sources)


def test_attributed_patterns_have_every_attribute_in_two_splits_of_other_pictures(
    tmp_path: Path,
) -> None:
    make_dataset.run("attributed_patterns", tmp_path, seed=3, num_train=40, num_test=20)
    splits = {part: read_split(tmp_path / part, [*ATTRIBUTES]) for part in ("train", "test")}
    assert [len(images) for images, _ in splits.values()] == [40, 20]
    for name, values in ATTRIBUTES.items():
        assert {*splits["train"][1][name]} <= {*values}
    train, test = ({image.read_bytes() for image in images} for images, _ in splits.values())
    assert len(train) == 40 and len(test) == 20 and not train & test
    with pytest.raises(ValueError, match="num_train is 0 and num_test 3000: wanted at least 1"):
        make_dataset.run("attributed_patterns", tmp_path / "none", num_train=0)
