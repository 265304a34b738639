"""The public names: what they are, and a whole fine-tuning through them."""

from __future__ import annotations

import inspect
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import mclclip
from mclclip import api
from mclclip.engines.engine import Engine
from mclclip.export import convert
from mclclip.ranks import process_group
from tests import photos, tiny


def test_the_public_names() -> None:
    """No other one, none that a module has, each with an example or its arguments in words."""
    assert mclclip.__all__ == ["Encoder", "Run", "__version__", "finetune", "load_model"]
    assert set(mclclip.__all__) <= set(dir(mclclip))
    folder = Path(mclclip.__file__).parent
    for name in set(mclclip.__all__) - {"__version__"}:
        assert not (folder / f"{name}.py").exists() and not (folder / name).exists()
        documented = inspect.getdoc(getattr(mclclip, name)) or ""
        assert len(documented) > 100
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mclclip.nothing  # noqa: B018


def test_importing_loads_nothing_heavy_and_takes_less_than_a_tenth_of_a_second() -> None:
    """Processor time, the least of a few: other processes do not count."""
    code = (
        "import sys, time; t = time.process_time(); import mclclip; t = time.process_time() - t\n"
        "print({'torch', 'pandas', 'numpy'} & {*sys.modules}, t)"
    )
    for _ in range(5):
        done = subprocess.check_output([sys.executable, "-c", code], env=tiny.environment())
        heavy, taken = done.decode().split()
        assert heavy == "set()"
        if float(taken) < 0.1:
            break
    assert float(taken) < 0.1


OPTIONS = (*photos.FEW_STEPS, "num_stages=1")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, mclclip.Run]]:
    folder = tmp_path_factory.mktemp("tuned")
    photos.write(folder)
    with process_group.num_threads(1):
        random.seed(7)
        state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        run = call(folder)
        assert random.getstate() == state[0] and torch.get_rng_state().tolist() == state[2]
        assert np.random.get_state()[1].tolist() == state[1]
        yield folder, run


def call(folder: Path, **others: object) -> mclclip.Run:
    given = {"base": photos.base(folder), "options": OPTIONS, "captions": folder / "captions.csv"}
    return mclclip.finetune(folder, **{"out": folder / "run"} | given | others)  # type: ignore[arg-type]


def test_a_fine_tuning_ends_with_encoders_and_a_verdict(tuned: tuple[Path, mclclip.Run]) -> None:
    folder, run = tuned
    table = run.results
    names = ["encoder", "benchmark", "metric", "value", "interval", "unit"]
    assert table.columns.tolist()[:6] == names
    assert {"choose", "report"} <= {*table.benchmark} <= {"choose", "report", "pairs"}
    assert {"stage_0", "stage_1", "control_ungrouped_stage_1"} <= {*table.encoder}
    assert {*run.exports()} == {*table.encoder}
    assert run.tuned() in {*table.encoder} - {"stage_0"}
    assert run.recommended() in ("stage_0", run.tuned())
    assert run.recommended() == "stage_0" or run.tuned() in run.verdict()[0]
    assert "stage_0" in {*table.encoder} and run.encoder().embed_dim > 0
    assert run.report() == folder / "run/report.html"


def test_pictures_and_texts_are_encoded_as_they_are_brought(
    tuned: tuple[Path, mclclip.Run],
) -> None:
    folder, run = tuned
    encoder = run.encoder("stage_1")
    assert type(encoder) is mclclip.Encoder is type(run.stage(1).encoder())
    paths = sorted((folder / "photos").glob("*.jpg"))[:5]
    features = encoder.encode_image(paths, batch_size=2)
    assert features.shape == (5, encoder.embed_dim) and features.dtype == np.float32
    opened = [Image.open(path) for path in paths]
    np.testing.assert_allclose(encoder.encode_image(opened), features, atol=1e-6)
    np.testing.assert_allclose(encoder.encode_image(str(paths[0])), features[:1], atol=1e-6)
    texts = encoder.encode_text(["a red square", "a blue square"])
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(encoder.encode_text("a red square"), texts[:1], atol=1e-6)
    assert encoder.encode_image([]).shape == (0, encoder.embed_dim)
    with pytest.raises(ValueError, match=r"captions\.csv cannot .*of 12 bytes cannot .* 1 more"):
        encoder.encode_image([folder / "captions.csv", *paths, *[b"x" * 12] * 10], batch_size=2)
    with pytest.raises(ValueError, match="no encoder 'stage_9' .*: it has stage_0"):
        run.encoder("stage_9")


def test_embeddings_for_search_name_the_pictures_that_were_packed(
    tuned: tuple[Path, mclclip.Run], tmp_path: Path
) -> None:
    folder, run = tuned
    out = convert.run("clip_retrieval", run.directory / "stage_0" / "embeddings", tmp_path / "out")
    table = pd.concat([pd.read_parquet(path) for path in (out / "metadata").glob("*")])
    assert len(table) and all((folder / path).is_file() for path in table["image_path"])


def test_interrupted_in_a_notebook_the_next_call_goes_on(
    tuned: tuple[Path, mclclip.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the button of a notebook: no process ends, and no handler of signals is there."""
    folder, _ = tuned
    steps, own = [0], Engine.update

    def update(*given: Any, **named: Any) -> Any:
        steps[0] += 1
        if steps[0] == 7:  # within stage 1
            raise KeyboardInterrupt
        return own(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "update", update)
        with pytest.raises(KeyboardInterrupt):
            call(folder, out=folder / "stopped")
    assert not (folder / "stopped/run.lock").exists()
    assert not (folder / "stopped/stage_1/export/manifest.json").exists()
    again = call(folder, out=folder / "stopped")
    assert tiny.digests(folder / "stopped") == tiny.digests(folder / "run")
    assert "<iframe" in again.report()._repr_html_()


def test_called_again_it_is_finished_and_other_arguments_are_refused(
    tuned: tuple[Path, mclclip.Run],
) -> None:
    folder, run = tuned
    before = tiny.digests(folder / "run", "**/manifest.json")
    assert call(folder).result_rows == run.result_rows
    assert tiny.digests(folder / "run", "**/manifest.json") == before
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        call(folder, seed=1)
    with pytest.raises(ValueError, match="held_out"):
        call(folder, held_out=0.2)
    with pytest.raises(ValueError, match="size was 512, now 0"):
        call(folder, size=0)
    assert tiny.digests(folder / "run", "**/manifest.json") == before


def tuning(images: Path, **flags: object) -> api.FineTuning:
    defaults: dict[str, Any] = {"base": "tiny_clip@random", "captions": None}
    defaults |= {"out": images / "run", "overrides": [], "held_out": 0.1, "seed": 0}
    return api.FineTuning(images=images, **defaults | flags)


def test_a_dry_run_refuses_pictures_without_captions(tmp_path: Path) -> None:
    for number in range(130):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    with pytest.raises(ValueError, match="--captions"):
        tuning(tmp_path).dry_run(None, None)
    table = tmp_path / "t.csv"
    table.write_text("image,caption\n" + "".join(f"{number}.jpg,a\n" for number in range(130)))
    with pytest.raises(ValueError, match="130 images that are not in the folder"):
        tuning(tmp_path, captions=table).dry_run(None, None)
    # Names start from the folder of the table too, as where they are packed.
    table.write_text(
        "image,caption\n" + "".join(f"{tmp_path.name}/{n}.png,a\n" for n in range(130))
    )
    beside = table.rename(tmp_path.parent / f"{tmp_path.name}.csv")
    assert "base:" in tuning(tmp_path, captions=beside).dry_run(None, None)
    (tmp_path / "7.txt").write_text("a caption")
    assert "base:" in tuning(tmp_path).dry_run(None, None)


def test_the_reference_has_every_public_name_with_an_example_that_runs(
    tuned: tuple[Path, mclclip.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fine-tuning itself is done by the fixture: here its example must fit its arguments."""
    folder, run = tuned
    page = (tiny.ROOT / "docs/pages/reference/python.md").read_text()
    arguments = inspect.signature(mclclip.finetune)
    (folder / "runs").mkdir()
    (folder / "runs/mine").symlink_to(folder / "run")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(api, "finetune", lambda **given: arguments.bind(**given) and run)
    sections = dict(re.findall(r"^## `?(\w+)`?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for name in mclclip.__all__:
        examples = re.findall(r"```python\n(.*?)```", sections[name], re.DOTALL)
        assert any(f"mclclip.{name}" in example for example in examples), name
        for example in examples:
            exec(example, {})


def stop_at_the_method(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ends every fine-tuning where training would begin; returns the settings that came there."""
    came: list[Any] = []

    def run(config: Any, *_: Any, **__: Any) -> None:
        came.append(config)
        raise ValueError("stopped here")

    monkeypatch.setattr("mclclip.method.run", run)
    return came


def test_a_mistake_is_refused_before_anything_is_packed(tmp_path: Path) -> None:
    photos.write(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    broken = photos.base(tmp_path).replace("random", f"{tmp_path}/weights.safetensors")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"options": ["train.lrr=1"]}, "train.lrr"),
        ({"options": ["train.global_batch=512"]}, "train.global_batch=512"),
        ({"options": ["eval.suite.a.kind=retrieval", "eval.suite.a.path=b"]}, "captions"),
        ({"base": "ViT-B-32@openai"}, "ViT-B-32-quickgelu"),
        ({"base": "tiny_clip@nowhere.safetensors"}, "nowhere.safetensors"),
        ({"held_out": 0.6}, "held_out is 0.6: wanted "),
        ({"held_out": "0.1"}, "held_out is"),
        ({"size": 512.5}, "size is"),
        ({"out": None}, "out is"),
        ({"options": "train.lr=-1"}, "train.lr"),
        ({"options": ["model.image_size=640"]}, "image_size is 640"),
        ({"options": ["train.image_size=[{size: 96}]"], "size": 64}, "image_size is 96"),
        ({"base": broken, "options": ()}, r"weights\.safetensors"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match=words):
            call(tmp_path, **change)
    assert not (tmp_path / "run/data").exists()


def test_as_long_as_nothing_was_trained_a_corrected_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos.write(tmp_path)
    came = stop_at_the_method(monkeypatch)
    with pytest.raises(TypeError, match="'lr'"):
        call(tmp_path, lr=1)
    for name in ("out", "captions", "base"):
        with pytest.raises(ValueError, match=f"{name} is"):
            call(tmp_path, **{name: ""})
    for out in (tmp_path, tmp_path / "captions.csv"):
        with pytest.raises(ValueError, match="give a new folder"):
            call(tmp_path, out=out)
    assert not (tmp_path / "run").exists()
    for options in ({"train.lr": np.float32(1)}, ["train.lr=0.5", "data.max_bad_fraction=0.2"]):
        with pytest.raises(ValueError, match="stopped here"):
            call(tmp_path, options=options)
    assert [config.train.lr for config in came] == [1, 0.5]
    packed = tmp_path / "run/data/manifest.json"
    assert not (tmp_path / "run/data.old-1").exists() and packed.exists()
    (tmp_path / "run/stage_0/train/checkpoints/step_00000002").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"train\.lr was '0\.5', now '1'"):
        call(tmp_path, options=["train.lr=1", "data.max_bad_fraction=0.2"])
    assert len(came) == 2


def test_copies_with_other_times_are_the_same_data_and_a_new_picture_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos.write(tmp_path)
    came = stop_at_the_method(monkeypatch)
    pictures = tmp_path / "photos"
    for picture in pictures.glob("*.jpg"):
        picture.with_suffix(".txt").write_text(f"a picture of {picture.stem}")

    def again() -> None:
        base = photos.base(tmp_path)
        mclclip.finetune(pictures, base=base, out=tmp_path / "run", options=photos.FEW_STEPS)

    with pytest.raises(ValueError, match="stopped here"):
        again()
    (tmp_path / "run/stage_0/train/checkpoints/step_00000002").mkdir(parents=True)
    for file in pictures.iterdir():
        os.utime(file, (1, 1))
    with pytest.raises(ValueError, match="stopped here"):
        again()
    assert len(came) == 2
    shutil.copy(pictures / "000.jpg", pictures / "new.jpg")
    (pictures / "000.txt").write_text("a picture of 999")  # of equal size
    with pytest.raises(ValueError, match=r"other data: 000\.txt, new\.jpg"):
        again()


def test_a_run_that_was_moved_has_its_pictures_and_does_not_make_its_old_folder(
    tuned: tuple[Path, mclclip.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = tuned
    before = run.report().read_text().count("data:image")
    moved = tmp_path / "elsewhere/mine [1]"
    shutil.copytree(folder / "run", moved)
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        (folder / "run").rename(folder / "away")
        try:
            opened = mclclip.Run.open("elsewhere/mine [1]")
            page = opened.report().read_text()
            same = api.configuration.load("elsewhere/mine [1]/config.yaml")
            other = api.configuration.load("elsewhere/mine [1]/config.yaml", ["run_dir=new"])
        finally:
            assert not (folder / "run").exists()
            (folder / "away").rename(folder / "run")
    assert before and page.count("data:image") == before
    assert same.run_dir == "elsewhere/mine [1]" and other.run_dir == "new"
    assert same.data.sources["mine"].shards == "elsewhere/mine [[]1]/data/train/*.tar"
    paths = [Path(one.path) for one in same.eval.suite.values() if one.path is not None]
    assert {*map(str, paths)} == {"elsewhere/mine [1]/data", "elsewhere/mine [1]/pairs"}
    assert all((tmp_path / path).is_dir() for path in paths)
