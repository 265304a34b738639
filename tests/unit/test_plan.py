"""The dry run: known numbers, refusals in one line, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip import config
from mclclip.config import Config
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.plan import costs, memory
from mclclip.ranks.process_group import SINGLE
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.util.remake import Remake
from mclclip.verbs import cluster, embed, export, index, plan, train
from mclclip.verbs.plan import Machine
from tests import tiny
from tests.contracts.objective_cases import CASES, TEACHERS, options_of
from tests.matrix import in_soak, kept
from tests.plans import CC12M, recipe

RECIPES = sorted((tiny.ROOT / "launch" / "recipes").glob("*.yaml"))
GIB = 2**30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes' run directories are relative; a disk of 100 TiB, whatever the machine has."""
    monkeypatch.chdir(tmp_path)
    roomy = Usage(100 * 1024 * GIB, 0, 100 * 1024 * GIB)
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: roomy)


ONE_BLOCK = (f"model.name={json.dumps(tiny.ONE_BLOCK)}", "train.lock.image_blocks=1", "base=null")


def tiny_config(*overrides: str) -> Config:
    """A run of a model of one block: measuring takes its time by the number of operations."""
    return tiny.make_config(Path("run"), Path("data"), *ONE_BLOCK[:2], *overrides)


def refusal(options: Config, machine: Machine, samples: int | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        plan.run(options, machine, samples=samples, as_json=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the machine -------------------------------------------------------------------------------


def test_a_plan_for_cpus_says_nothing_of_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither their libraries nor their speed; measured rates give its hours."""
    options = tiny_config("base=null", "device=cpu")
    plan.run(options, Machine(1, 2), samples=500, as_json=False)
    shown = capsys.readouterr().out
    assert "1 node x 2 CPU ranks = 2 ranks" in shown and "--samples-per-s" in shown
    for word in ("GPU", "CUDA", "NCCL", "30 %", "TFLOP/s", "nan", "None"):
        assert word not in shown
    found = plan.compute(options, Machine(1, 2), 500)["hours"]
    assert found["rank_hours"] is None and "peak_tflops" not in found["speed"]
    rates = plan.Speed(samples_per_s=10.0, images_per_s=20.0)
    later = plan.compute(options, Machine(1, 2), 500, rates)["hours"]["passes"]
    assert all(of["hours"] for of in later if of["given"]) and any(of["given"] for of in later)


# --- known numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", kept(RECIPES, 21), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # These start from an export, which is not there yet.
    options = ["model.name=ViT-L-14"] if path.stem in ("lit", "finetune_imagenet") else []
    plan.run(config.load(path, options), Machine(), samples=CC12M, as_json=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    for word in ("samples seen", "GiB per rank (estimate)", "GiB on disk", "\nclusters ", "in all"):
        assert word in shown
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_the_small_recipe() -> None:
    found = plan.compute(recipe("cc12m_vitb32"), Machine(1, 8), CC12M)
    kind = found["memory"]["train"]
    trainable = kind["trained_weights"]
    assert trainable + kind["frozen_weights"] == 151_277_313
    counters = kind["parts"]["optimizer"] - 8 * trainable  # beside two fp32 moments
    assert 0 <= counters < 1000
    assert kind["parts"]["gradients"] == kind["parts"]["engine"] == 4 * trainable
    assert kind["local_batch"] == kind["micro_batch"] == 1024
    # train.py rounds epochs x whole steps: 20 x floor(10,968,539 / 8,192).
    assert [t["steps"] for t in found["trainings"]] == [(26_760, 26_760)] * 3
    assert found["trainings"][2]["groups"] == (1, 1000)
    assert found["disk"]["embeddings"] == 4 * CC12M * 512 * 2  # three stages and the captions
    assert found["disk"]["clusters"] == 3 * (CC12M * (4 + 2) + 10 * 512 * 4)
    kinds = ("checkpoints", "exports", "embeddings", "clusters")
    assert found["disk"]["sum"] == sum(found["disk"][kind] for kind in kinds)
    checkpoint = found["disk"]["trainings"][0]
    assert checkpoint["each"] == kind["parts"]["parameters"] + 8 * trainable + counters
    assert checkpoint["kept"] == checkpoint["each"]
    assert found["disk"]["checkpoints"] == (3 + 2) * checkpoint["each"]  # two while one runs


def test_options_move_the_parts_they_should() -> None:
    def parts(*overrides: str, ranks: int = 4) -> dict[str, int]:
        options = tiny_config("base=null", "num_stages=1", *overrides)
        found: dict[str, Any] = memory.measure(options, "train", options.train, Machine(1, ranks))
        return found["parts"]  # type: ignore[no-any-return]

    plain = parts()
    trained = plain["gradients"]
    less = "train.engine.grad_checkpointing=true"
    changed = parts("train.optimizer=lion", "train.ema_decay=0.9", less)
    assert changed["optimizer"] == changed["ema"] == trained
    assert changed["activations"] < plain["activations"]
    shared = parts("train.engine.name=fsdp")
    assert shared["parameters"] == -(-plain["parameters"] // 4)
    assert shared["gradients"] == -(-trained // 4)
    # Gradient caching in several micro-batches keeps whole gradients until the last.
    assert parts("train.engine={name: fsdp, micro_batch: 1}")["gradients"] == trained
    images = "train.lock={image_blocks: all, text: false}"
    whole, micro = (parts(images, f"train.engine.micro_batch={n}", ranks=1) for n in ("null", 6))
    assert micro["activations"] == pytest.approx(whole["activations"] / 4, rel=0.1)  # of 24
    alone = parts("train.lora={}", "device=cuda", ranks=1)
    assert alone["gradients"] < trained and alone["engine"] == 0
    assert "cuda" not in plain and alone["cuda"] > 0


def test_dropped_patches_take_neither_memory_nor_operations() -> None:
    def costs(*overrides: str) -> tuple[int, int, int]:
        images = "train.lock={image_blocks: all, text: false}"
        options = tiny_config("base=null", images, *overrides)
        found = plan.compute(options, Machine(1, 1), 500)["memory"]["train"]
        operations = found["operations"]
        return found["parts"]["activations"], operations["sample"], operations["image"]

    whole, half = costs(), costs("train.patch_dropout=0.5")  # 17 tokens and 9
    assert 0.4 * whole[0] < half[0] < 0.7 * whole[0]
    assert 0.4 * whole[1] < half[1] < 0.7 * whole[1]
    assert half[2] == whole[2]  # embedding sees whole pictures


def objectives() -> list[Any]:
    """Every case of the contract; `make test` has one of each kind of input and of state. Those
    of `test_count_operations.py` are planned there."""
    quick = {"info_nce-edited", "mlcd", "sum", "distill"}
    assert quick <= {*CASES}
    return kept([*CASES], *(n for n, name in enumerate(CASES) if name in quick))


@pytest.mark.parametrize("name", objectives())
def test_every_objective_is_planned(name: str) -> None:
    case = CASES[name]
    tree = tiny.tree(Path("run"), Path("data"), locked_text=case.frozen_text)
    tree["model"]["name"] = tiny.RESNET if case.resnet else tiny.MODEL
    options = config.from_tree(tree | {"base": None})
    settings = json.dumps(case.settings)
    for teacher in TEACHERS:  # of the contract's, which are no files
        settings = settings.replace(f'"{teacher}"', '"tiny_clip@random"')
    objective = options_of(json.loads(settings))
    training = replace(options.train, objective=objective, precision="float64")
    parts = memory.measure(options, "train", training, Machine(1, 4))["parts"]
    assert parts["loss"] > 0 and parts["activations"] > 0


def test_controls_and_stage_zero_are_counted() -> None:
    found = plan.steps.count(tiny_config("controls=[ungrouped,random_groups]"), 192)
    names = [(t["stage"], t["variant"]) for t in found["trainings"]]
    assert names[0] == (0, "mcl") and len(names) == 1 + 2 * 3
    assert all(t["steps"] == (6, 6) for t in found["trainings"])
    groups = {(t["stage"], t["variant"]): t["groups"] for t in found["trainings"]}
    assert groups[2, "mcl"] == groups[2, "random_groups"] == (1, 9)
    assert groups[2, "ungrouped"] == (1, 1)


# --- what an epoch makes of the groups ----------------------------------------------------------


def epochs_of(options: Config) -> dict[tuple[int, str], dict[str, Any]]:
    """Rows of the table by stage and the sizes that are assumed."""
    found = plan.steps.count(options, CC12M)["trainings"]
    return {(t["stage"], row["sizes"]): row for t in found for row in t["coverage"]}


def test_shares_of_the_papers_setting() -> None:
    """1,000 equal groups of 10,968 or 10,969 pairs: one full batch of 8,192 each, 2,777 are over.

    Of those backoff makes 338 more batches: 1,000 of 1,338 steps compare at the full label.
    """
    rows = epochs_of(recipe("cc12m_vitl14"))
    assert list(rows) == [(s, sizes) for s in (1, 2, 3) for sizes in plan.steps.ASSUMED]
    shares = {key: round(100 * row["full_label_share"], 1) for key, row in rows.items()}
    assert shares == {
        (1, "equal"): 99.4, (2, "equal"): 97.2, (3, "equal"): 74.7,
        (1, "long-tailed"): 99.8, (2, "long-tailed"): 96.7, (3, "long-tailed"): 68.6,
    }  # fmt: skip
    assert {row["remainder"] for row in rows.values()} == {CC12M % 8192}
    assert {row["steps"] for row in rows.values()} == {1338}
    dropped = epochs_of(recipe("cc12m_vitl14", "train.plan.policy=drop"))[3, "equal"]
    assert (dropped["steps"], dropped["remainder"]) == (1000, CC12M - 1000 * 8192)
    assert dropped["full_label_share"] == 1.0
    masked = epochs_of(recipe("cc12m_vitl14", "train.plan.policy=mask"))[3, "equal"]
    assert (masked["mixed_steps"], masked["full_label_share"]) == (338, 1.0)
    assert 6_700 < masked["negatives"] < 6_800
    wrapped = epochs_of(recipe("cc12m_vitl14", "train.plan.policy=wrap"))[3, "equal"]
    assert (wrapped["steps"], wrapped["repeated"]) == (2000, 2000 * 8192 - CC12M)


def test_assumed_sizes() -> None:
    """Zipf's law in every clustering, and no sample lost to rounding."""
    equal, tailed = (
        of["groups"] for of in plan.steps.estimate_coverage(1100, (2, 3), 4, "backoff")
    )
    assert (equal["smallest"], equal["median"], equal["largest"]) == (183, 183, 184)
    assert (tailed["num_groups"], tailed["smallest"], tailed["largest"]) == (6, 67, 400)
    assert tailed["median"] == (133 + 200) / 2
    few, _ = plan.steps.estimate_coverage(9, (3, 3), 4, "backoff")
    assert few["groups"]["num_groups"] == 9
    assert plan.steps.estimate_coverage(100, (11, 11), 4, "backoff") == []


def test_what_has_no_groups_shows_none() -> None:
    for options in (recipe("mlcd_finetune_vitl14"), recipe("lit", "model.name=ViT-B-32")):
        (training,) = plan.steps.count(options, CC12M)["trainings"]
        assert training["coverage"] == []
    found = plan.steps.count(tiny_config("num_stages=1", "controls=[ungrouped]"), 192)
    assert [bool(t["coverage"]) for t in found["trainings"]] == [False, True, False]


def test_kept_checkpoints() -> None:
    options = tiny_config("train.checkpoint={every: 2, keep: 2, keep_every: 4}", "train.steps=11")
    # Of 2, 4, 6, 8, 10 and 11 the last, and 4 and 8 for good.
    assert costs.count_checkpoints(options.train, (11, 11)) == 3


# --- what is on disk ---------------------------------------------------------------------------


def test_counts_are_those_of_the_run(tmp_path: Path) -> None:
    """Index, labels and begun trainings are read; what was trained is what was planned."""
    data = tiny.make_data(tmp_path / "data", num_samples=96)
    options = tiny.make_config(
        tmp_path / "run", data, *ONE_BLOCK, "num_stages=1", "train.steps=null", "train.epochs=1.5"
    )
    index.run(options, SINGLE)
    export.stage(options, SINGLE, stage=0)
    embed.run(options, SINGLE, stage=0)
    cluster.run(options, SINGLE, stage=0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = plan.compute(options, Machine(), 1)  # the index counts, not --samples
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert found["samples"]["number"] == 96
    planned = found["trainings"][0]
    assert planned["exact"] and planned["groups"][0] == planned["groups"][1] > 1
    (epoch,) = planned["coverage"]
    assert json.loads(json.dumps(found))["trainings"][0]["coverage"][0]["steps"] == epoch["steps"]
    assert epoch["sizes"] == "found" and epoch["steps"] == 96 // 24
    assert "no labels yet" not in plan.table.text(found)
    train.run(options, SINGLE, stage=1)
    layout = RunPaths.of(options)
    done = artifacts.read_manifest(layout.train(1), "train")
    assert planned["steps"] == (done.counts["steps"],) * 2
    written = sum(p.stat().st_size for p in layout.embeddings(0).glob("*.npy"))
    assert written == pytest.approx(found["disk"]["embeddings"], rel=0.1)
    clusters = sum(p.stat().st_size for p in layout.clusters(0).glob("*.npy"))
    assert clusters - 3 * 128 == found["disk"]["clusters"]  # but for the files' headers
    checkpoints = layout.train(1) / "checkpoints"
    each = [
        sum(p.stat().st_size for p in step.rglob("*") if p.is_file())
        for step in checkpoints.glob("step_*")
    ]
    assert max(each) == pytest.approx(found["disk"]["trainings"][0]["each"], rel=0.1)
    # Labels that were remade are counted instead of the groups that the training began with.
    remade = tiny.make_config(
        tmp_path / "run", data, *ONE_BLOCK, "num_stages=1", "cluster.num_clusters=2"
    )
    cluster.run(remade, SINGLE, stage=0, force=Remake.ALL)
    (planned,) = plan.steps.count(remade, None)["trainings"]
    assert planned["exact"] and planned["groups"] == (2, 2)
    shutil.rmtree(layout.pseudo_labels(1))
    (planned,) = plan.steps.count(remade, None)["trainings"]
    assert not planned["exact"] and planned["groups"] == (1, 2)


def test_copies_in_the_run_directory_are_counted(tmp_path: Path) -> None:
    packed = [PackedSample(f"{n:04d}", b"image", "jpg", ["a"]) for n in range(60)]
    (tar,) = write_shards(packed, tmp_path / "data/shards", 60)
    options = (*ONE_BLOCK, "num_stages=2", "train.global_batch=4", "relocate.enabled=true")
    config = tiny.make_config(tmp_path / "run", tmp_path / "data", *options)
    unknown = plan.compute(config, plan.Machine(1, 1))  # no index yet
    assert {unknown["disk"][kind] for kind in ("copies", "embeddings", "clusters")} == {None}
    text = plan.table.text(unknown)
    assert "samples: unknown" in text and "at least" in text.splitlines()[0]
    index.run(config, SINGLE)
    found = plan.compute(config, plan.Machine(1, 1))
    assert "at least" not in plan.table.text(found).splitlines()[0]
    (tmp_path / "run/stage_0.old-1").mkdir()  # what was moved aside makes no room
    (tmp_path / "run/stage_0.old-1/weights").write_bytes(bytes(100_000))
    again = plan.compute(config, plan.Machine(1, 1))
    assert again["disk"]["present"] == found["disk"]["present"]
    assert found["disk"]["copies"] == 2 * tar.stat().st_size
    assert any(line.split() == ["copies", "0.00"] for line in plan.table.text(found).splitlines())
    elsewhere = tiny.make_config(
        tmp_path / "run", tmp_path / "data", *options, f"relocate.folder={tmp_path}/other"
    )
    planned = plan.compute(elsewhere, plan.Machine(1, 1))["disk"]
    assert planned["copies, in their own folder"] == found["disk"]["copies"]
    assert planned["sum"] == found["disk"]["sum"] - found["disk"]["copies"]


def test_samples_without_captions_are_counted_for_who_reads_captions(tmp_path: Path) -> None:
    """60 images, every third without a caption; of these one is broken, and one of the others."""
    captions = [[] if number % 3 == 0 else ["a caption"] for number in range(60)]
    packed = [PackedSample(f"{n:04d}", b"image", "jpg", texts) for n, texts in enumerate(captions)]
    write_shards(packed, tmp_path / "data/shards", 25)
    overrides = (*ONE_BLOCK, "num_stages=1", "train.epochs=1", "train.steps=null",
                 "train.global_batch=4", "controls=[random_groups]")  # fmt: skip
    options = tiny.make_config(tmp_path / "run", tmp_path / "data", *overrides)
    samples = index.run(options, SINGLE)
    samples.add_bad({0: "truncated", 1: "truncated"})
    counted = plan.steps.count(options, None)
    assert counted["samples"] == {
        "number": 60, "usable": 58, "captions": 40, "without_caption": 19, "exact": True,
        "size_bytes": sum(tar.stat().st_size for tar in (tmp_path / "data/shards").glob("*.tar")),
    }  # fmt: skip
    assert [t["steps_per_epoch"] for t in counted["trainings"]] == [(9, 9)] * 2  # of 39 samples
    labels = (np.arange(60) > 50).astype(np.int64)  # 33 usable ones of 0, 6 of 1
    directory = RunPaths.of(options).pseudo_labels(1)
    artifact = Artifact(directory, kind="pseudo_labels", config={},
                             inputs={"index": samples.digest}).compare(write=True)  # fmt: skip
    np.save(directory / "pseudo_labels.npy", labels[:, None])
    artifact.finish({"radices": [3]})
    dropping = tiny.make_config(tmp_path / "run", tmp_path / "data", *overrides,
                                "train.plan.policy=drop")  # fmt: skip
    (training, _) = plan.steps.count(dropping, None)["trainings"]
    assert training["exact"] and training["steps_per_epoch"] == (33 // 4 + 6 // 4,) * 2
    mlcd = "train.objective={kind: mlcd, labels_per_sample: 1, sample_rate: 0.5}"
    without = tiny.make_config(tmp_path / "run", tmp_path / "data", *overrides[:-1], mlcd)
    (training,) = plan.steps.count(without, None)["trainings"]
    assert training["steps_per_epoch"] == (58 // 4,) * 2
    shown = plan.table.text(plan.compute(options, Machine()))
    assert "samples: 60 in the index, 2 of them undecodable, 19 more have no caption" in shown


def test_labels_of_many_samples_are_counted() -> None:
    """32 nearest clusters of 400 million samples are 77 GB, and a million centroids more."""
    overrides = ("num_stages=1", "cluster.labels_per_sample=32", "cluster.num_clusters=1000000")
    found = plan.compute(tiny_config("base=null", *overrides), Machine(1, 8), 400_000_000)
    dim = found["memory"]["train"]["embed_dim"]
    assert found["disk"]["clusters"] == 400_000_000 * 32 * 6 + 1_000_000 * dim * 4


# --- refusals ----------------------------------------------------------------------------------


@in_soak
def test_too_little_gpu_memory_names_part_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    options = recipe("cc12m_vitl14")
    told = refusal(options, Machine(1, 4, 80.0), CC12M)
    assert "the biggest part is activations" in told
    assert "train.engine.micro_batch=" in told and "grad_checkpointing" in told
    assert "GiB per rank" in capsys.readouterr().out  # the plan is shown all the same
    micro = told.split("micro_batch=")[1].split()[0]
    options = recipe("cc12m_vitl14", f"train.engine.micro_batch={micro}")
    plan.run(options, Machine(1, 4, 80.0), samples=CC12M, as_json=False)


def test_a_full_disk_here_is_a_warning_for_machines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Usage(9, 0, 9))
    options = tiny_config("base=null")
    plan.run(options, Machine.described(1, None, None), samples=192, as_json=True)
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "GiB more, the disk here has 0.0 GiB free" in told
    counted = {"sum": 2 * GIB, "present": 0, "free": GIB}
    for given, elsewhere in (((None, 8), True), ((2, 8), True), ((None, None), False)):
        machine = Machine.described(*given, 80.0)
        assert machine.elsewhere == elsewhere
        assert "1.0 GiB free" in (costs.missing_disk(counted, tiny_config(), machine) or "")
        assert costs.missing_disk({**counted, "present": GIB}, tiny_config(), machine) is None


def test_a_plan_for_gpus_on_a_machine_without_one_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = tiny_config("base=null", "device=auto")
    plan.run(options, Machine.described(None, None, None), samples=500, as_json=False)
    assert "this machine has no GPU" in caplog.text
    caplog.clear()
    plan.run(options, Machine.described(1, 1, None), samples=500, as_json=False)
    assert "no GPU" not in caplog.text


@pytest.mark.parametrize(
    ("overrides", "samples", "message"),
    [
        ("", 10, "global_batch=24 is more than the index's 10 samples"),
        ("cluster.num_clusters=200", 192, "num_clusters=200 is more than the index's 192 samples"),
        ("train.plan.policy=drop", 192, "possible labels"),
        ("train.engine={name: fsdp, shard_ranks: 3}", 192, "train.engine.shard_ranks=3 does not"),
    ],
)
def test_what_the_run_would_refuse(overrides: str, samples: int, message: str) -> None:
    options = tiny_config("base=null", *filter(None, [overrides]))
    assert message in refusal(options, Machine(1, 4), samples)


def test_too_few_ranks_memory_or_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(tiny_config(), Machine(1, 7))
    assert "base.global_batch=24 cannot be cut over 7 ranks" in told
    assert "[1, 2, 3, 4, 6, 8, 12, 24]" in told
    options = tiny_config("base=null", "device=cpu")
    told = refusal(options, Machine(1, 4, 0.002), 500)
    assert "biggest part is optimizer" in told and "train.engine.name=fsdp" in told
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Usage(GIB, 0, GIB // 2))
    told = refusal(options, Machine(1, 8), CC12M)
    assert "GiB more, the disk here has 0.5 GiB free" in told and "--nodes" in told
