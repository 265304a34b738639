"""What has changed since it was written is refused when it is read, in one line, by every verb."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from mclclip import cluster, embed, export, files, index
from mclclip.config import Config
from mclclip.data.arrays import save_npy
from mclclip.data.groups import StageGroups
from mclclip.data.labels import ClassLabels
from mclclip.data.locations import TextFeatures
from mclclip.data.row_store import left_out
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import INTENT, MANIFEST, Layout, made_of
from mclclip.train import verb as train
from tests import damage


@pytest.fixture
def config(prepared_run: Path, tmp_path: Path) -> Config:
    return damage.copied(prepared_run, tmp_path)


def change(path: Path, how: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replaces an array by another one of the same shape and type."""
    old = np.load(path)
    save_npy(path, how(old.copy()).astype(old.dtype))
    assert not np.array_equal(old, np.load(path), equal_nan=True)


def large(rows: np.ndarray) -> np.ndarray:
    rows[5] = 1e30
    return rows


def zeroed(rows: np.ndarray) -> np.ndarray:
    rows[7:11] = 0.0
    return rows


def one_changed(labels: np.ndarray) -> np.ndarray:
    labels[3, 0] = (labels[3, 0] + 1) % 3
    return labels


def recluster(config: Config) -> None:
    shutil.rmtree(Layout.of(config).clusters(0))
    cluster.run(config, SINGLE, stage=0)


def training(config: Config) -> None:
    train.run(config, SINGLE, stage=1)


def pseudo_labels_again(config: Config) -> None:
    shutil.rmtree(Layout.of(config).pseudo_labels(1))
    cluster.run(config, SINGLE, stage=0)


def class_labels(config: Config) -> ClassLabels:
    return ClassLabels(Layout.of(config).clusters(0), SampleIndex.open(Layout.of(config).index), 2)


ATTACKS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], Callable[[Config], object]]] = {
    "reversed embeddings": ("stage_0/embeddings/00001.npy", np.flipud, recluster),
    "zeroed embeddings": ("stage_0/embeddings/00000.npy", zeroed, recluster),
    "large embeddings": ("stage_0/embeddings/00000.npy", large, recluster),
    "reversed texts": ("stage_0/text_embeddings/00000.npy", np.flipud, recluster),
    "cluster labels": ("stage_0/clusters/cluster_labels.npy", one_changed, pseudo_labels_again),
    "labels of classes": ("stage_0/clusters/cluster_labels.npy", np.flipud, class_labels),
    "similarities": ("stage_0/clusters/similarities.npy", np.flipud, class_labels),
    "centroids": (
        "stage_0/clusters/centroids.npy", np.flipud, lambda c: class_labels(c).centroids()
    ),
    "pseudo labels": ("stage_1/pseudo_labels/pseudo_labels.npy", one_changed, training),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_array_is_refused_when_it_is_read(config: Config, attack: str) -> None:
    name, how, read = ATTACKS[attack]
    change(Path(config.run_dir) / name, how)
    with pytest.raises(RuntimeError, match=r"is damaged.*run 'mclclip .* --force'") as caught:
        read(config)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_an_untouched_copy_is_read(config: Config) -> None:
    """The attacks fail because of the damage, not because of the copy."""
    class_labels(config).centroids()
    recluster(config)


def test_cached_texts_are_compared_where_they_are_read(config: Config) -> None:
    """In blocks, in the process that reads them; a row of an intact block is given out."""
    directory = Layout.of(config).text_embeddings
    samples = SampleIndex.open(Layout.of(config).index)
    rows = np.random.default_rng(0).normal(size=(int(samples.num_captions[:48].sum()), 9_000))
    save_npy(directory / "00000.npy", rows.astype(np.float32))
    fields = json.loads((directory / MANIFEST).read_text())
    fields["records"]["00000.npy"] = vars(files.record_of(directory / "00000.npy"))
    fields.pop(files.SEAL)
    files.write_json(directory / MANIFEST, files.sealed(fields))
    change(directory / "00000.npy", lambda rows: np.concatenate([rows[:-1], rows[-1:] + 1]))
    features = TextFeatures(directory, samples)
    assert features.get(0, 0).shape == (9_000,)
    with pytest.raises(RuntimeError, match="text_embeddings/00000.npy is damaged"):
        features.get(47, 0)


@pytest.mark.parametrize("name", ["samples.arrow", "shards.json"])
def test_a_changed_table_of_the_index_is_refused(config: Config, name: str) -> None:
    path = Layout.of(config).index / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"{name} is damaged.*mclclip index --force"):
        SampleIndex.open(Layout.of(config).index)
    with pytest.raises((RuntimeError, ValueError), match="--force"):
        index.run(config, SINGLE)
    again = index.run(config, SINGLE, force=True)
    assert len(again) == damage.NUM_SAMPLES


def test_a_changed_grouped_index_is_refused_and_made_again(config: Config) -> None:
    training(config)
    directory = Layout.of(config).train(1)
    files.write_json(directory / INTENT, made_of(directory))  # as if it had not finished
    (directory / MANIFEST).unlink()
    groups = StageGroups(directory / "grouped_index")
    assert groups.damage() is None
    change(directory / "grouped_index" / "sample_ids.npy", np.flipud)
    assert "sample_ids.npy is damaged" in str(groups.damage())
    with pytest.raises(RuntimeError, match=r"sample_ids.npy is damaged.*train --force"):
        training(config)
    train.run(config, SINGLE, stage=1, force=True)
    assert groups.damage() is None


def _data_of(config: Config) -> Path:
    return Path(str(config.data.sources["patterns"].shards)).parents[1]


def test_a_manifest_that_was_edited_is_refused(config: Config) -> None:
    """Its radices decide on the groups of a training."""
    path = Layout.of(config).pseudo_labels(1) / MANIFEST
    path.write_text(path.read_text().replace('"median": ', '"median": 1'))
    with pytest.raises(ValueError, match=r"manifest.json is damaged.*--force"):
        training(config)


# --- making again ------------------------------------------------------------------------------


def test_embeddings_that_are_not_finite_are_made_again_as_advised(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(features: Tensor) -> Tensor:
        return features * np.nan

    with monkeypatch.context() as patched:
        patched.setattr(embed, "unit", spoiled)
        embed.run(config, SINGLE, stage=0, force=True)
    with pytest.raises(ValueError, match="hold NaN or infinite.*'mclclip embed --force'"):
        cluster.run(config, SINGLE, stage=0, force=True)
    embed.run(config, SINGLE, stage=0, force=True)
    cluster.run(config, SINGLE, stage=0, force=True)


# --- shards ------------------------------------------------------------------------------------


@pytest.fixture
def own_shards(prepared_run: Path, tmp_path: Path) -> Config:
    """The run over a copy of its shards, which may be damaged."""
    data = shutil.copytree(prepared_run.parent / "data", tmp_path / "data")
    config = damage.options(tmp_path / "own", data, "cluster.feature=image")
    index.run(config, SINGLE)
    return config


def shard_of(config: Config, number: int = 0) -> Path:
    return Path(SampleIndex.open(Layout.of(config).index).shards[number].path)


def swap_captions(path: Path) -> None:
    """Changes words of captions, without a change of the file's size."""
    content = path.read_bytes()
    changed = content.replace(b"left", b"tfel").replace(b"red", b"der").replace(b" a ", b" A ")
    assert changed != content
    path.write_bytes(changed)


def test_other_captions_of_equal_size_are_refused(own_shards: Config) -> None:
    swap_captions(path := shard_of(own_shards))
    for verb in (lambda: index.run(own_shards, SINGLE), lambda: _train_zero(own_shards)):
        with pytest.raises(ValueError, match="has changed.*restore it") as caught:
            verb()
        assert str(path) in str(caught.value)


def _train_zero(config: Config) -> None:
    """Stage 0 as a training, which reads captions from shards."""
    options = damage.options(
        Path(config.run_dir), _data_of(config), "base={global_batch: 24, steps: 2}"
    )
    train.run(options, SINGLE, stage=0)


def test_another_time_alone_is_noted_and_nothing_else(own_shards: Config) -> None:
    directory = Layout.of(own_shards).index
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for number in (0, 1):
        os.utime(shard_of(own_shards, number), ns=(1, 1))
    digest = SampleIndex.open(directory).digest
    assert index.run(own_shards, SINGLE).digest == digest
    after = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert [name for name in before if before[name] != after[name]] == ["shard_times.json"]
    (directory / "shard_times.json").write_text("{")  # a cache: its loss costs a scan
    assert index.run(own_shards, SINGLE).digest == digest
    assert (directory / "shard_times.json").read_bytes() == after["shard_times.json"]


def test_captions_that_changed_under_an_old_time_are_never_read(own_shards: Config) -> None:
    """As after a copy that keeps times, or a fault of the disk."""
    path = shard_of(own_shards)
    times = path.stat().st_mtime_ns
    swap_captions(path)
    os.utime(path, ns=(times, times))
    index.run(own_shards, SINGLE)
    with pytest.raises(ValueError, match=r"^8 of 96 samples .*data\.max_bad_fraction=0\.01"):
        _train_zero(own_shards)


# --- samples that cannot be used ---------------------------------------------------------------


def spoil(samples: SampleIndex, *ids: int) -> dict[Path, bytes]:
    """Overwrites images; returns what their shards were."""
    before: dict[Path, bytes] = {}
    for sample_id in ids:
        path = Path(samples.shards[int(samples.shard_of[sample_id])].path)
        before.setdefault(path, path.read_bytes())
        with open(path, "r+b") as file:
            file.seek(int(samples.image_offset[sample_id]))
            file.write(b"no picture at all")
    return before


def restore(before: dict[Path, bytes]) -> None:
    for path, content in before.items():
        path.write_bytes(content)


def test_after_a_shard_is_restored_the_same_command_works(own_shards: Config) -> None:
    """Its list was believed for ever, also by embeddings that were begun."""
    export.stage(own_shards, SINGLE, stage=0)
    samples = SampleIndex.open(Layout.of(own_shards).index)
    before = spoil(samples, 3, 4, 50)
    samples.add_bad({3: "unidentified", 4: "unidentified", 50: "unidentified"})
    for _ in range(2):
        with pytest.raises(ValueError, match="of 96 samples cannot be used"):
            embed.run(own_shards, SINGLE, stage=0, text=False)
    assert SampleIndex.open(samples.directory).bad_ids().tolist() == [3, 4, 50]
    restore(before)
    assert SampleIndex.open(samples.directory).bad_ids().tolist() == []
    embed.run(own_shards, SINGLE, stage=0, text=False)
    directory = Layout.of(own_shards).embeddings(0)
    assert (np.abs(np.load(directory / "00000.npy")).max(axis=1) > 0).all()
    assert left_out(directory, 2).tolist() == []


def test_restored_samples_come_back_into_finished_embeddings_with_force(
    own_shards: Config, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(own_shards, data=replace(own_shards.data, max_bad_fraction=0.5))
    export.stage(config, SINGLE, stage=0)
    samples = SampleIndex.open(Layout.of(config).index)
    directory, before = Layout.of(config).embeddings(0), spoil(samples, 3, 50)
    embed.run(config, SINGLE, stage=0, text=False)
    cluster.run(config, SINGLE, stage=0)
    labels = Layout.of(config).clusters(0) / "cluster_labels.npy"
    assert left_out(directory, 2).tolist() == np.flatnonzero(np.load(labels)[:, 0] < 0).tolist()
    restore(before)
    # Rows of zeros are not clustered, though nothing is wrong with the samples any more.
    cluster.run(config, SINGLE, stage=0, force=True)
    assert np.flatnonzero(np.load(labels)[:, 0] < 0).tolist() == [3, 50]
    embed.run(config, SINGLE, stage=0, text=False)
    assert "no rows of 2 samples that could not be read and have changed" in caplog.text
    embed.run(config, SINGLE, stage=0, text=False, force="unfit")
    cluster.run(config, SINGLE, stage=0, force="unfit")
    assert (np.load(labels)[:, 0] >= 0).all()


def test_what_one_reader_cannot_use_is_not_kept_for_others(own_shards: Config) -> None:
    samples = SampleIndex.open(Layout.of(own_shards).index)
    samples.add_bad({1: "unfit", 2: "no_caption", 3: "truncated"})
    assert samples.bad_ids().tolist() == [3]


def test_a_list_of_an_older_version_is_looked_at_again(own_shards: Config) -> None:
    samples = SampleIndex.open(Layout.of(own_shards).index)
    key = samples.keys([3])[0]
    files.write_json(samples.directory / "bad_samples.json", {key: {"reason": "truncated"}})
    assert samples.bad_ids().tolist() == []


def test_pixels_are_compared_under_full(own_shards: Config) -> None:
    options = damage.options(
        Path(own_shards.run_dir), _data_of(own_shards), "data.verify=full", "cluster.feature=image"
    )
    export.stage(options, SINGLE, stage=0)
    with pytest.raises(ValueError, match="no checksums of them: run 'mclclip index'"):
        embed.run(options, SINGLE, stage=0, text=False)
    digest = SampleIndex.open(Layout.of(options).index).digest
    samples = index.run(options, SINGLE)
    assert samples.digest == digest and samples.image_crc32 is not None
    path = Path(samples.shards[0].path)
    times, content = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    content[int(samples.image_offset[0] + samples.image_size[0]) - 40] ^= 0x10  # a pixel or two
    assert content != path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(times, times))
    embed.run(damage.options(Path(options.run_dir), _data_of(options)), SINGLE, stage=0, text=False)
    assert samples.bad_samples() == {}
    embed.run(
        replace(options, data=replace(options.data, max_bad_fraction=0.5)),
        SINGLE, stage=0, text=False, force=True,
    )  # fmt: skip
    assert [entry["reason"] for entry in samples.bad_samples().values()] == ["changed"]
