"""The relocate verb: copies of samples in the order of groups, and what reads them."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from mclclip.config import Config, from_tree
from mclclip.data.bytes import BadSample, Bytes
from mclclip.data.locations import Locations
from mclclip.data.options import DataConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths, read_manifest
from mclclip.verbs import index, relocate
from tests.shard_server import serving
from tests.tars import write_tar
from tests.unit.test_disk_errors import at_most

NUM_SAMPLES = 60
LABELS = np.random.default_rng(0).integers(-1, 4, size=NUM_SAMPLES)
Members = list[tuple[str, bytes]]


def picture(number: int, kind: str) -> bytes:
    sink = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (6 + number % 5, 7, 3), dtype=np.uint8)
    if kind == "npy":
        np.save(sink, pixels)
    else:
        Image.fromarray(pixels).save(sink, {"jpg": "jpeg"}.get(kind, kind))
    return sink.getvalue()


def members_of(number: int) -> Members:
    """Two sources of 30: one with .txt, some of it missing; one with captions in .json."""
    source, inside = divmod(number, 30)
    kind = ("jpg", "png", "webp", "npy")[number % 4]
    key = f"{'folder/' * (number % 3)}{'x' * (130 * (number % 7 == 3))}{inside:03d}"
    facts = json.dumps({"captions": [f"first of {number}", "second"], "more": "é" * 40})
    text = [("txt", f"caption {number}".encode())] if number % 5 else []
    found = [("json", facts.encode()), (kind, picture(number, kind)), *(text if not source else [])]
    return [(f"{key}.{extension}", data) for extension, data in found]


def options(root: Path, **more: Any) -> Config:
    sources = {
        "a": {"shards": f"{root}/a/*.tar"},
        "b": {"shards": f"{root}/b/*.tar", "captions": "json:captions"},
    }
    return from_tree(
        {
            "run_dir": f"{root}/run",
            "data": {"sources": sources, "index_workers": 1, **more.pop("data", {})},
            "cluster": {"num_clusters": 4},
            "relocate": {"samples_per_shard": 7, **more},
        }
    )


def write_labels(config: Config, labels: np.ndarray) -> None:
    layout = RunPaths.of(config)
    shutil.rmtree(layout.pseudo_labels(1), ignore_errors=True)
    samples = SampleIndex.open(layout.index)
    artifact = Artifact(
        layout.pseudo_labels(1), kind="pseudo_labels", config={},
        inputs={"index": samples.digest, "of": str(labels.tolist())},
    ).compare(write=True)  # fmt: skip
    np.save(artifact.directory / "pseudo_labels.npy", labels.astype(np.int64)[:, None])
    artifact.finish({"radices": [4]})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """An index over both sources, and pseudo labels of stage 1."""
    for number in range(6):
        samples = [members_of(10 * number + place) for place in range(10)]
        write_tar(tmp_path / "ab"[number // 3] / f"{number}.tar", itertools.chain(*samples))
    config = options(tmp_path)
    index.run(config, SINGLE)
    write_labels(config, LABELS)
    return config


def opened(config: Config, url: str | None = None) -> tuple[SampleIndex, Locations]:
    layout = RunPaths.of(config)
    samples = SampleIndex.open(layout.index)
    return samples, Locations.open(layout.relocated(1, config.relocate.folder), samples, url)


def raw_samples(config: Config, locations: Locations | None = None) -> list[Any]:
    samples = SampleIndex.open(RunPaths.of(config).index)
    return Bytes(samples, DataConfig(), locations).read(range(len(samples)))


# --- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("samples_per_shard", [7, 10_000])
def test_every_labelled_sample_is_once_in_the_order_of_its_group(
    config: Config, tmp_path: Path, samples_per_shard: int
) -> None:
    config = options(tmp_path, samples_per_shard=samples_per_shard)
    folder = relocate.run(config, SINGLE, stage=1)
    samples = SampleIndex.open(RunPaths.of(config).index)
    expected = sorted(np.flatnonzero(LABELS >= 0), key=lambda i: (LABELS[i], i))
    tars = sorted(folder.glob("*.tar"))
    assert len(tars) == -(-len(expected) // samples_per_shard)
    found = [s for tar in tars for s in webdataset.WebDataset(str(tar), shardshuffle=False)]
    assert [sample["__key__"] for sample in found] == samples.keys(expected)
    for number, sample in zip(expected, found, strict=True):
        given = {name.split(".")[1]: data for name, data in members_of(int(number))}
        (kind,) = given.keys() - {"txt", "json"}
        text = {"txt": given.get("txt")} if number < 30 else {"json": given["json"]}
        wanted = {kind: given[kind], **{k: v for k, v in text.items() if v is not None}}
        assert {k: v for k, v in sample.items() if not k.startswith("__")} == wanted
    manifest = read_manifest(folder, "relocated")
    assert manifest.counts["without_label"] == (LABELS < 0).sum()
    assert manifest.counts["size_bytes"] == sum(tar.stat().st_size for tar in tars)
    left = {path.name for path in folder.iterdir()} - {tar.name for tar in tars}
    assert left == {"locations.npy", "manifest.json"}


def test_samples_are_the_same_in_either_form(config: Config) -> None:
    before = raw_samples(config)
    relocate.run(config, SINGLE, stage=1)
    samples, relocated = opened(config)
    assert raw_samples(config, pickle.loads(pickle.dumps(relocated))) == before
    places = relocated.of(np.arange(len(samples)))
    copied = (places[..., 0] >= len(samples.shards)).all(axis=1)
    assert copied.tolist() == (LABELS >= 0).tolist()
    assert (places[~copied] == Locations(samples).of(np.flatnonzero(~copied))).all()
    # Those that were not copied come from the index's own shards; the others need none of these.
    for shard in samples.shards:
        Path(shard.path).rename(f"{shard.path}.away")
    read, inside = Bytes(samples, DataConfig(), relocated), np.flatnonzero(LABELS >= 0)
    assert read.read(inside) == [before[number] for number in inside]
    with pytest.raises(FileNotFoundError, match="is not on disk any more"):
        read.read(np.flatnonzero(LABELS < 0)[:1])


def test_a_group_is_read_in_one_piece(config: Config) -> None:
    """Ranges of a group follow each other, but for the tar's headers and its shards' ends."""
    relocate.run(config, SINGLE, stage=1)
    places = opened(config)[1].of(np.flatnonzero(LABELS == 2))[..., :3].tolist()
    ranges = [member for sample in places for member in sorted(sample) if member[2]]
    assert ranges == sorted(ranges)
    for (shard, start, size), (next_shard, next_start, _) in itertools.pairwise(ranges):
        if next_shard == shard:
            assert 0 < next_start - (start + size) <= 4 * 512  # padding, and the next header
        else:
            assert next_shard == shard + 1 and next_start <= 4 * 512


def test_keys_that_lead_out_of_a_folder_name_no_member(tmp_path: Path) -> None:
    """What unpacks a copy by its names stays in its folder; a training reads the same samples."""
    leading_out = ("../../up", "/../top", "in/../../../up", "back\\..\\up/x", "/top")
    names = (*leading_out, "a..b/x", "./here", "0000001")
    samples = [
        [(f"{name}.jpg", picture(number, "jpg")), (f"{name}.txt", f"caption {number}".encode())]
        for number, name in enumerate(names)
    ]
    write_tar(tmp_path / "a/0.tar", itertools.chain(*samples))
    write_tar(tmp_path / "b/0.tar", members_of(30))
    config = options(tmp_path, samples_per_shard=100)
    index.run(config, SINGLE)
    indexed = SampleIndex.open(RunPaths.of(config).index)
    write_labels(config, np.zeros(len(indexed), np.int64))
    before = raw_samples(config)
    folder = relocate.run(config, SINGLE, stage=1)
    with tarfile.open(folder / "00000.tar") as tar:
        members = tar.getnames()
    numbered = {f"{number:09d}" for number in indexed.ids_of([f"a/{key}" for key in leading_out])}
    stems = {*numbered, *(f"a/{key}" for key in names[5:])}
    assert {name for name in members if not name.startswith("b/")} == {
        f"{stem}.{extension}" for stem in stems for extension in ("jpg", "txt")
    }
    assert raw_samples(config, opened(config)[1]) == before
    assert not any(isinstance(sample, BadSample) for sample in before)


# --- going on, and being refused ---------------------------------------------------------------


def test_samples_that_changed_or_are_cut_short_are_counted_and_read_where_they_were(
    config: Config, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mclclip")
    samples = SampleIndex.open(RunPaths.of(config).index)
    ids = np.flatnonzero((LABELS >= 0) & (samples.num_captions > 0))
    changed, cut = int(ids[4]), int(np.flatnonzero(LABELS[50:] >= 0)[-1] + 50)
    shard = samples.shards[int(samples.shard_of[changed])]
    with open(shard.path, "r+b") as file:
        file.seek(int(samples.text_offset[changed]))
        file.write(b"X")
    last = samples.shards[int(samples.shard_of[cut])]
    with open(last.path, "r+b") as file:
        file.truncate(int(samples.image_offset[cut]) + 3)
    monkeypatch.setattr(relocate, "check_shards", lambda *_: None)  # as if it came while copying
    before = raw_samples(config)
    with pytest.raises(ValueError, match=r"data.max_bad_fraction=0.01 allows 0"):
        relocate.run(config, SINGLE, stage=1)
    config = options(tmp_path, data={"max_bad_fraction": 0.5})
    folder = relocate.run(config, SINGLE, stage=1)
    lost = int((LABELS[samples.shard_of == samples.shard_of[cut]] >= 0)[(cut % 10) :].sum())
    assert read_manifest(folder, "relocated").counts["not_copied"] == {
        "changed": 1, "truncated": lost,
    }  # fmt: skip
    assert f"{1 + lost} samples cannot be copied (" in caplog.text
    relocated = opened(config)[1]
    lost_ids = np.array([changed, cut])
    assert (relocated.of(lost_ids) == Locations(samples).of(lost_ids)).all()
    assert raw_samples(config, relocated) == before
    assert before[changed] == BadSample(changed, "changed")


@pytest.mark.parametrize(
    ("damage", "behind_url"), [("bit", False), ("other", False), ("cut", True), ("gone", False)]
)
def test_damaged_copies_are_bad_samples_and_the_index_does_not_list_them(
    config: Config, monkeypatch: pytest.MonkeyPatch, damage: str, behind_url: bool
) -> None:
    """Also shards of the same size with other samples, such as an upload from before. A shard that
    is gone, or that its store says has changed, is one line."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    before = raw_samples(config)
    folder = relocate.run(config, SINGLE, stage=1)
    if damage == "cut":
        whole = (folder / "locations.npy").read_bytes()
        (folder / "locations.npy").write_bytes(whole[:-8])
        with pytest.raises(RuntimeError, match=r"locations.npy.*relocate --force"):
            opened(config)
        (folder / "locations.npy").write_bytes(whole)
    with serving(folder) as server:
        samples, copies = opened(config, server.url("") if behind_url else None)
        damage_shards(folder, damage)
        if damage in ("cut", "gone"):
            with pytest.raises((OSError, RuntimeError), match=r"0000\d.tar is missing"):
                opened(config)
        if behind_url or damage == "gone":
            with pytest.raises(OSError, match="shard .*00000.tar"):
                raw_samples(config, copies)
            return
        read = raw_samples(config, copies)
    bad = {s.sample_id: s.reason for s in read if isinstance(s, BadSample)}
    assert {*bad.values()} == {"damaged_copy"}
    assert [s for s in read if s.sample_id not in bad] == [
        s for s in before if s.sample_id not in bad
    ]
    samples.add_bad(bad)
    assert not len(samples.bad_ids())


def damage_shards(folder: Path, damage: str) -> None:
    for tar in folder.glob("*.tar"):
        data = bytearray(tar.read_bytes())
        if damage == "bit":
            data[600:-600:7] = bytes(byte ^ 1 for byte in data[600:-600:7])
        elif damage == "other":
            data.reverse()
        tar.write_bytes(bytes(data) if damage != "cut" else bytes(data[:700]))
        if damage == "gone":
            tar.unlink()


def test_what_cannot_be_copied_at_all_is_told_before_anything_is_written(
    config: Config, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(ValueError, match=r"stage 0 .*not trained on groups"):
        relocate.run(config, SINGLE, stage=0)
    with pytest.raises(ValueError, match=r"folder=s3://bucket is a url"):
        relocate.run(options(tmp_path, folder="s3://bucket"), SINGLE, stage=1)
    with pytest.raises(ValueError, match=r"relocate.url: 'ftp://x' is neither"):
        options(tmp_path, url="ftp://x")
    (tmp_path / "afile").write_text("mine")
    with pytest.raises(ValueError, match=r"relocate.folder=.*afile is a file"):
        relocate.run(options(tmp_path, folder=f"{tmp_path}/afile"), SINGLE, stage=1)
    theirs = RunPaths.of(config).relocated(1, f"{tmp_path}/mine")
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"relocate.folder .*did not write"):
        relocate.run(options(tmp_path, folder=f"{tmp_path}/mine"), SINGLE, stage=1)
    with pytest.raises(FileNotFoundError, match="no finished pseudo_labels"):
        relocate.run(config, SINGLE, stage=2)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"needs about .* GiB, the disk of .* GiB free: name"):
        relocate.run(config, SINGLE, stage=1)
    monkeypatch.undo()
    write_labels(config, np.full(NUM_SAMPLES, -1))
    with pytest.raises(ValueError, match="no sample has a pseudo label"):
        relocate.run(config, SINGLE, stage=1)
    assert not (tmp_path / "run/stage_1/relocated").exists()


@pytest.mark.parametrize("num_bytes", [200, 5_000])
def test_a_full_disk_is_told_with_the_file(config: Config, tmp_path: Path, num_bytes: int) -> None:
    """While samples are sorted by group, and while a shard is written; the next call goes on."""
    config = options(tmp_path, folder=f"{tmp_path}/fast")
    copies = RunPaths.of(config).relocated(1, f"{tmp_path}/fast")
    assert re.fullmatch(r"run-\w{6}/stage_1", str(copies.relative_to(tmp_path / "fast")))
    twin = RunPaths(tmp_path / "other" / "run")  # the runs of a race have one name
    assert twin.relocated(1, f"{tmp_path}/fast").parent != copies.parent
    with at_most(num_bytes), pytest.raises(OSError, match="File too large") as caught:
        relocate.run(config, SINGLE, stage=1)
    assert str(caught.value.filename).startswith(f"{copies}/")
    relocate.run(config, SINGLE, stage=1)
    assert raw_samples(config, opened(config)[1]) == raw_samples(config)
