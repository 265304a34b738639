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
from mclclip.data.groups import GroupedIndex
from mclclip.eval import results
from mclclip.run.artifacts import INTENT
from tests import tiny
from tests.e2e.conftest import Finished, KillAfter, RecordBatches, Shell, training_in
from tests.matrix import kept

STEPS = 6  # of every training of tests/tiny.py
BATCH = 24
JOINED = ("concat_raw", "concat_stage_norm", "soup_uniform")
VARIANTS = ("mcl", "ungrouped", "random_groups")


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
    """A whole run of one stage, with both controls; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("done")
    run_dir, batches = folder / "run", RecordBatches(folder / "batches")
    options = ("num_stages=1", "controls=[ungrouped,random_groups]")
    config = tiny.write_config(folder / "config.yaml", run_dir, data, *options)
    return Run(config, run_dir, batches, shell.ok("run", "--config", config, inside=batches))


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
    wanted = {"stage_0", "stage_1", *JOINED}
    wanted |= {f"control_{v}_{name}" for v in VARIANTS[1:] for name in ("stage_1", *JOINED)}
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
    assert page.count("<polyline") == 2 * (1 + len(VARIANTS))  # stage 0, then all variants
    assert (
        "control_random_groups_" in page.replace("<wbr>", "") and "data:image/png;base64," in page
    )
    assert files(done.run_dir) == before
    again = shell.ok("report", "--config", done.config, "--out", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    assert "wrote" in again.stderr
    assert str(tmp_path) in shell.refused("report", tmp_path)


@pytest.mark.parametrize("name", ["stage_0/export", "exports/soup_uniform"])
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
        assert features.shape == (4, encoder.embed_dim) == (4, 2 * tiny.MODEL["embed_dim"])
        torch.testing.assert_close(features.norm(dim=-1), torch.ones(4))


def test_controls_repeat_the_training_without_meaning(done: Run) -> None:
    updates = done.batches.sample_ids().reshape(-1, STEPS, BATCH)[1:]  # without stage 0
    assert len(updates) == len(VARIANTS)  # equal compute: as many updates as MCL's
    grouped = {v: grouped_index(done.run_dir, v) for v in VARIANTS}
    sizes = {v: np.diff(grouped[v].group_starts) for v in VARIANTS}
    assert grouped["mcl"].num_groups > 1 and grouped["ungrouped"].num_groups == 1
    np.testing.assert_array_equal(sizes["random_groups"], sizes["mcl"])
    assert not np.array_equal(grouped["random_groups"].sample_ids, grouped["mcl"].sample_ids)
    batches = {frozenset(batch) for training in updates.tolist() for batch in training}
    assert len(batches) == len(VARIANTS) * STEPS


def grouped_index(run_dir: Path, variant: str) -> GroupedIndex:
    root = run_dir if variant == "mcl" else run_dir / "controls" / variant
    return GroupedIndex.open(root / "stage_1" / "train" / "grouped_index")


def test_a_finished_run_takes_another_stage(shell: Shell, done: Run, tmp_path: Path) -> None:
    """What joins its stages is made again, and the old joins are kept; trainings stay."""
    run = tmp_path / "run"
    shutil.copytree(done.run_dir, run)
    command = ("run", "--config", done.config, f"run_dir={run}", "controls=[]")
    before = [(run / f"stage_{n}/train/manifest.json").read_bytes() for n in (0, 1)]
    rows = {(r.model, r.metric): r for r in results.read(run / "results.jsonl")}
    left = {"concat_raw": "manifest.json", "soup_uniform": INTENT}
    made = run / "exports/soup_uniform/manifest.json"  # as if killed before its last file
    fields = json.loads(made.read_text())
    begun = json.dumps({key: fields[key] for key in ("kind", "config", "inputs")})
    made.with_name(INTENT).write_text(begun)
    made.unlink()
    shell.ok(*command, "num_stages=2")
    assert before == [(run / f"stage_{n}/train/manifest.json").read_bytes() for n in (0, 1)]
    for name in left:
        made = run / f"exports/{name}/manifest.json"
        assert [*json.loads(made.read_text())["inputs"]] == ["stage_0", "stage_1", "stage_2"]
        assert (run / f"exports/{name}.old-1/{left[name]}").is_file()
    again = {(r.model, r.metric): r for r in results.read(run / "results.jsonl")}
    evaluations = [of["concat_raw", "average"].protocol["evaluation"] for of in (rows, again)]
    assert evaluations[0] != evaluations[1]
    assert "stage_2" in shell.refused(*command)


# --- resuming, bit for bit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kill",
    kept(
        [*(KillAfter("update", k) for k in range(1, STEPS + 1)), KillAfter("save", STEPS)],
        3,
    ),
    ids=lambda kill: f"{kill.what}_{kill.count}",
)  # fmt: skip
def test_resumes_at_any_step(shell: Shell, done: Run, tmp_path: Path, kill: KillAfter) -> None:
    for name in ("index", "stage_0", "stage_1/pseudo_labels"):
        shutil.copytree(done.run_dir / name, tmp_path / name)
    where = ("--config", done.config, f"run_dir={tmp_path}")
    command = ("train", "--stage", "1", *where, "train.checkpoint.every=1")
    assert shell(*command, inside=kill).code == -9
    training = tmp_path / "stage_1/train"
    assert not (training / "manifest.json").exists()
    resumed = shell.ok(*command)
    saved = kill.count - 1 if kill.what == "update" else kill.count
    if saved:
        assert f"resumed from {training}/checkpoints/step_{saved:08d}" in resumed.stderr
    assert training_in(training) == training_in(done.run_dir / "stage_1/train")
