"""``mclclip run`` on tiny data: what it leaves behind, that it repeats itself, and that it resumes.

Bit for bit means: at the same number of ranks, threads and versions.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import mclclip
from mclclip.checkpoint import step_files
from mclclip.data.groups import GroupedIndex
from tests import tiny
from tests.e2e.conftest import Finished, KillAfter, RecordBatches, Shell
from tests.matrix import in_soak, kept

STEPS = 6  # of every training of tests/tiny.py
BATCH = 24
JOINED = ("concat_raw", "concat_stage_norm", "soup_uniform")
VARIANTS = ("mcl", "ungrouped", "random_groups")
PSEUDO_LABELS = "stage_*/pseudo_labels/pseudo_labels.npy"


@dataclass(frozen=True)
class Run:
    config: Path
    run_dir: Path
    batches: RecordBatches
    finished: Finished


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=96)


@pytest.fixture(scope="module")
def done(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run on one rank, with both controls; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("done")
    run_dir, batches = folder / "run", RecordBatches(folder / "batches")
    options = ("controls=[ungrouped,random_groups]", f"train.checkpoint.every={STEPS}")
    config = tiny.write_config(folder / "config.yaml", run_dir, data, *options)
    return Run(config, run_dir, batches, shell.ok("run", "--config", config, inside=batches))


def copy_of(done: Run, run_dir: Path, *, up_to_labels: bool = False) -> list[str | Path]:
    """A copy of the run, or of what it had when stage 1 began; returns the options to use it."""
    if not up_to_labels:
        shutil.copytree(done.run_dir, run_dir)
        return ["--config", done.config, f"run_dir={run_dir}", "controls=[]"]
    for name in ("index", "stage_0", "stage_1/pseudo_labels"):
        shutil.copytree(done.run_dir / name, run_dir / name)
    return ["--stage", "1", "--config", done.config, f"run_dir={run_dir}"]


def files(run_dir: Path) -> dict[str, str]:
    """Digest of every file of a run but its lock and its state."""
    return {
        name: digest
        for name, digest in tiny.digests(run_dir, "**/*").items()
        if not name.endswith((".lock", "run_state.json"))
    }


# --- what a run leaves behind -------------------------------------------------------------------


def test_every_model_is_measured_once_on_every_metric(done: Run) -> None:
    lines = (done.run_dir / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    stages = [f"stage_{stage}" for stage in (1, 2)]
    wanted = {"stage_0", *stages, *JOINED}
    wanted |= {f"control_{v}_{name}" for v in VARIANTS[1:] for name in (*stages, *JOINED)}
    metrics = {row["metric"] for row in rows}
    assert len(metrics) > 5
    counted = Counter((row["model"], row["benchmark"], row["metric"]) for row in rows)
    assert counted == Counter((model, "pairs", metric) for model in wanted for metric in metrics)
    assert all(model in done.finished.stdout for model in wanted)


def test_second_run_skips_everything_and_changes_no_byte(shell: Shell, done: Run) -> None:
    before = files(done.run_dir)
    again = shell.ok("run", "--config", done.config)
    assert files(done.run_dir) == before
    artifacts = [path.parent for path in done.run_dir.rglob("manifest.json")]
    skipped = [path for path in artifacts if f"{path} is finished: skipped" in again.stderr]
    assert set(artifacts) - set(skipped) == {done.run_dir / "index"}
    assert "index: up to date" in again.stderr and " loss " not in again.stderr


def test_its_report_has_every_part(shell: Shell, done: Run, tmp_path: Path) -> None:
    before, out = files(done.run_dir), tmp_path / "page.html"
    shell.ok("report", done.run_dir, "--out", out)
    page = out.read_text(encoding="utf-8")
    assert 'class="missing"' not in page
    foot = html.unescape(page[page.index("Not shown") : page.index("</footer>")])
    assert set(re.findall(r"'mclclip ([a-z]+)'", foot)) == {"filter", "blindspots"}
    assert "not shown" not in page
    assert page.count("<polyline") == 2 * (1 + 2 * len(VARIANTS))  # stage 0, then all variants
    assert (
        "control_random_groups_" in page.replace("<wbr>", "") and "data:image/png;base64," in page
    )
    assert files(done.run_dir) == before
    again = shell.ok("report", "--config", done.config, "--out", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    assert "wrote" in again.stderr
    assert str(tmp_path) in shell.refused("report", tmp_path)


@pytest.mark.parametrize("name", ["stage_0/export", "stage_2/export", "exports/soup_uniform"])
def test_exports_load_in_plain_open_clip(done: Run, name: str) -> None:
    where = done.run_dir / name
    ours = mclclip.load_model(where)
    import open_clip  # after mclclip, which mends torchvision beside a CPU torch

    plain, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{where}")
    plain.eval()
    images = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    tokens = open_clip.get_tokenizer(f"local-dir:{where}")(["a red circle", "two blue squares"])
    torch.testing.assert_close(tokens, ours.tokenizer(["a red circle", "two blue squares"]))
    with torch.inference_mode():
        image_features = plain.encode_image(images, normalize=True)
        text_features = plain.encode_text(tokens, normalize=True)
        torch.testing.assert_close(ours.encode_image(images), image_features, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.encode_text(tokens), text_features, rtol=0, atol=1e-6)
    assert ours.logit_scale == pytest.approx(plain.logit_scale.exp().item(), rel=1e-6)
    assert str(ours.stages[0].preprocess_val) == str(preprocess)


def test_concat_is_a_directory_that_load_model_reads(done: Run) -> None:
    for name in JOINED[:2]:
        where = done.run_dir / "exports" / name
        assert {"concat.json", "open_clip_config.json"} <= {p.name for p in where.iterdir()}
        encoder = mclclip.load_model(where)
        features = encoder.encode_image(torch.rand(4, 3, 32, 32)).detach()
        assert features.shape == (4, encoder.embed_dim) == (4, 3 * tiny.MODEL["embed_dim"])
        torch.testing.assert_close(features.norm(dim=-1), torch.ones(4))


def test_controls_repeat_the_training_without_meaning(done: Run) -> None:
    updates = iter(done.batches.sample_ids().reshape(-1, STEPS, BATCH))
    next(updates)  # stage 0
    batches = {(variant, stage): next(updates) for variant in VARIANTS for stage in (1, 2)}
    assert next(updates, None) is None  # equal compute: as many updates as MCL's
    for stage in (1, 2):
        grouped = {v: grouped_index(done.run_dir, v, stage) for v in VARIANTS}
        sizes = {v: np.diff(grouped[v].group_starts) for v in VARIANTS}
        assert grouped["mcl"].num_groups > 1 and grouped["ungrouped"].num_groups == 1
        np.testing.assert_array_equal(sizes["random_groups"], sizes["mcl"])
        assert not np.array_equal(grouped["random_groups"].sample_ids, grouped["mcl"].sample_ids)
        for one, other in (VARIANTS[:2], VARIANTS[1:], VARIANTS[::2]):
            same = set(map(frozenset, batches[one, stage].tolist()))
            assert same.isdisjoint(map(frozenset, batches[other, stage].tolist()))


def grouped_index(run_dir: Path, variant: str, stage: int) -> GroupedIndex:
    root = run_dir if variant == "mcl" else run_dir / "controls" / variant
    return GroupedIndex.open(root / f"stage_{stage}" / "train" / "grouped_index")


# --- changed options ----------------------------------------------------------------------------


@in_soak
def test_changed_option_is_refused_until_forced(shell: Shell, done: Run, tmp_path: Path) -> None:
    command = ["run", *copy_of(done, tmp_path / "run"), "train.lr=0.002"]
    before = files(tmp_path / "run")
    line = shell.refused(*command)
    assert "stage_1/train" in line and "train.lr was 0.001, now 0.002" in line
    assert files(tmp_path / "run") == before

    shell.ok(*command, "--force")
    after = files(tmp_path / "run")
    for name in before:  # what the option changes lies aside, the rest is as it was
        if name.startswith(("stage_1/train/", "stage_2/", "exports/")):
            artifact = "/".join(name.split("/")[:2])
            assert after[name.replace(artifact, f"{artifact}.old-1", 1)] == before[name]
        if name.startswith(("index/", "stage_0/", "stage_1/pseudo_labels/", "controls/")):
            assert after[name] == before[name]
    assert "lr: 0.002" in (tmp_path / "run" / "config.yaml").read_text()
    rows = map(json.loads, (tmp_path / "run" / "results.jsonl").read_text().splitlines())
    assert set(Counter((row["model"], row["metric"]) for row in rows).values()) == {1}

    shell.ok(*command)
    assert files(tmp_path / "run") == after


# --- resuming, bit for bit ----------------------------------------------------------------------


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return step_files.load_model_state(run_dir / "stage_1/train/checkpoints", STEPS)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl without what depends on the time of day."""
    names = ("step", "samples_seen", "loss", "lr", "logit_scale", "grad_norm", "group_size")
    lines = (run_dir / "stage_1/train/metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in names} for line in lines]


def assert_same_training(one: Path, other: Path) -> None:
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert metrics(one) == metrics(other)


@pytest.mark.parametrize(
    "kill",
    kept(
        [*(KillAfter("update", k) for k in range(1, STEPS + 1)), KillAfter("save", STEPS)],
        3,
    ),
    ids=lambda kill: f"{kill.what}_{kill.count}",
)  # fmt: skip
def test_resumes_at_any_step(shell: Shell, done: Run, tmp_path: Path, kill: KillAfter) -> None:
    command = ["train", *copy_of(done, tmp_path, up_to_labels=True), "train.checkpoint.every=1"]
    assert shell(*command, inside=kill).code == -9
    assert not (tmp_path / "stage_1/train/manifest.json").exists()
    resumed = shell.ok(*command)
    saved = kill.count - 1 if kill.what == "update" else kill.count
    if saved:
        assert f"resumed from {tmp_path}/stage_1/train/checkpoints/step_{saved:08d}" in (
            resumed.stderr
        )
    assert_same_training(done.run_dir, tmp_path)


def killed_at_every_step(shell: Shell, command: list[str | Path], ranks: int) -> None:
    """One process (group) per step, each killed after its step is saved; then one that finishes."""
    for _ in range(STEPS):
        assert shell(*command, ranks=ranks, inside=KillAfter("save", 1)).code == -9
    shell.ok(*command, ranks=ranks)


@pytest.mark.parametrize("ranks", kept([2, 3]))
def test_ranks_resume_and_see_the_same_batches(
    shell: Shell, done: Run, tmp_path: Path, ranks: int
) -> None:
    """At three ranks this needs ``Engine.fix_reduction_order``."""
    batches = RecordBatches(tmp_path / "batches")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shell.ok("train", *copy_of(done, whole, up_to_labels=True), ranks=ranks, inside=batches)
    single = slice(STEPS, 2 * STEPS)  # of the whole run on one rank: stage 1
    np.testing.assert_array_equal(batches.sample_ids(ranks), done.batches.sample_ids()[single])
    np.testing.assert_array_equal(batches.group_ids(ranks), done.batches.group_ids()[single])

    command = ["train", *copy_of(done, cut, up_to_labels=True), "train.checkpoint.every=1"]
    killed_at_every_step(shell, command, ranks)
    assert_same_training(whole, cut)


@in_soak
def test_torchrun_makes_the_same_pseudo_labels(done: Run, tmp_path: Path) -> None:
    options = ["--config", str(done.config), f"run_dir={tmp_path}", "controls=[]"]
    process = tiny.mclclip("run", *options, ranks=2)
    assert process.returncode == 0, process.stderr
    labels = tiny.digests(done.run_dir, PSEUDO_LABELS)
    assert len(labels) == 2 and tiny.digests(tmp_path, PSEUDO_LABELS) == labels
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, two = (
            mclclip.load_model(run_dir / "exports/concat_raw").encode_image(images)
            for run_dir in (done.run_dir, tmp_path)
        )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-3)  # fp32 sums over ranks differ
