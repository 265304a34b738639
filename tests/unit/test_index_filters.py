"""The index of a subset: exactly the samples that were chosen, counted, also when it grows."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mclclip import config
from mclclip.data.index_tables import check_shards
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.data.shard_filter import UID
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.util.remake import Remake
from mclclip.verbs import index
from tests.shard_server import serving
from tests.unit.test_index import all_keys, files, make_shard

PER_SHARD = 20


def uid_of(number: int) -> int:
    """128 bits that look random, and whose upper halves repeat."""
    return (number * 0x9E3779B97F4A7C15 % 7) << 64 | number * 0xD1342543DE82EF95 % 2**64


class Pool:
    """Shards with their parquets, and what is planted in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0

    def add(self, num_shards: int, *, parquet: bool = True, uid: bool = True) -> None:
        for _ in range(num_shards):
            first = self.number * PER_SHARD
            numbers = list(range(first, first + PER_SHARD))
            path = make_shard(self.folder / f"{self.number:05d}.tar", *map(self.key, numbers))
            rows: dict[str, Any] = {
                "key": [self.key(n) for n in numbers],
                "similarity": np.linspace(0, 1, PER_SHARD),
            }
            if uid:
                rows["uid"] = [f"{uid_of(n):032x}" for n in numbers]
            order = np.random.default_rng(first).permutation(PER_SHARD)
            if parquet:
                pq.write_table(pa.table(rows).take(order), path.with_suffix(".parquet"))
            self.number += 1

    def key(self, number: int) -> str:
        return f"{number:09d}"

    def subset(self, numbers: list[int], name: str = "subset.npy") -> str:
        found = np.array([divmod(uid_of(n), 1 << 64) for n in numbers], UID)
        found.sort()
        np.save(self.folder / name, found)
        return str(self.folder / name)

    def keys(self, numbers: Any) -> list[str]:
        return [f"s/{self.key(number)}" for number in numbers]

    @property
    def shards(self) -> str:
        return f"{self.folder}/*.tar"


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    found = Pool(tmp_path / "pool")
    found.add(3)
    return found


def run(
    run_dir: Path,
    shards: Any,
    workers: int = 1,
    force: Remake = Remake.NOTHING,
    verify: str = "captions",
    **source: Any,
) -> SampleIndex:
    sources = {"s": {"shards": shards, **source}}
    data = {"sources": sources, "index_workers": workers, "verify": verify}
    return index.run(config.from_tree({"run_dir": str(run_dir), "data": data}), SINGLE, force=force)


def left_out(found: SampleIndex) -> dict[str, int]:
    counts: dict[str, Any] = read_manifest(found.directory, KIND).counts
    (entry,) = counts["sources"].values()
    planned: dict[str, int] = entry["left_out"]
    findings = {reason: entry["count"] for reason, entry in counts["findings"].items()}
    assert findings == planned  # of one source
    assert entry["samples"] == len(found)
    return planned


def drawn(number: int, share: float) -> list[int]:
    return np.flatnonzero(np.random.default_rng(0).random(number) < share).tolist()


# --- what is chosen ----------------------------------------------------------------------------


def test_the_index_has_exactly_the_subset(tmp_path: Path, pool: Pool) -> None:
    chosen = drawn(60, 0.5)
    subset = pool.subset([*chosen, *range(10**6, 10**6 + 500)])  # others are of other shards
    found = run(tmp_path / "run", pool.shards, subset=subset)
    assert all_keys(found) == pool.keys(chosen) and chosen
    assert left_out(found) == {"subset": 60 - len(chosen)}
    whole = run(tmp_path / "whole", pool.shards)
    ids = whole.ids_of(pool.keys(chosen))
    for name in ("image_offset", "image_size", "text_offset", "text_size", "num_captions"):
        assert getattr(found, name).tolist() == getattr(whole, name)[ids].tolist()
    assert "left_out" not in read_manifest(whole.directory, KIND).counts["sources"]["s"]


def test_the_subset_is_told_and_processes_change_nothing(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = drawn(60, 0.6)
    with caplog.at_level(logging.INFO, logger="mclclip"):
        one = run(tmp_path / "one", pool.shards, subset=pool.subset(chosen))
    line = f"source s has {len(one)} samples, its subset left out {60 - len(one)} ("
    assert line in caplog.text
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]
    two = run(tmp_path / "two", pool.shards, 2, subset=pool.subset(chosen))
    assert all_keys(one) == pool.keys(chosen) == all_keys(two)
    assert one.digest == two.digest and left_out(one) == left_out(two)
    for name in ("samples.arrow", "shards.json"):
        assert (one.directory / name).read_bytes() == (two.directory / name).read_bytes()


def test_shards_behind_urls_have_their_parquets_there(tmp_path: Path, pool: Pool) -> None:
    options = {"subset": pool.subset(drawn(60, 0.6))}
    local = run(tmp_path / "local", pool.shards, **options)
    with serving(pool.folder) as server:
        urls = server.url("{00000..00002}.tar")
        over = run(tmp_path / "http", urls, **options)
        assert all_keys(over) == all_keys(local) and left_out(over) == left_out(local)
        for number in (0, 2):
            (pool.folder / f"{number:05d}.parquet").unlink()
        with pytest.raises(ValueError, match=r"no sample of http.*00000\.tar has a uid"):
            run(tmp_path / "less", urls, subset=options["subset"])
        assert not (tmp_path / "less").exists()
        # Known shards are not looked into again.
        assert all_keys(run(tmp_path / "http", urls, **options)) == all_keys(local)


# --- errors, each one line, with nothing written -----------------------------------------------


def test_wrong_filters(tmp_path: Path, pool: Pool) -> None:
    for subset, message in (
        ("/none.npy", r"sources\.s\.subset: there is no"),
        (pool.subset([]), "no usable sample .* 60 samples that the subset lacks"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            run(tmp_path / "run", pool.shards, subset=subset)
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


# --- again -------------------------------------------------------------------------------------


def test_new_shards_are_filtered_and_counted_beside_the_known(tmp_path: Path, pool: Pool) -> None:
    options = {"subset": pool.subset(drawn(140, 0.5))}
    first = run(tmp_path / "run", pool.shards, **options)
    before = files(first.directory)
    again = run(tmp_path / "run", pool.shards, **options)
    assert files(again.directory) == before
    for path in pool.folder.glob("*.parquet"):
        path.unlink()  # known shards are not scanned again
    pool.add(4)
    grown = run(tmp_path / "run", pool.shards, **options)
    assert all_keys(grown) == pool.keys(drawn(140, 0.5))
    assert sum(left_out(grown).values()) == 140 - len(grown)


def test_another_filter_stops_until_forced(tmp_path: Path, pool: Pool) -> None:
    options: dict[str, Any] = {"subset": pool.subset(drawn(60, 0.6))}
    first = run(tmp_path / "run", pool.shards, **options)
    before = files(first.directory)
    with pytest.raises(ValueError, match="indexed with subset of digest [0-9a-f]{12}, now None"):
        run(tmp_path / "run", pool.shards)
    pool.subset(drawn(60, 0.9))  # the file has another content
    with pytest.raises(ValueError, match="subset of digest [0-9a-f]{12}, now [0-9a-f]") as caught:
        run(tmp_path / "run", pool.shards, **options)
    assert "--force" in str(caught.value) and "\n" not in str(caught.value)
    assert files(first.directory) == before
    forced = run(tmp_path / "run", pool.shards, force=Remake.ALL, **options)
    assert forced.digest != first.digest and len(forced) > len(first)


def test_a_shard_is_told_from_a_changed_one_without_its_filter(tmp_path: Path, pool: Pool) -> None:
    options = {"subset": pool.subset(drawn(60, 0.3))}
    found = run(tmp_path / "run", pool.shards, **options)
    for path in (*pool.folder.glob("*.parquet"), pool.folder / "subset.npy"):
        path.unlink()
    path = pool.folder / "00001.tar"
    os.utime(path, ns=(1, 1))
    check_shards(found.directory, found.shards, DataConfig())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"caption 0", b"Caption 0"))  # of all samples
    with pytest.raises(ValueError, match=r"00001\.tar .* has changed"):
        check_shards(found.directory, found.shards, DataConfig())


def test_checksums_of_pixels_come_later_for_the_same_samples(tmp_path: Path, pool: Pool) -> None:
    options = {"subset": pool.subset(drawn(60, 0.5))}
    first = run(tmp_path / "run", pool.shards, **options)
    keys, counted = all_keys(first), left_out(first)
    path = pool.folder / "00001.parquet"
    whole = pq.read_table(path)
    pq.write_table(whole.slice(0, 3), path)
    with pytest.raises(ValueError, match="parquets beside the shards choose other samples"):
        run(tmp_path / "run", pool.shards, verify="full", **options)
    assert all_keys(SampleIndex.open(first.directory)) == keys
    pq.write_table(whole, path)
    full = run(tmp_path / "run", pool.shards, verify="full", **options)
    assert all_keys(full) == keys and left_out(full) == counted
    assert full.image_crc32 is not None and (full.image_crc32 != 0).all()


# --- what reads the index ----------------------------------------------------------------------
