"""Real small trainings of a student, which learns from stage 0's encoder or from teachers."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import method
from mclclip.checkpoint import step_files
from mclclip.config import Config, from_tree
from mclclip.data.extras import BaseFeatures
from mclclip.data.sample_index import SampleIndex
from mclclip.models.encoder import load_model
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths, read_manifest
from mclclip.util.remake import Remake
from mclclip.verbs import embed, export, index, train
from tests import tiny
from tests.unit.train.conftest import cut_at

STUDENT = tiny.ONE_BLOCK | {"embed_dim": 6}
TEACHER = "tiny_clip@random"
SHORT = ["train.steps=2"]
STEPS = ["train.steps=4", "train.log_every=1", "train.plan.policy=wrap", "num_stages=1"]


def of_teachers(*terms: dict[str, Any]) -> str:
    """A student of other width beside stage 0's encoder, with distilling terms."""
    every = [{"kind": "info_nce"}, *({"kind": "distill"} | term for term in terms)]
    return f"train.objective={json.dumps(every)}"


ALL_WAYS = of_teachers(
    {},
    {"teacher": TEACHER, "what": "features", "distance": "squared"},
    {"exact": True, "end_factor": 0.5},
    {"teacher": TEACHER, "exact": True},
)


def options(run_dir: Path, data: Path, *more: str, student: bool = True) -> Config:
    """A given encoder, and one stage of a student."""
    tree = tiny.tree(run_dir, data)
    tree |= {"base": None, "export": {"concat": [], "soup": False}}
    tree["train"]["lock"] = {}
    if student:
        tree["trained_model"] = {"name": STUDENT}
    return from_tree(tree, [*STEPS, *more])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("distilled"), num_samples=60)


@pytest.fixture(scope="module")
def taught(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of a student of two teachers: stage 0's encoder, and one by its name; what they
    stored is read, and they run beside it."""
    run_dir = tmp_path_factory.mktemp("taught") / "run"
    method.run(options(run_dir, data, ALL_WAYS), SINGLE)
    return run_dir


def test_a_run_embeds_its_teachers_and_exports_the_student_alone(taught: Path) -> None:
    layout = RunPaths(taught)
    assert [path.name for path in (taught / "teachers").iterdir()] == [TEACHER]
    inputs = read_manifest(layout.train(1), "train").inputs
    assert {"embeddings", "text_embeddings", f"{TEACHER}/image_features"} <= inputs.keys()
    rows = tiny.rows(layout.train(1) / "metrics.jsonl")
    assert all(rows[0][f"{n}_distill/loss"] > 0 for n in (1, 2, 3, 4))
    assert "2_distill/teacher_cosine" in rows[0] and "1_distill/teacher_cosine" not in rows[0]
    student, wanted = load_towers(layout.export(1)), load_towers(STUDENT)
    assert student.embed_dim == 6 and student.state_dict().keys() == wanted.state_dict().keys()
    figures = (taught / "results.jsonl").read_text()
    names = {row["model"] for row in map(json.loads, figures.splitlines())}
    assert names == {"stage_0", "stage_1", f"teacher_{TEACHER}"}


def test_a_teacher_is_embedded_as_it_encodes(taught: Path, data: Path) -> None:
    """Its own pictures and tokens; features of every caption."""
    layout, opened = RunPaths(taught), SampleIndex.open(taught / "index")
    folder, encoder = layout.encoder(TEACHER), load_model(TEACHER)
    run = options(taught, data)
    source = embed.Pass(run, SINGLE, layout, opened, 0, folder, TEACHER).source(encoder)
    texts = [captions for _, captions in source.bytes.texts_of(range(60))]
    stored = np.concatenate([np.load(p) for p in sorted(folder.glob("text_embeddings/*.npy"))])
    flat = [caption for captions in texts for caption in captions]
    np.testing.assert_allclose(stored, encoder.encode_text(flat), atol=1e-5)
    images = np.concatenate([np.load(p) for p in sorted(folder.glob("embeddings/*.npy"))])
    views = torch.stack([source[n].views[0] for n in (0, 59)])
    features = encoder.encode_image(source.transform.to_floats(views))
    np.testing.assert_allclose(images[[0, 59]], features, atol=1e-5)


def test_a_training_that_was_cut_goes_on_bit_for_bit(
    taught: Path, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(taught, run_dir)
    shutil.rmtree(run_dir / "stage_1/train")
    shutil.rmtree(run_dir / "stage_1/export")
    config = options(run_dir, data, ALL_WAYS)
    with cut_at(3):  # the last checkpoint is that of two steps
        train.run(config, SINGLE, stage=1)
    train.run(config, SINGLE, stage=1)
    export.stage(config, SINGLE, stage=1)
    found, wanted = (tiny.digests(each / "stage_1/export") for each in (run_dir, taught))
    assert found == wanted and found


def test_the_same_encoder_sees_what_is_stored(taught: Path, data: Path, tmp_path: Path) -> None:
    """Without augmentation, the exact teacher's similarities are those of its stored rows."""
    shutil.copytree(taught, tmp_path / "run")
    terms = of_teachers({"teacher": TEACHER}, {"teacher": TEACHER, "exact": True})
    plain = "trained_model.augmentation={kind: none}"
    size = load_model(TEACHER).image_shape[1]  # the student has the teacher's pictures
    big = STUDENT | {"vision_cfg": STUDENT["vision_cfg"] | {"image_size": size}}
    name = f"trained_model.name={json.dumps(big)}"
    config = options(tmp_path / "run", data, terms, plain, name, *SHORT)
    train.run(config, SINGLE, stage=1, force=Remake.UNFIT)
    for row in tiny.rows(tmp_path / "run/stage_1/train/metrics.jsonl"):
        assert row["2_distill/loss"] == pytest.approx(row["1_distill/loss"], rel=1e-3)


def test_a_weight_of_0_gives_the_bits_of_a_training_without_a_teacher(
    taught: Path, data: Path, tmp_path: Path
) -> None:
    digests = []
    for terms in [], [{"weight": 0.0}, {"teacher": TEACHER, "what": "features", "weight": 0.0}]:
        run_dir = tmp_path / str(len(terms))
        shutil.copytree(taught, run_dir)
        config = options(run_dir, data, of_teachers(*terms), *SHORT)
        train.run(config, SINGLE, stage=1, force=Remake.UNFIT)
        export.stage(config, SINGLE, stage=1, force=Remake.UNFIT)
        digests.append(tiny.digests(run_dir / "stage_1/export", "*.safetensors"))
    assert digests[0] == digests[1] and digests[0]


def test_a_frozen_map_to_the_teacher_stays(taught: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(taught, tmp_path / "run")
    frozen = "train.parameters=[{match: 'objective.*', lr_scale: 0}]"
    terms = of_teachers({"teacher": TEACHER, "what": "features"})
    config = options(tmp_path / "run", data, terms, frozen)
    directory = train.run(config, SINGLE, stage=1, force=Remake.UNFIT)
    state = step_files.load_model_state(directory / "checkpoints", 4)
    (weight,) = (value for name, value in state.items() if name.endswith("projection.weight"))
    torch.testing.assert_close(weight.T @ weight, torch.eye(6), atol=1e-6, rtol=0)
    moments = step_files.load_model_state(directory / "checkpoints", 4, "optimizer")
    assert moments and not any(name.startswith("objective") for name in moments)


def test_a_base_learns_from_the_pictures_of_teachers(data: Path, tmp_path: Path) -> None:
    """Of one that has no texts, and of one whose texts are not embedded."""
    load_towers(tiny.MODEL, text=False).save(tmp_path / "tower")
    without = {"teacher": str(tmp_path / "tower"), "temperature": 0.1}
    tree = tiny.tree(tmp_path / "run", data) | {"num_stages": 0}

    def of_base(*terms: dict[str, Any]) -> Config:
        objective = of_teachers(*terms).replace("train.", "base.")
        return from_tree(tree, [objective, "base.steps=2", "base.log_every=1"])

    with pytest.raises(ValueError, match="no text tower: set between=images"):
        method.run(of_base(without), SINGLE)
    images = {"between": "images"}
    config = of_base(without | images, {"teacher": TEACHER} | images)
    method.run(config, SINGLE)
    layout = RunPaths.of(config)
    assert f"{TEACHER}/image_features" in read_manifest(layout.train(0), "train").inputs
    assert not (layout.encoder(TEACHER) / "text_embeddings").exists()


# --- bad input --------------------------------------------------------------------------------


def refused(config: Config, *words: str) -> None:
    """A training that stops with one line, which has the words, and leaves nothing."""
    shutil.rmtree(Path(config.run_dir) / "stage_1/train", ignore_errors=True)
    with pytest.raises((FileNotFoundError, ValueError, RuntimeError)) as caught:
        train.run(config, SINGLE, stage=1)
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line
    assert not (Path(config.run_dir) / "stage_1/train").exists()


@pytest.fixture
def copied(taught: Path, data: Path, tmp_path: Path) -> tuple[Config, Path]:
    """A copy of the run whose student reads a teacher, and the teacher's folder."""
    run_dir = tmp_path / "run"
    shutil.copytree(taught, run_dir)
    config = options(run_dir, data, of_teachers({"teacher": TEACHER}))
    return config, RunPaths.of(config).encoder(TEACHER)


def test_a_teacher_that_is_not_there_or_another_encoder(copied: tuple[Config, Path]) -> None:
    config, folder = copied
    for kind in ("embeddings", "text_embeddings", "export"):
        (folder / kind).rename(folder / "away")
        refused(config, "run 'mclclip embed --encoder")
        (folder / "away").rename(folder / kind)
    path = folder / "embeddings/manifest.json"
    tree = json.loads(path.read_text())
    tree["inputs"]["encoder"] = "0" * 64
    path.write_text(json.dumps(tree))
    refused(config, "made by another encoder", f"--encoder {TEACHER}")


def test_rows_of_nan_or_of_another_index(copied: tuple[Config, Path], tmp_path: Path) -> None:
    config, folder = copied

    def stored(config: Config) -> BaseFeatures:
        layout = RunPaths.of(config)
        return BaseFeatures(
            layout, SampleIndex.open(layout.index), config.train.objective.reads.stored
        )

    other = tiny.make_data(tmp_path / "other", num_samples=48)
    words = [f"data.sources.patterns.shards={other}/shards/*.tar"]
    config = from_tree(asdict(config), words)
    index.run(config, SINGLE, force=Remake.UNFIT)
    with pytest.raises(RuntimeError, match="has 60 rows, the index has 48 .and other sample keys"):
        stored(config)


def test_an_encoder_that_gives_nan_is_not_stored(
    copied: tuple[Config, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = copied
    shutil.rmtree(folder)
    nan = torch.full((20, 8), torch.nan)
    monkeypatch.setattr(embed, "forward", lambda *_: nan)
    with pytest.raises(ValueError, match="not numbers"):
        embed.run(config, SINGLE, encoder=TEACHER)
    assert not (folder / "embeddings/manifest.json").exists()


NO_TEACHERS = {
    "ViT-B-32": "names no weights",
    "ViT-B-33@openai": "ViT-B-33",
    "nowhere/to/be/found": "nowhere/to/be/found",
}


@pytest.mark.parametrize("name", NO_TEACHERS)
def test_what_is_no_encoder_is_refused_before_the_run(
    name: str, data: Path, tmp_path: Path
) -> None:
    config = options(tmp_path / "run", data, of_teachers({"teacher": name}))
    with pytest.raises((ValueError, FileNotFoundError), match=NO_TEACHERS[name]) as caught:
        method.run(config, SINGLE)
    assert "objective.teacher=" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
