"""The contract of every export target: equal features in the other library, or one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mclclip
import mclclip.util.torchvision_fix  # noqa: F401
from mclclip.cli import entry
from mclclip.export import certificate, convert, processors, targets
from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.models.narrow import narrow, narrow_encoder
from mclclip.run import artifacts
from mclclip.util import shipped
from tests.matrix import kept
from tests.unit.export.models import exported, joined, siglip, source_of, the_certificate

pytestmark = pytest.mark.usefixtures("narrow_siglip")
Encoders = list[Callable[[Tensor], Tensor]]


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def by_onnxruntime(out: Path) -> Encoders:
    """The graphs of images and texts, which give unit features. Runtimes and vector stores ask a
    graph for their width; the batch alone is of any size."""
    onnxruntime = pytest.importorskip("onnxruntime")
    width = json.loads((out / "encoder.json").read_text())["features"]["width"]

    def graph(name: str, given: str) -> Callable[[Tensor], Tensor]:
        session = onnxruntime.InferenceSession(str(out / name))
        assert session.get_outputs()[0].shape == ["batch", width]
        return lambda rows: torch.from_numpy(session.run(None, {given: rows.numpy()})[0])

    pairs = (("image.onnx", "pixels"), ("text.onnx", "tokens"))
    return [graph(name, given) for name, given in pairs if (out / name).is_file()]


def by_transformers(out: Path) -> Encoders:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(out).eval()  # StagesModel is registered

    def rows(features: Any) -> Tensor:
        return features if isinstance(features, Tensor) else features.pooler_output

    return [
        lambda pixels: rows(model.get_image_features(pixel_values=pixels)),
        lambda tokens: rows(model.get_text_features(input_ids=tokens)),
    ]


def by_open_clip(out: Path) -> Encoders:
    import open_clip

    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{out}")
    return [model.eval().encode_image, model.encode_text]


class Case(NamedTuple):
    """A target with kinds of models (see `source_of`), and more that some runs leave out; ``load``
    returns how the library encodes images, and texts."""

    load: Callable[[Path], Encoders]
    kinds: Sequence[str]
    more: Sequence[str] = ()


CASES = {
    "hf": Case(
        by_transformers,
        ["long", "sized_siglip", "apart_stage_norm"],
        ["vit", "siglip", "siglip_flat", "quick_gelu", "concat_raw"],
    ),
    "onnx": Case(
        by_onnxruntime,
        ["one_block"],
        ["concat_stage_norm", "resnet", "sized_resnet", "long", "image_encoder", "concat_raw"]
        + ["vit", "test_convnext", "sized_test_vit"],
    ),
    "open_clip": Case(by_open_clip, ["sized_vit"], ["long"]),
}
QUICK = [(to, kind) for to, case in CASES.items() for kind in case.kinds]
MORE = [(to, kind) for to, case in CASES.items() for kind in case.more]


@torch.no_grad()
@pytest.mark.parametrize(("to", "kind"), kept([*QUICK, *MORE], *range(len(QUICK))))
def test_the_library_gives_the_same_features(tmp_path: Path, to: Any, kind: str) -> None:
    source = source_of(kind, tmp_path)
    own, out = mclclip.load_model(source), convert.run(to, source, tmp_path / "out")
    encode = CASES[to].load(out)
    image = own.preprocess_val(certificate.draw_images()["noise 50x40"])
    for batch in (1, 3):  # of any size
        pixels = torch.randn(batch, *image.shape, generator=torch.Generator().manual_seed(batch))
        wanted = own.encode_image(pixels)
        found = torch.nn.functional.normalize(encode[0](pixels), dim=-1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert wanted.std() > 0.01  # the towers do something
    if len(encode) == 2:
        tokens = own.tokenizer(["a dog", "two cups", "a", "word " * 40])
        found = torch.nn.functional.normalize(encode[1](tokens), dim=-1)
        torch.testing.assert_close(found, own.encode_text(tokens), atol=1e-5, rtol=0)
    proof = the_certificate(out)
    assert proof["image_features"] <= 1e-5 and (proof["text_features"] or 0.0) <= 1e-5
    assert (proof["text_features"] is None) == (len(encode) == 1) and proof["num_images"] == 15
    assert (proof["tokens"] is None) == (len(encode) == 1)
    if to == "open_clip":
        assert proof["image_features"] == proof["text_features"] == proof["pixels"] == 0.0
        assert proof["tokens"] == 0
    paths = [path for path in out.rglob("*") if path.is_file()]
    names = {str(path.relative_to(out)) for path in paths} - {artifacts.MANIFEST}
    assert {*artifacts.read_manifest(out, "converted").records} == names


def test_every_module_of_the_folder_is_a_target_with_a_case_or_a_file_of_its_own() -> None:
    """Also by the text of its declaration, from which the help of the flags is made."""
    for name in targets.names():
        target = targets.find(name)
        assert {*target.card} <= {"library_name", "pipeline_tag"}
        for text, holds in (
            ("is_model=False", not target.is_model),
            ("precisions=", len(target.precisions) > 1),
        ):
            assert (name in shipped.plugins("export/targets", text)) == holds
        words = ["export", "--to", name, "--model", "model", "--out", "out"]
        assert entry.parse_words(words).to == name
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {*CASES} <= {*targets.names()} <= CASES.keys() | files, "add it to CASES in this file"


# --- what they cannot hold ---------------------------------------------------------------------

PLAIN = {"no_causal_mask": False, "pool_type": "argmax", "proj_bias": False}
REFUSED: dict[str, tuple[Any, str, Callable[[Path], Path]]] = {
    "resnet in CLIPModel": (
        "hf", "has no place in transformers' CLIPModel", lambda path: source_of("resnet", path),
    ),
    "a logit bias in CLIPModel": (
        "hf", "leave init_logit_bias out of the model's configuration",
        lambda path: exported(path / "own", init_logit_bias=-10.0),
    ),
    "a way to resize": (
        "hf", "by their longest side have no image processor",
        lambda path: exported(
            path / "own", preprocess_cfg={"size": [32, 32], "resize_mode": "longest"}
        ),
    ),
    "SigLIP's text tower": (
        "hf", 'set no_causal_mask: true, pool_type: "last", proj_bias: true in text_cfg of',
        lambda path: siglip(path / "own", custom_text=None, text=PLAIN),
    ),
    "SigLIP's logit bias": (
        "hf", "set init_logit_bias: -10 in the model's configuration",
        lambda path: siglip(path / "own", init_logit_bias=None),
    ),
    "a concat in open_clip": (
        "open_clip", "is a joined encoder, which plain open_clip cannot hold", joined,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_library_cannot_hold_is_one_line(tmp_path: Path, case: str) -> None:
    to, message, make = REFUSED[case]
    pytest.importorskip("open_clip" if to == "open_clip" else "transformers")
    source = make(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=message) as error:
        convert.run(to, source, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# --- transformers ------------------------------------------------------------------------------


def test_logits_and_tokens_are_those_of_the_model(tmp_path: Path, transformers: Any) -> None:
    """transformers reads a text at its eos_token_id, and by a rule of older models where it is 2,
    which gives the same features. A logit scale above 100 stays as it is."""
    source = exported(tmp_path / "own", init_logit_scale=5.0)
    out = convert.run("hf", source, tmp_path / "hf")
    model, own = transformers.CLIPModel.from_pretrained(out).eval(), mclclip.load_model(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = json.loads((out / "config.json").read_text())["text_config"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert text[name] == getattr(tokenizer, name)
    texts = ["a photo of a dog", "two red cups", "a"]
    length = text["max_position_embeddings"]
    tokens = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(**tokens, pixel_values=pixels).logits_per_image
    words = own.encode_text(own.tokenizer(texts))
    wanted = own.logit_scale * own.encode_image(pixels) @ words.T
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-5)
    again = mclclip.load_model(f"hf:{out}")
    assert again.logit_scale == own.logit_scale == pytest.approx(math.exp(5.0))


def test_a_joined_encoder_holds_its_trunk_once_and_is_saved_again(
    joined_hf: tuple[Path, Path], tmp_path: Path, transformers: Any
) -> None:
    _, out = joined_hf
    model = transformers.AutoModel.from_pretrained(out).eval()
    held = sum(t.numel() for t in weights.read_tensors(out / "model.safetensors").values())
    assert held == sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again.get_image_features(pixels), model.get_image_features(pixels))
    proof = the_certificate(out)
    assert proof["pixels"] == 0.0 and proof["logits"] <= 1e-4
    with pytest.raises(ValueError, match="joined encoder"):
        mclclip.load_model(f"hf:{out}")


PICTURE = certificate.draw_images()["smooth 300x500"]


@torch.no_grad()
def logits_by_processor(out: Path, texts: list[str]) -> Tensor:
    """As the card says; the image processor has other pixels than open_clip's transform."""
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(out)
    inputs = processor(
        text=texts, images=PICTURE, padding="max_length", truncation=True, return_tensors="pt"
    )
    logits: Tensor = transformers.AutoModel.from_pretrained(out).eval()(**inputs).logits_per_image
    return logits


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_no_word_is_a_special_token_and_no_padding_is_masked(
    tmp_path: Path, transformers: Any, kind: str
) -> None:
    """SigLIP reads the padding too, so it is open_clip's; CLIP ignores what follows the end."""
    texts = ["a photo of a dog!", "wow! a cat!", "!", "a ! b", "?!?", "", "<|endoftext|> z"]
    source = (exported if kind == "clip" else siglip)(tmp_path / "own")
    model: Any = load_towers(source)
    (tmp_path / "out").mkdir()
    processors.write_tokenizer(source, model, tmp_path / "out")
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(
        [*texts, "a " * 99], **processors.TEXTS
    )
    assert {*inputs} == {"input_ids"}
    for ids, wanted in zip(inputs["input_ids"], model.tokenizer([*texts, "a " * 99]), strict=True):
        length = len(wanted) if kind == "siglip" else int(wanted.argmax()) + 1
        assert torch.equal(ids[:length], wanted[:length])


def with_a_tokenizer_of_its_own(folder: Path, clean: str) -> Path:
    """A SigLIP whose texts are read by a tokenizer of the hub, with `clean` first."""
    source = siglip(folder)
    path = source / "open_clip_config.json"
    tree = json.loads(path.read_text())
    tree["model_cfg"]["text_cfg"] |= {
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "tokenizer_kwargs": {"clean": clean},
    }  # fmt: skip
    path.write_text(json.dumps(tree))
    return source


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, which knows nothing of cases and punctuation."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    words = "<pad> </s> <unk> a photo of off the dog DOG cat it s its two , ! red_cups".split()
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(str(folder))


@pytest.mark.parametrize("clean", kept(["canonicalize", "lower", "whitespace"], 0))
def test_siglips_own_tokenizer_reads_texts_as_open_clip_does(
    tmp_path: Path, transformers: Any, clean: str
) -> None:
    """In lower case and without punctuation, which the files of the tokenizer do not say."""
    source = with_a_tokenizer_of_its_own(tmp_path / "own", clean)
    with pytest.raises(FileNotFoundError, match="own has no files of its tokenizer: put .*SigLIP"):
        convert.run("hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    save_tokenizer(source)
    out = convert.run("hf", source, tmp_path / "hf")
    texts = ["A photo, of the DOG!", "  it\u2019s\ta  cat ", "two red_cups", "", "dog " * 50]
    texts += ["the \u201cdog\u201d", "o\ufb00 the dog"]
    own = mclclip.load_model(source).tokenizer(texts)
    read = transformers.AutoTokenizer.from_pretrained(out)
    found = read(texts, padding="max_length", truncation=True, return_tensors="pt")
    assert torch.equal(found["input_ids"], own) and len({*own[0].tolist()}) > 4
    proof = the_certificate(out)
    assert proof["tokens_of"] == ["rock &amp; roll"]  # HTML's entities
    assert the_certificate(out, 2)["pixels"] == 0.0
    assert proof["text_features"] <= 1e-5 < proof["text_features_own_tokens"]
    encoder = mclclip.load_model(source)
    words = encoder.encode_text(encoder.tokenizer(texts))
    images = encoder.encode_image(encoder.preprocess_val(PICTURE)[None])
    wanted = encoder.logit_scale * images @ words.T - 10.0
    torch.testing.assert_close(logits_by_processor(out, texts), wanted, atol=0.05, rtol=0)
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


# --- onnx --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_graph_says_what_it_takes_and_has_the_trunk_once(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    source = joined(tmp_path)
    out = convert.run("onnx", source, tmp_path / "onnx")
    own, config = mclclip.load_model(source), json.loads((out / "encoder.json").read_text())
    assert config["image"]["shape"] == ["batch", 3, 32, 32]
    assert config["features"]["width"] == own.embed_dim
    assert config["logit_scale"] == pytest.approx(own.logit_scale)
    graph = onnx.load(str(out / "image.onnx")).graph  # two shared blocks, and one of each stage
    assert [node.op_type for node in graph.node].count("Softmax") == 2 + 3


# --- features that are cut to their first numbers -----------------------------------------------

KINDS = ["vit", "resnet", "concat_stage_norm", "test_vit", "test_resnet", "apart_raw", "quick_gelu"]
WIDTH = 5


def pixels_of(encoder: Any, number: int = 3) -> torch.Tensor:
    shape = encoder.preprocess_val(certificate.draw_images()["noise 50x40"]).shape
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("kind", kept(KINDS, 0, 1, 2))
def test_a_narrow_model_has_the_first_numbers_of_the_features(tmp_path: Path, kind: str) -> None:
    whole = mclclip.load_model(source_of(kind, tmp_path))
    cut, narrowed = whole.cut(WIDTH), narrow_encoder(whole, WIDTH)
    num = len(whole.stages)
    pixels, tokens = pixels_of(whole), whole.tokenizer(["a dog", "two cups", "a"])
    for encode, stage_features in (
        (lambda e: e.encode_image(pixels), whole.stage_features(pixels)),
        (lambda e: e.encode_text(tokens), whole.stage_text_features(tokens)),
    ):
        found = encode(cut)
        assert found.shape == (3, WIDTH * num) and cut.embed_dim == WIDTH * num
        torch.testing.assert_close(found, encode(narrowed), atol=1e-5, rtol=0)
        if num == 1:
            wanted = torch.nn.functional.normalize(stage_features[0][:, :WIDTH], dim=1)
            torch.testing.assert_close(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    ("to", "load"),
    kept([("open_clip", by_open_clip), ("onnx", by_onnxruntime), ("hf", by_transformers)], 2),
)
def test_every_library_reads_a_width(tmp_path: Path, to: str, load: Any) -> None:
    pytest.importorskip("transformers" if to == "hf" else "open_clip")
    source = source_of("vit", tmp_path)
    out = convert.run(to, source, tmp_path / "out", width=WIDTH)
    whole = mclclip.load_model(source)
    pixels = pixels_of(whole)
    found = torch.nn.functional.normalize(load(out)[0](pixels), dim=-1)
    torch.testing.assert_close(found, whole.cut(WIDTH).encode_image(pixels), atol=1e-5, rtol=0)
    assert artifacts.read_manifest(out, "converted").config["width"] == WIDTH
    with pytest.raises(ValueError, match="width"):  # another width is another artifact
        convert.run(to, source, out, width=WIDTH + 1)


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    encoder = mclclip.load_model(source_of("vit", tmp_path))
    for width in (0, 10_000):
        for refuse in (encoder.cut, lambda w: narrow_encoder(encoder, w)):
            with pytest.raises(ValueError, match=f"width={width} is of features of"):
                refuse(width)
    for source in (siglip(tmp_path / "siglip"), source_of("image_encoder", tmp_path)):
        for cut in (
            lambda source=source: narrow(load_towers(source), WIDTH),
            lambda source=source: convert.run("onnx", source, tmp_path / "out", width=WIDTH),
        ):
            with pytest.raises(ValueError, match="cannot be cut to width=5"):
                cut()
    with pytest.raises(ValueError, match="--width"):
        convert.run("clip_retrieval", tmp_path / "siglip", tmp_path / "out", width=WIDTH)
    assert not (tmp_path / "out").exists()
