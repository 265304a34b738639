"""A sample that twice kept a process busy until its limit is not decoded a third time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mclclip.data import samples as samples_module
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import BadSample, Sample, TarDataset
from tests.unit.data.test_samples import IMAGES, make_index, to_tensor


def opened(tmp_path: Path) -> TarDataset:
    """As a later start opens the index."""
    index = SampleIndex(tmp_path / "index", "")
    return TarDataset(index, transform=to_tensor, **IMAGES)


def test_what_is_noted_twice_is_bad_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_index(tmp_path)
    key = index.keys([7])[0]
    index.add_bad({2: "truncated"})
    wanted = f"sample {key} was being decoded, it is left out if that happens again"
    assert opened(tmp_path).index.note_slow(7) == wanted
    assert opened(tmp_path).index.bad_ids().tolist() == [2]
    assert isinstance(opened(tmp_path)[7], Sample)
    assert opened(tmp_path).index.note_slow(8).endswith("if that happens again")
    assert opened(tmp_path).index.note_slow(7).endswith("it is left out from now on")

    third = opened(tmp_path)
    assert third.index.bad_ids().tolist() == [2, 7]
    assert third.index.bad_samples()[key]["reason"] == "timeout"
    with monkeypatch.context() as patch:
        patch.delattr(samples_module, "decode")  # it is not even begun
        assert third[7] == BadSample(7, "timeout")
    assert isinstance(third[8], Sample)

    place = int(index.image_offset[7] + index.image_size[7]) - 5  # of the last checksum of a PNG
    shard = Path(index.shards[int(index.shard_of[7])].path)
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)
    assert opened(tmp_path).index.bad_ids().tolist() == [2]
    assert opened(tmp_path)[7] != BadSample(7, "timeout")


def test_an_odd_note_is_one_line(tmp_path: Path) -> None:
    make_index(tmp_path)
    (tmp_path / "index/timeouts").mkdir()
    (tmp_path / "index/timeouts/0.2.json").write_text("[]")
    with pytest.raises(RuntimeError, match="timeouts/0.2.json .*take it away"):
        opened(tmp_path)
