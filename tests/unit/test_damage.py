"""Files of another size are refused when they are opened; a changed bit is found by doctor."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mclclip.cli import entry
from mclclip.config import Config, dump
from mclclip.data.datasets.sources import Sources
from mclclip.data.groups import StageGroups
from mclclip.data.labels import ClassLabels
from mclclip.data.row_store import left_out
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import PackedSample
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import INTENT, MANIFEST, RunPaths, parse_manifest, read_identity
from mclclip.run.steps import make_artifact
from mclclip.util import files
from mclclip.util.remake import Remake
from mclclip.verbs import cluster, embed, export, index, make_dataset, make_pairs, pack, train
from tests import damage


@pytest.fixture
def config(prepared_run: Path, tmp_path: Path) -> Config:
    return damage.copied(prepared_run, tmp_path)


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file, and not its size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def doctor(config: Config, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """What ``mclclip doctor RUN`` answers: its exit code, and its lines of what differs."""
    code = entry.main(["doctor", config.run_dir])
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]


def training(config: Config) -> None:
    train.run(config, SINGLE, stage=1)


# --- sizes, when something is opened ----------------------------------------------------------


def recluster(config: Config) -> None:
    shutil.rmtree(RunPaths.of(config).clusters(0))
    cluster.run(config, SINGLE, stage=0)


def class_labels(config: Config) -> ClassLabels:
    return ClassLabels(
        RunPaths.of(config).clusters(0), SampleIndex.open(RunPaths.of(config).index), 2
    )


READERS: dict[str, Callable[[Config], object]] = {
    "index/samples.arrow": lambda config: index.run(config, SINGLE),
    "stage_0/embeddings/00001.npy": recluster,
    "stage_0/clusters/cluster_labels.npy": class_labels,
    "stage_0/export/open_clip_model.safetensors": lambda config: load_towers(
        RunPaths.of(config).export(0)
    ),
    "stage_1/pseudo_labels/pseudo_labels.npy": training,
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_another_size_is_refused_when_it_is_opened(config: Config, name: str) -> None:
    cut(Path(config.run_dir) / name)
    with pytest.raises((RuntimeError, ValueError), match="--force") as caught:
        READERS[name](config)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_grouped_index_that_was_cut_is_refused_and_made_again(config: Config) -> None:
    training(config)
    directory = RunPaths.of(config).train(1)
    files.write_json(directory / INTENT, read_identity(directory))  # as if it had not finished
    (directory / MANIFEST).unlink()
    groups = StageGroups(directory / "grouped_index")
    assert groups.damage() is None
    cut(directory / "grouped_index" / "sample_ids.npy")
    with pytest.raises(RuntimeError, match=r"sample_ids.npy is damaged.*train --force"):
        training(config)
    train.run(config, SINGLE, stage=1, force=Remake.ALL)
    assert groups.damage() is None


# --- contents, by doctor ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_run(prepared_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    (root / "data").symlink_to(prepared_run.parent / "data")
    training(damage.copied(prepared_run, root))
    return root / "run"


def test_doctor_tells_the_first_difference_of_each_artifact(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed bit, a file that is gone, or a manifest that cannot be read."""
    config = damage.copied(trained_run, tmp_path)
    run = Path(config.run_dir)
    places = {
        "index": "samples.arrow", "stage_0/export": "open_clip_model.safetensors",
        "stage_0/embeddings": "00001.npy",
        "stage_1/train": "grouped_index/sample_ids.npy",
        "stage_1/train/checkpoints/step_00000002": ".metadata",
    }  # fmt: skip
    for place, name in places.items():
        flip(run / place / name)
    flip(run / "stage_0/embeddings/00000.json")  # the first difference is told
    (run / "stage_0/clusters/centroids.npy").unlink()
    (run / "stage_1/pseudo_labels" / MANIFEST).write_text("{")
    odd = run / "stage_0/text_embeddings" / MANIFEST
    files.write_json(odd, files.read_json(odd) | {"kind": ["x"]})
    places |= {"stage_0/clusters": "centroids.npy", "stage_1/pseudo_labels": MANIFEST}
    places["stage_0/text_embeddings"] = MANIFEST
    code, lines = doctor(config, capsys)
    assert code == 2 and len(lines) == len(places)
    for place, name in places.items():
        (line,) = (line for line in lines if f"{place}: " in line or f"{place}/{MANIFEST}" in line)
        assert name == MANIFEST or f"{place}: {name} " in line


def test_doctor_passes_a_whole_run_and_one_that_is_being_made(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = damage.copied(trained_run, tmp_path)
    assert doctor(config, capsys) == (0, [])
    embeddings = RunPaths.of(config).embeddings(0)
    files.write_json(embeddings / INTENT, read_identity(embeddings))
    (embeddings / MANIFEST).unlink()
    (embeddings / "00001.npy").unlink()
    temporary = RunPaths.of(config).train(1) / "checkpoints" / ".step_00000004.tmp"
    temporary.mkdir()
    (temporary / "state.json").write_text("{")
    assert doctor(config, capsys) == (0, [])


def test_doctor_reads_a_run_through_links(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = damage.copied(trained_run, tmp_path)
    run = Path(config.run_dir)
    (run / "stage_1").rename(tmp_path / "elsewhere")
    (run / "stage_1").symlink_to(tmp_path / "elsewhere")
    (run / "stage_1" / "again").symlink_to(run)  # a circle
    flip(run / "stage_1" / "pseudo_labels" / "pseudo_labels.npy")
    shutil.copytree(run / "index", run / "index.old-1")
    flip(run / "index.old-1" / "samples.arrow")
    code, lines = doctor(config, capsys)
    assert code == 2 and len(lines) == 1 and "stage_1/pseudo_labels" in lines[0]


def test_doctor_warns_of_files_without_their_list(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of a filter stand nowhere in the run, so no command is offered without them."""
    config = damage.copied(trained_run, tmp_path)
    run, step = Path(config.run_dir), "stage_1/train/checkpoints/step_00000002"
    (run / "stage_0/clusters/manifest.json").unlink()
    (run / step / "state.json").unlink()
    (run / "filters/filter").mkdir(parents=True)
    (run / "filters/filter/weights.npy").write_bytes(b"rows")
    assert entry.main(["doctor", config.run_dir]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warn")]
    assert len(lines) == 3
    for place in ("stage_0/clusters", step, "filters/filter"):
        assert any(place in line for line in lines)
    assert any("same command of filter " in line for line in lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stage_0/export/open_clip_model.safetensors", "export --config {} --stage 0 --force"),
        ("stage_1/pseudo_labels/pseudo_labels.npy", "cluster --config {} --stage 0 --force"),
    ],
)
def test_the_command_that_doctor_offers_makes_the_artifact_again(
    config: Config, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Path(config.run_dir) / "config.yaml"
    recorded.write_text(dump(config))
    flip(Path(config.run_dir) / name)
    code, (line,) = doctor(config, capsys)
    offered = words.format(recorded)
    assert code == 2 and f"'mclclip {offered}'" in line
    assert entry.main(shlex.split(offered)) == 0
    assert doctor(config, capsys) == (0, [])


def test_packing_verbs_list_every_file_for_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    few = {"num_samples": 20, "num_pairs": 2, "samples_per_shard": 3}
    make_dataset.run("patterns", run / "patterns", **few)
    make_pairs.run(run / "patterns" / "shards", run / "pairs", captions="txt")
    pictures = run / "patterns" / "pairs" / "MLLM_VLM Images"
    pack.pack(pictures, run / "data", samples_per_shard=2, held_out={"choose": 0.4})
    samples = [PackedSample(str(number), b"x", "jpg", ["a"]) for number in range(3)]
    splits = make_dataset.Splits("mine", 0, 2, {}, {})
    make_artifact(splits, run / "splits", (lambda *_: {"train": samples}, Sources()))
    (run / "pairs" / "struck.txt").write_text("written by a user")
    assert entry.main(["doctor", str(run)]) == 0
    capsys.readouterr()
    for place in ("patterns", "pairs", "data", "splits"):
        listed = parse_manifest(run / place / MANIFEST).records
        there = {str(p.relative_to(run / place)) for p in (run / place).rglob("*") if p.is_file()}
        assert {*listed} == there - {MANIFEST, "struck.txt"} and len(listed) > 1
        flip(run / place / max(listed))
    assert entry.main(["doctor", str(run)]) == 2
    assert capsys.readouterr().out.count("FAIL") == 4


def _data_of(config: Config) -> Path:
    return Path(str(config.data.sources["patterns"].shards)).parents[1]


# --- shards ------------------------------------------------------------------------------------


@pytest.fixture
def own_shards(prepared_run: Path, tmp_path: Path) -> Config:
    """The run over a copy of its shards, which may be damaged."""
    data = shutil.copytree(prepared_run.parent / "data", tmp_path / "data")
    config = damage.options(tmp_path / "own", data, "cluster.feature=image")
    index.run(config, SINGLE)
    return config


def shard_of(config: Config, number: int = 0) -> Path:
    return Path(SampleIndex.open(RunPaths.of(config).index).shards[number].path)


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
    directory = RunPaths.of(own_shards).index
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
    samples = SampleIndex.open(RunPaths.of(own_shards).index)
    before = spoil(samples, 3, 4, 50)
    samples.add_bad({3: "unidentified", 4: "unidentified", 50: "unidentified"})
    for _ in range(2):
        with pytest.raises(ValueError, match="of 96 samples cannot be used"):
            embed.run(own_shards, SINGLE, stage=0, text=False)
    assert SampleIndex.open(samples.directory).bad_ids().tolist() == [3, 4, 50]
    restore(before)
    assert SampleIndex.open(samples.directory).bad_ids().tolist() == []
    embed.run(own_shards, SINGLE, stage=0, text=False)
    directory = RunPaths.of(own_shards).embeddings(0)
    assert (np.abs(np.load(directory / "00000.npy")).max(axis=1) > 0).all()
    assert left_out(directory, 2).tolist() == []


def test_restored_samples_come_back_into_finished_embeddings_with_force(
    own_shards: Config, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(own_shards, data=replace(own_shards.data, max_bad_fraction=0.5))
    export.stage(config, SINGLE, stage=0)
    samples = SampleIndex.open(RunPaths.of(config).index)
    directory, before = RunPaths.of(config).embeddings(0), spoil(samples, 3, 50)
    embed.run(config, SINGLE, stage=0, text=False)
    cluster.run(config, SINGLE, stage=0)
    labels = RunPaths.of(config).clusters(0) / "cluster_labels.npy"
    assert left_out(directory, 2).tolist() == np.flatnonzero(np.load(labels)[:, 0] < 0).tolist()
    restore(before)
    # Rows of zeros are not clustered, though nothing is wrong with the samples any more.
    cluster.run(config, SINGLE, stage=0, force=Remake.ALL)
    assert np.flatnonzero(np.load(labels)[:, 0] < 0).tolist() == [3, 50]
    embed.run(config, SINGLE, stage=0, text=False)
    assert "no rows of 2 samples" in caplog.text
    embed.run(config, SINGLE, stage=0, text=False, force=Remake.UNFIT)
    cluster.run(config, SINGLE, stage=0, force=Remake.UNFIT)
    assert (np.load(labels)[:, 0] >= 0).all()


def test_pixels_are_compared_where_the_index_has_their_checksums(own_shards: Config) -> None:
    options = damage.options(
        Path(own_shards.run_dir), _data_of(own_shards), "data.verify=full", "cluster.feature=image"
    )
    export.stage(options, SINGLE, stage=0)
    with pytest.raises(ValueError, match="no checksums of them: run 'mclclip index'"):
        embed.run(options, SINGLE, stage=0, text=False)
    digest = SampleIndex.open(RunPaths.of(options).index).digest
    samples = index.run(options, SINGLE)
    assert samples.digest == digest and samples.image_crc32 is not None
    path = Path(samples.shards[0].path)
    times, content = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    content[int(samples.image_offset[0] + samples.image_size[0]) - 40] ^= 0x10  # a pixel or two
    assert content != path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(times, times))
    plain = damage.options(Path(options.run_dir), _data_of(options), "data.max_bad_fraction=0.5")
    embed.run(plain, SINGLE, stage=0, text=False)
    assert [entry["reason"] for entry in samples.bad_samples().values()] == ["changed"]


def test_a_type_that_arrow_does_not_know_is_damage(tmp_path: Path) -> None:
    again = pytest.raises(RuntimeError, match="samples.arrow is damaged .*: index again")
    with again, files.damaged_if_unreadable(tmp_path / "samples.arrow", "index again"):
        raise pa.ArrowNotImplementedError("Integers with less than 8 bits not implemented")
