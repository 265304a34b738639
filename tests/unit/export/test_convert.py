"""The verb that converts: what it writes and leaves alone, and the certificate, which compares the
export's towers and transforms with the source's, one by one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.cli import entry
from mclclip.export import certificate, convert
from mclclip.export.certificate import Probes
from mclclip.export.targets import Source
from mclclip.models import weights
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from mclclip.run.lock import Lock
from mclclip.util.remake import Remake
from tests.unit.export.models import CONFIGS, exported, the_certificate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model "a" and its conversion "out"; tests copy it."""
    folder = tmp_path_factory.mktemp("made")
    convert.run("open_clip", exported(folder / "a"), folder / "out")
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def test_images_and_texts_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "photos").mkdir()
    for number in range(5):
        pixels = np.full((40 + number, 60, 3), 9 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "texts.txt").write_text("a dog\n&lt;b&gt; a cat\n")
    out = convert.run(
        "hf", exported(tmp_path / "own"), tmp_path / "hf",
        images=tmp_path / "photos", texts=tmp_path / "texts.txt", num_images=3,
    )  # fmt: skip
    proof = the_certificate(out)
    assert proof["num_images"] == 3 and proof["num_texts"] == 2
    assert proof["tokens_of"] == ["&lt;b&gt; a cat"]  # transformers does not unescape HTML


def test_what_is_not_there_is_one_line(made: Path, tmp_path: Path) -> None:
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
            convert.run("open_clip", out=tmp_path / "out", **{"model": made / "a"} | given)
    assert not (tmp_path / "out").exists()


def test_a_finished_one_is_skipped_and_one_of_another_model_or_other_pictures_is_refused(
    copied: Path, tmp_path: Path
) -> None:
    source, out = copied / "a", copied / "out"
    photos, lines = tmp_path / "photos", tmp_path / "texts.txt"
    photos.mkdir()
    Image.new("RGB", (40, 50), (9, 8, 7)).save(photos / "a.png")
    lines.write_text("a dog\n")
    run, manifest = partial(convert.run, "open_clip", out=out), out / "manifest.json"
    before = manifest.read_bytes()
    assert run(source) == run(source, precision="fp32") == out  # which is the default
    with pytest.raises(ValueError, match="model.*--force"):
        run(exported(tmp_path / "b", seed=1))
    for name, path in (("images", photos), ("texts", lines)):
        given: Any = {name: path}
        with pytest.raises(ValueError, match=f"was made with other settings: {name} was None, now"):
            run(source, **given)
    assert manifest.read_bytes() == before
    run(tmp_path / "b", images=photos, texts=lines, force=Remake.ALL)
    before = manifest.read_bytes()
    run(tmp_path / "b", images=photos, texts=lines)
    assert manifest.read_bytes() == before
    tensors, own = (weights.read_tensors(weights.find_weights(f)) for f in (out, tmp_path / "b"))
    assert torch.equal(tensors["visual.proj"], own["visual.proj"])
    Image.new("RGB", (40, 50), (9, 8, 6)).save(photos / "a.png")
    with pytest.raises(ValueError, match="was made with other settings: images was"):
        run(tmp_path / "b", images=photos, texts=lines)
    digest, path = Source(source).digest, source / "open_clip_config.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    assert Source(source).digest != digest


@pytest.mark.parametrize("force", [False, True])
def test_files_of_others_stay(copied: Path, tmp_path: Path, force: bool) -> None:
    source, out = copied / "a", tmp_path / "mine"
    out.mkdir()
    (out / "README.md").write_text("my own")
    before = sorted(path.name for path in source.iterdir())
    for target, message in (
        (out, "mine holds files that mclclip did not write: give a new"),
        (out / "README.md", "README.md is a file: give a new folder"),
        (source / ".." / "a", "is the model itself: give a new folder"),
    ):
        with pytest.raises(ValueError, match=message):
            convert.run("open_clip", source, target, force=force)
    assert [path.read_text() for path in out.iterdir()] == ["my own"]
    assert sorted(path.name for path in source.iterdir()) == before


def test_two_conversions_into_one_folder_are_refused_and_what_a_killed_one_left_is_removed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder may be written to."""
    (tmp_path / "here").mkdir()
    (tmp_path / ".here.tmp").mkdir()
    (tmp_path / ".here.tmp" / "open_clip_model.safetensors").write_bytes(b"part")
    monkeypatch.chdir(tmp_path / "here")
    with (
        Lock(tmp_path / ".here.lock"),
        pytest.raises(RuntimeError, match=f"/here is in use by process {os.getpid()} on"),
    ):
        convert.run("open_clip", made / "a", Path("."))
    assert not [*(tmp_path / "here").iterdir()]
    out = convert.run("open_clip", made / "a", Path("."))
    assert out.samefile(tmp_path / "here") and not [*tmp_path.glob(".*")]
    assert (tmp_path / "here" / "open_clip_model.safetensors").stat().st_size > 4


def test_the_command_line_wants_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.parse_words(["export", "--to", "hf", "--model", "x"])
    assert "export got --to --model: wanted --to, --model and --out" in capsys.readouterr().err


PROBES = Probes(
    {"a": Image.new("RGB", (40, 32), (128, 99, 3)), "b": Image.new("RGB", (32, 32), (9, 9, 9))},
    ["a dog", "two cups", "a"],
)


def move(name: str) -> Callable[[Any], None]:
    """Moves one parameter of the model."""

    def change(encoder: Any) -> None:
        with torch.no_grad():
            parameter = encoder.stages[0].clip.get_parameter(name)
            parameter += 0.1 * torch.randn_like(parameter)

    return change


def other_tokens(encoder: Any) -> None:
    own = encoder.tokenizer
    encoder.tokenizer = lambda texts: own([text.replace("dog", "cat") for text in texts])


def other_pixels(encoder: Any) -> None:
    """As an image processor with another mean."""
    own, (_, deviation) = encoder.preprocess_val, encoder.stages[0].normalization
    encoder.preprocess_val = lambda image: own(image) + 10 / 255 / deviation


def masked_texts(encoder: Any) -> None:
    """As a library that masks the padding of the texts it reads, though their tokens are equal."""
    encode, tokenize = encoder.encode_text, encoder.tokenizer

    def read(texts: Any) -> Any:
        return encode(texts if isinstance(texts, torch.Tensor) else tokenize(texts).roll(1, 0))

    encoder.encode_text = read


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda encoder: None, set()),
        (
            move("transformer.resblocks.0.mlp.c_fc.weight"),
            {"text_features", "text_features_own_tokens", "logits"},
        ),
        (
            move("visual.transformer.resblocks.0.mlp.c_fc.weight"),
            {"image_features", "image_features_own_pixels", "logits"},
        ),
        (other_tokens, {"tokens", "text_features_own_tokens"}),
        (masked_texts, {"text_features", "text_features_own_tokens"}),
        (other_pixels, {"pixels", "image_features_own_pixels"}),
    ],
)
def test_what_differs_is_found_where_it_is_and_nowhere_else(
    change: Callable[[Any], None], differing: set[str]
) -> None:
    own, other = (Encoder([load_towers(CONFIGS / "tiny_vit.json", seed=0)]) for _ in range(2))
    torch.manual_seed(0)
    change(other)
    found = certificate.compare(own, other, "x", PROBES)
    names = {"image_features", "text_features", "logits", "pixels", "tokens"}
    names |= {"image_features_own_pixels", "text_features_own_tokens"}
    assert {name for name in names if getattr(found, name) > 1e-4} == differing
    assert found.holds == (not differing & {"image_features", "text_features"})
    assert found.tokens_of == (["a dog"] if "tokens" in differing else [])
    assert found.pixels_of == (["a", "b"] if "pixels" in differing else [])
    if "pixels" in differing:
        assert found.pixels == pytest.approx(10, abs=0.01)  # of 255 shades


def test_another_logit_scale_is_not_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Encoder([load_towers(exported(tmp_path / "own"))])
    other = Encoder([load_towers(tmp_path / "own")])
    assert certificate.compare(own, other, "x", PROBES).holds
    for scale in (own.logit_scale * 1.001, float("nan")):
        other.logit_scale = scale
        found = certificate.compare(own, other, "x", PROBES)
        assert found.largest <= 1e-5 and not found.holds
    assert found.logit_scale is not None
    proof = certificate.Certificate("x", 1, text_features=float("nan"), bound=0.02)
    assert not proof.holds

    compare = certificate.compare
    out = convert.run("open_clip", tmp_path / "own", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(
        certificate, "compare", lambda *a, **b: replace(compare(*a, **b), logit_scale=1e-3)
    )
    with pytest.raises(ValueError, match="logit scales by 0.001 of their value"):
        convert.run("open_clip", tmp_path / "own", out, force=Remake.ALL)
    # Nothing is left, and what was there before stays.
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "own"]


def test_a_difference_names_its_bounds() -> None:
    near = certificate.Certificate("onnxruntime", 1, image_features=0.5)
    assert "differ by 0.5, wanted at most" in near.difference()
    assert "cosine" not in near.difference()
    far = replace(near, cosine=0.25, logit_scale=0.125)
    assert "lowest cosine is 0.250" in far.difference()
    assert "logit scales by 0.12 of" in far.difference() and not far.holds
