"""The verb that converts: what it compares, what it writes, what it leaves alone."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.cli import entry
from mclclip.export import convert
from mclclip.export.targets import Source
from mclclip.models import weights
from mclclip.run.lock import Lock
from mclclip.util.remake import Remake
from tests.unit.export.models import exported, the_certificate

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model "a" and its conversion "hf"; tests copy it."""
    folder = tmp_path_factory.mktemp("made")
    convert.run("hf", exported(folder / "a"), folder / "hf")
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def test_images_and_texts_of_the_user(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(5):
        pixels = random.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "texts.txt").write_text("a dog\n&lt;b&gt; a cat\n")
    out = convert.run(
        "hf", exported(tmp_path / "own"), tmp_path / "hf",
        images=tmp_path / "photos", texts=tmp_path / "texts.txt", num_images=3,
    )  # fmt: skip
    proof = the_certificate(out)
    assert proof["num_images"] == 3 and proof["num_texts"] == 2
    assert proof["tokens_of"] == ["&lt;b&gt; a cat"]  # transformers does not unescape HTML


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    source, out = exported(tmp_path / "own"), tmp_path / "hf"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    cases: dict[str, tuple[type[Exception], dict[str, Path]]] = {
        "no exported model at .*nothing": (FileNotFoundError, {"model": tmp_path / "nothing"}),
        "no pictures below": (FileNotFoundError, {"images": tmp_path / "empty"}),
        "empty.txt is empty: give a text per line": (ValueError, {"texts": tmp_path / "empty.txt"}),
        "latin.txt is not UTF-8 text": (ValueError, {"texts": tmp_path / "latin.txt"}),
    }
    for message, (kind, given) in cases.items():
        with pytest.raises(kind, match=message):
            convert.run("hf", out=out, **{"model": source} | given)
    assert not out.exists()


def test_a_finished_one_is_skipped_and_another_model_is_refused(
    copied: Path, tmp_path: Path
) -> None:
    out = copied / "hf"
    before = (out / "manifest.json").read_bytes()
    convert.run("hf", copied / "a", out)
    assert (out / "manifest.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"\(model\).*--force"):
        convert.run("hf", exported(tmp_path / "b", seed=1), out)
    convert.run("hf", tmp_path / "b", out, force=Remake.ALL)
    assert (out / "manifest.json").read_bytes() != before
    tensors = weights.read_tensors(out / "model.safetensors")
    own = weights.read_tensors(weights.find_weights(tmp_path / "b"))
    assert torch.equal(tensors["visual_projection.weight"], own["visual.proj"].T)


def test_other_pictures_texts_or_configurations_are_no_finished_conversion(
    copied: Path, tmp_path: Path
) -> None:
    source, photos, lines = copied / "a", tmp_path / "photos", tmp_path / "texts.txt"
    photos.mkdir()
    Image.new("RGB", (40, 50), (9, 8, 7)).save(photos / "a.png")
    lines.write_text("a dog\n")
    run, out = partial(convert.run, "hf", source, copied / "hf"), copied / "hf"
    before = (out / "manifest.json").read_bytes()
    assert run(precision="fp32") == out  # which is the default
    assert (out / "manifest.json").read_bytes() == before
    with pytest.raises(ValueError, match="was made with other settings: images was None, now"):
        run(images=photos)
    with pytest.raises(ValueError, match="was made with other settings: texts was None, now"):
        run(texts=lines)
    run(images=photos, texts=lines, force=Remake.ALL)
    before = (out / "manifest.json").read_bytes()
    run(images=photos, texts=lines)
    assert (out / "manifest.json").read_bytes() == before
    Image.new("RGB", (40, 50), (9, 8, 6)).save(photos / "a.png")
    with pytest.raises(ValueError, match="was made with other settings: images was"):
        run(images=photos, texts=lines)
    digest, path = Source(source).digest, source / "open_clip_config.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    assert Source(source).digest != digest


@pytest.mark.parametrize("force", [False, True])
def test_files_of_others_stay(copied: Path, tmp_path: Path, force: bool) -> None:
    source, out = copied / "a", tmp_path / "mine"
    out.mkdir()
    (out / "README.md").write_text("my own")
    with pytest.raises(ValueError, match="mine holds files that mclclip did not write: give a new"):
        convert.run("hf", source, out, force=force)
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "my own"
    with pytest.raises(ValueError, match="README.md is a file: give a new folder"):
        convert.run("hf", source, out / "README.md", force=force)
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(ValueError, match="is the model itself: give a new folder"):
        convert.run("hf", source, source / ".." / "a", force=force)
    assert sorted(path.name for path in source.iterdir()) == before


def test_two_conversions_into_one_folder_are_refused_and_what_a_killed_one_left_is_removed(
    made: Path, tmp_path: Path
) -> None:
    source = made / "a"
    (tmp_path / ".hf.tmp").mkdir()
    (tmp_path / ".hf.tmp" / "model.safetensors").write_bytes(b"part")
    with (
        Lock(tmp_path / ".hf.lock"),
        pytest.raises(RuntimeError, match=f"/hf is in use by process {os.getpid()} on"),
    ):
        convert.run("hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    convert.run("hf", source, tmp_path / "hf")
    assert not [*tmp_path.glob(".*")]
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 4


def test_the_working_folder_may_be_written_to(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    out = convert.run("hf", made / "a", Path("."))
    assert (out / "config.json").is_file() and out.samefile(tmp_path / "here")
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_command_line_wants_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.parse_words(["export", "--to", "hf", "--model", "x"])
    assert "export got --to --model: wanted --to, --model and --out" in capsys.readouterr().err
