"""Folders of transformers read as open_clip's models, held against transformers' own calls."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import mclclip
import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.eval.classification import with_feature
from mclclip.eval.features import Extractor
from mclclip.eval.identity import identity_of
from mclclip.eval.protocols import retrieval
from mclclip.export import convert
from mclclip.models.encoder_names import split_name
from mclclip.models.loading import load_towers, refuse_without_weights
from mclclip.models.options import ModelConfig, num_blocks
from tests.matrix import kept
from tests.unit.export.conftest import narrow_siglip  # noqa: F401
from tests.unit.export.models import source_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("narrow_siglip")

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
NARROW = {"hidden_size": 32, "intermediate_size": 128, "image_size": 224}
"""What the fixture `narrow_siglip` makes of timm's tower."""
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ["a cat", "a dog and a cat", "a dog and a cat and a dog and a cat and more", ""]


def tokenizer(kind: str) -> Any:
    """A tokenizer of letters with the special tokens of its kind."""
    if kind == "clip":
        vocabulary = [c + end for end in ("", "</w>") for c in LETTERS]
        vocabulary += ["<|startoftext|>", "<|endoftext|>"]
        return transformers.CLIPTokenizer(
            vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]
        )
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(
        models.WordLevel({"<unk>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(LETTERS)})
    )
    own.model.unk_token = "<unk>"
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", pad_token="</s>", eos_token="</s>"
    )


@pytest.fixture(scope="module", params=["clip", "siglip"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers saves it."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    name = {"clip": "CLIP", "siglip": "Siglip"}[request.param]
    words = tokenizer(request.param)
    text = TEXT | {"vocab_size": len(words), "eos_token_id": words.eos_token_id}
    options = {"projection_dim": 8} if request.param == "clip" else {}
    vision, side = VISION, 32
    if request.param == "siglip":
        side = 224
        vision = VISION | NARROW | {"hidden_act": "gelu"}
        text |= {"hidden_size": 32, "projection_size": 32}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=text, **options
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}Model")(config)
    sides = {"height": side, "width": side}
    if request.param == "clip":
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=sides)
    else:
        processor = transformers.SiglipImageProcessor(size=sides)
    for part in (model, words, processor):
        part.save_pretrained(folder)
    return folder


of_clip = pytest.mark.parametrize("saved", ["clip"], indirect=True)


def pictures(folder: Path) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    for number, shape in enumerate([(40, 50, 3), (32, 32, 3), (60, 35, 3)]):
        paths.append(folder / f"{number}.png")
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(paths[-1])
    return paths


def test_features_and_probabilities_are_those_of_transformers(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    encoder = mclclip.load_model(f"hf:{saved}")
    assert capfd.readouterr() == ("", "")
    paths = pictures(tmp_path)
    extractor = Extractor(encoder, batch_size=2)
    images, texts = extractor.images(paths), extractor.texts(TEXTS)
    assert images.shape == (3, encoder.embed_dim) and texts.shape == (4, encoder.embed_dim)
    model = transformers.AutoModel.from_pretrained(saved).eval()
    own = transformers.AutoTokenizer.from_pretrained(saved)(
        TEXTS, padding="max_length", truncation=True, max_length=12, return_tensors="pt"
    )
    processor = transformers.AutoImageProcessor.from_pretrained(saved, use_fast=False)
    pixels = processor(images=[Image.open(path) for path in paths], return_tensors="pt")
    with torch.no_grad():
        output = model(input_ids=own["input_ids"], pixel_values=pixels["pixel_values"])
    scale = encoder.logit_scale
    bias = model.logit_bias.item() if hasattr(model, "logit_bias") else 0.0
    wanted = output.logits_per_image.numpy()
    # The pixels of two image processors of transformers may differ by a step of 1/255.
    np.testing.assert_allclose(scale * images @ texts.T + bias, wanted, atol=2e-2 * scale)
    batch = torch.stack([encoder.preprocess_val(Image.open(path)) for path in paths])
    with torch.no_grad():
        exact = model(input_ids=own["input_ids"], pixel_values=batch).logits_per_image.numpy()
    np.testing.assert_allclose(scale * images @ texts.T + bias, exact, rtol=1e-5, atol=1e-5)
    pooled = with_feature(extractor, "pooled").images(paths)
    assert pooled.shape == (3, 32 if "siglip" in str(saved) else 16)


@of_clip
def test_its_identity_is_that_of_its_files(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    assert identity_of(f"hf:{copy}") == identity_of(f"hf:{saved}")
    (copy / "merges.txt").write_text("#version: 0.2\n")
    assert identity_of(f"hf:{copy}") != identity_of(f"hf:{saved}")


def _edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _damage_weights(folder: Path, what: str) -> None:
    match what:
        case "pickle":
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        case "several":
            shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
            (folder / "model.safetensors").rename(folder / "b.safetensors")
        case "outside":
            shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
            index = {"metadata": {}, "weight_map": {"logit_scale": "../outside.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "another name":
            _edit_weights(folder, lambda held: held.update(logit_scales=held.pop("logit_scale")))
        case "not finite":
            _edit_weights(folder, lambda held: held["logit_scale"].fill_(float("nan")))


def _change(folder: Path, file: str, changes: dict[str, Any]) -> None:
    """Merges changes into a JSON file, those of a part of a configuration into that part."""
    path = folder / f"{file}.json"
    written = json.loads(path.read_text()) if path.is_file() else {}
    for name, value in changes.items():
        if name in ("vision_config", "text_config") and value is not None:
            value = written[name] | value
        written[name] = value
    path.write_text(json.dumps(written))


DAMAGES: list[tuple[str, dict[str, Any] | None, str]] = [
    ("config", {"model_type": "llama"}, "model_type in .* is 'llama', wanted one of clip, siglip"),
    ("config", {"auto_map": {"AutoModel": "x.Y"}}, "has auto_map, which can bring code of others"),
    ("config", {"text_config": {"quantization_config": {"load_in_8bit": True}}},
     "text_config of .* has quantization_config, which can bring code"),
    ("config", {"vision_config": {"num_hidden_layers": 3}},
     "which the configuration describes|num_hidden_layers 3"),
    ("config", {"text_config": None}, "has no text_config"),
    ("adapter_config", {}, "holds an adapter: merge it into its model"),
    ("tokenizer_config", {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
     "has auto_map, which names Python"),
    ("preprocessor_config", {"do_resize": False}, "does not resize pictures"),
    ("preprocessor_config", {"size": {"shortest_edge": 40}}, r"40.* pixels, the model takes"),
    ("outside", None, "has no ../outside.safetensors"),
    ("several", None, "has no model.safetensors"),
    ("another name", None, "the weights have no logit_scale"),
    ("not finite", None, "not finite"),
    ("pickle", None, "has no .*safetensors"),
]  # fmt: skip


@of_clip
@pytest.mark.parametrize(("what", "changes", "message"), DAMAGES)
def test_what_is_no_such_model_is_one_line(
    saved: Path, tmp_path: Path, what: str, changes: dict[str, Any] | None, message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = shutil.copytree(saved, tmp_path / "model")
    if changes is None:
        _damage_weights(folder, what)
    else:
        _change(folder, what, changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        mclclip.load_model(f"hf:{folder}")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # transformers would print a report of weights


@of_clip
def test_a_folder_that_was_saved_over_is_read_as_transformers_reads_it(
    saved: Path, tmp_path: Path
) -> None:
    """By its single file of weights, and by the settings of pictures that version 5 wrote."""
    folder = shutil.copytree(saved, tmp_path / "model")
    stale = {"weight_map": {"logit_scale": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    before, others = json.loads((saved / "preprocessor_config.json").read_text()), [0.5] * 3
    now = {"image_processor": before | {"image_mean": others, "image_std": others}}
    (folder / "processor_config.json").write_text(json.dumps(now))
    encoder, plain = (mclclip.load_model(f"hf:{path}") for path in (folder, saved))
    assert encoder.logit_scale == plain.logit_scale
    assert "0.5" in str(encoder.preprocess_val) and "0.5," not in str(plain.preprocess_val)


@of_clip
def test_its_blocks_are_known_before_it_is_loaded(saved: Path) -> None:
    blocks = VISION["num_hidden_layers"]
    assert num_blocks(ModelConfig(name=f"hf:{saved}")) == blocks
    assert num_blocks(ModelConfig(name="hf:some/model")) is None  # it is not in the cache


@of_clip
def test_an_adapter_and_a_file_are_named_as_such(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for name in (f"hf:{tmp_path}", str(tmp_path)):
        with pytest.raises(ValueError, match="holds an adapter"):
            mclclip.load_model(name)
    with pytest.raises(FileNotFoundError, match=f"give its folder, hf:{saved}"):
        mclclip.load_model(f"hf:{saved}/model.safetensors")


def test_captions_that_are_cut_are_counted(saved: Path) -> None:
    """Both kinds pad with the token that ends a text."""
    extractor = Extractor(mclclip.load_model(f"hf:{saved}"))
    texts = ["a cat", "a dog " * 20, "a", ""]
    assert retrieval.count_cut_captions(extractor, texts) == {
        "context_length": 12,
        "captions_cut": 1,
    }


@of_clip
def test_names_are_checked(saved: Path, tmp_path: Path) -> None:
    """A base is looked at by its configuration, before pictures are packed."""
    (tmp_path / "data@1").mkdir()
    for prefix in ("hf:", "local-dir:", ""):
        assert split_name(f"{prefix}{tmp_path}/data@1") == (f"{prefix}{tmp_path}/data@1", None)
    with pytest.raises(ValueError, match="brings its own weights"):
        mclclip.load_model(f"hf:{saved}", "openai")
    shutil.copytree(saved, tmp_path / "sentence" / "0_CLIPModel")
    folder = shutil.copytree(saved, tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    for name, message in (
        (str(saved), f"hf:{saved}"),
        ("hf:/nowhere/at/all", "no folder .*give hf:FOLDER, or hf:ORG/NAME"),
        ("hf:nobody-at-all/nothing", "neither cached nor reachable"),
        (f"hf:{tmp_path / 'sentence'}", "give hf:.*sentence/0_CLIPModel"),
        (f"hf:{folder}", "preprocessor_config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            mclclip.load_model(name)
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    for read in (refuse_without_weights, mclclip.load_model):
        with pytest.raises(ValueError, match="llava"):
            read(f"hf:{tmp_path}")


@of_clip
def test_a_folder_that_transformers_5_saves_is_read(saved: Path, tmp_path: Path) -> None:
    """All processors in one file, and the tokenizer in another."""
    folder = shutil.copytree(saved, tmp_path / "model")
    record = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": record}))
    images = pictures(tmp_path)
    wanted = mclclip.load_model(f"hf:{saved}").encode_image(images)
    np.testing.assert_array_equal(mclclip.load_model(f"hf:{folder}").encode_image(images), wanted)


@pytest.mark.parametrize("kind", kept(["quick_gelu", "siglip"], 0))
def test_an_export_is_read_back_bit_for_bit_also_after_transformers_saved_it(
    tmp_path: Path, kind: str
) -> None:
    source = source_of(kind, tmp_path)
    own, out = mclclip.load_model(source), convert.run("hf", source, tmp_path / "hf")
    again = tmp_path / "again"
    for name in ("AutoModel", "AutoProcessor"):
        getattr(transformers, name).from_pretrained(out).save_pretrained(again)
    images, texts = pictures(tmp_path), ["a dog", "A photo of two cups!"]
    for folder in (out, again):
        other = mclclip.load_model(f"hf:{folder}")
        assert np.array_equal(other.encode_image(images), own.encode_image(images))
        assert np.array_equal(other.encode_text(texts), own.encode_text(texts))
        assert other.logit_scale == own.logit_scale


@of_clip
def test_it_is_trained_and_exported_as_any_model(saved: Path, tmp_path: Path) -> None:
    """Its export is an open_clip directory with its tokenizer."""
    model = load_towers(f"hf:{saved}").train().requires_grad_(True)
    model.encode_image(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    model.eval().save(tmp_path / "export")
    again, own = mclclip.load_model(tmp_path / "export"), mclclip.load_model(f"hf:{saved}")
    np.testing.assert_allclose(again.encode_text(TEXTS), own.encode_text(TEXTS), atol=1e-6)
    images = pictures(tmp_path)
    np.testing.assert_allclose(again.encode_image(images), own.encode_image(images), atol=1e-6)
