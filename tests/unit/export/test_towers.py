"""SigLIP in transformers, image towers in timm: features, and what they cannot hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mclclip
import mclclip.torchvision_fix  # noqa: F401

# isort: split
import open_clip.timm_model
import timm

from mclclip.export import convert
from mclclip.models import weights
from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from tests.matrix import kept
from tests.unit.export.test_convert import CONFIGS, exported, the_certificate
from tests.unit.export.test_onnx import timm_tower

SIGLIP = "vit_base_patch16_siglip_224"


def siglip(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: dict[str, object] | None = None,
    **changes: object,
) -> Path:
    """SigLIP's architecture with two narrow blocks, beside a text tower of its kind.

    ``text`` and ``changes`` are changes of text_cfg and of other parts; None: without it.
    """
    create = timm.create_model
    small = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    monkeypatch.setattr(
        open_clip.timm_model.timm, "create_model",
        lambda name, *args, **given: create(
            name, *args, **(small if "siglip" in str(name) else {}) | given
        ),
    )  # fmt: skip
    described = json.loads((CONFIGS / "tiny_vit.json").read_text())
    described |= {
        "init_logit_bias": -10.0, "custom_text": True,
        "vision_cfg": {
            "timm_model_name": SIGLIP, "timm_model_pretrained": False, "timm_pool": "map",
            "timm_proj": "none", "image_size": 224,
        },
        "text_cfg": described["text_cfg"]
        | {
            "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"},
        }
        | (text or {}),
    }  # fmt: skip
    described = {k: v for k, v in (described | changes).items() if v is not None}
    model = load_towers(described)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.exported.named_parameters():
            if not name.startswith("logit"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save(folder)
    return folder


@pytest.mark.parametrize("custom_text", [True, None])
def test_siglip_gives_the_same_features_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, custom_text: bool | None
) -> None:
    """Without custom_text the tensors of the text tower lie in the model itself."""
    transformers = pytest.importorskip("transformers")
    source = siglip(tmp_path / "own", monkeypatch, custom_text=custom_text)
    out = convert.run("hf", source, tmp_path / "hf")
    model = transformers.SiglipModel.from_pretrained(out).eval()
    own = mclclip.load_model(source)
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    tokens = own.tokenizer(["a dog", "two cups"])
    with torch.no_grad():
        found = model(input_ids=tokens, pixel_values=pixels)
    wanted = own.encode_image(pixels), own.encode_text(tokens)
    torch.testing.assert_close(found.image_embeds, wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.text_embeds, wanted[1], atol=1e-5, rtol=0)
    logits = own.logit_scale * wanted[0] @ wanted[1].T - 10.0
    torch.testing.assert_close(found.logits_per_image, logits, atol=1e-4, rtol=1e-5)
    proof = the_certificate(out)
    assert max(proof["image_features"], proof["text_features"]) <= 1e-5
    assert wanted[0].std() > 0.05 and the_certificate(out, 1)["pixels"] == 0.0


def with_a_tokenizer_of_its_own(source: Path, clean: str) -> None:
    """Makes the export one whose texts are read by a tokenizer of the hub, with `clean` first."""
    path = source / "open_clip_config.json"
    tree = json.loads(path.read_text())
    tree["model_cfg"]["text_cfg"] |= {
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "tokenizer_kwargs": {"clean": clean},
    }  # fmt: skip
    path.write_text(json.dumps(tree))


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of whole words, which knows nothing of cases and punctuation."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = [
        "<pad>",
        "</s>",
        "<unk>",
        *"a photo of the dog DOG cat it s its two , ! red_cups".split(),
    ]
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: str
) -> None:
    """In lower case and without punctuation, which the files of the tokenizer do not say."""
    transformers = pytest.importorskip("transformers")
    source = siglip(tmp_path / "own", monkeypatch)
    with_a_tokenizer_of_its_own(source, clean)
    save_tokenizer(source)
    out = convert.run("hf", source, tmp_path / "hf")
    texts = ["A photo, of the DOG!", "  it's\ta  cat ", "two red_cups", "", "dog " * 50]
    own = mclclip.load_model(source).tokenizer(texts)
    read = transformers.AutoTokenizer.from_pretrained(out)
    found = read(texts, padding="max_length", truncation=True, return_tensors="pt")
    assert torch.equal(found["input_ids"], own) and len({*own[0].tolist()}) > 4
    assert the_certificate(out)["tokens_of"] == ["rock &amp; roll"]  # HTML's entities
    described = json.loads((out / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_tokenizer_that_cannot_be_had_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = siglip(tmp_path / "own", monkeypatch)
    with_a_tokenizer_of_its_own(source, "canonicalize")
    with pytest.raises(FileNotFoundError, match="own has no files of its tokenizer, .*SigLIP.*put"):
        convert.run("hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


PLAIN = {"no_causal_mask": False, "pool_type": "argmax", "proj_bias": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"custom_text": None, "text": PLAIN},
            'set no_causal_mask: true, pool_type: "last", proj_bias: true in text_cfg of',
        ),
        ({"text": {"proj_bias": False}}, "set proj_bias: true in text_cfg of"),
        ({"init_logit_bias": None}, "set init_logit_bias: -10 in the model's configuration"),
    ],
)
def test_a_siglip_that_is_built_otherwise_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    source = siglip(tmp_path / "own", monkeypatch, **changes)
    with pytest.raises(ValueError, match=message):
        convert.run("hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_plain_vit_with_a_logit_bias_says_what_to_leave_out(tmp_path: Path) -> None:
    source = exported(tmp_path / "own", init_logit_bias=-10.0)
    with pytest.raises(ValueError, match="leave init_logit_bias out of the model's configuration"):
        convert.run("hf", source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("name", "pool", "proj"),
    kept(
        [("test_vit", "", "linear"), ("test_convnext", "", "linear"), ("test_resnet", "avg", "")],
        0,
        1,
    ),
)
def test_timm_gives_the_same_features(tmp_path: Path, name: str, pool: str, proj: str) -> None:
    source = timm_tower(
        tmp_path / "own", name, timm_pool=pool, timm_proj=proj, image_size=160
    )  # fmt: skip
    out = convert.run("timm", source, tmp_path / "timm")
    check_timm(source, out, 160)


@pytest.mark.parametrize("quick_gelu", kept([False, True], 1))
def test_a_plain_vit_is_one_of_timms(tmp_path: Path, quick_gelu: bool) -> None:
    source = exported(tmp_path / "own", quick_gelu=quick_gelu)
    check_timm(source, convert.run("timm", source, tmp_path / "timm"), 32)


def check_timm(source: Path, out: Path, size: int) -> None:
    """Equal features, through timm's folder and through its list of models and a file."""
    own = mclclip.load_model(source)
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    wanted = own.encode_image(pixels)
    described = json.loads((out / "config.json").read_text())
    models = [
        timm.create_model(f"local-dir:{out}", pretrained=True),
        timm.create_model(
            described["architecture"],
            checkpoint_path=str(out / "model.safetensors"),
            **described["model_args"],
        ),
    ]
    for model in models:
        with torch.no_grad():
            found = torch.nn.functional.normalize(model.eval()(pixels), dim=-1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert the_certificate(out)["image_features"] <= 1e-5 and wanted.std() > 0.01
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(models[0]))
    assert transform.transforms[-1].std.tolist() == pytest.approx(
        described["pretrained_cfg"]["std"]
    )


def test_what_timm_cannot_hold_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "timm"
    load_towers(CONFIGS / "tiny_resnet.json").save(tmp_path / "resnet")
    with pytest.raises(ValueError, match="is a ModifiedResNet, which timm has not"):
        convert.run("timm", tmp_path / "resnet", out)
    save_concat([tmp_path / "resnet"] * 2, "raw", tmp_path / "concat")
    with pytest.raises(ValueError, match="is a joined encoder, which timm cannot hold"):
        convert.run("timm", tmp_path / "concat", out)
    mlp = timm_tower(tmp_path / "mlp", "test_vit", timm_proj="mlp", image_size=160)
    with pytest.raises(ValueError, match="is no linear layer .*it cannot hold this tower"):
        convert.run("timm", mlp, out)
    with pytest.raises(ValueError, match="has no place in transformers' CLIPModel"):
        convert.run("hf", mlp, out)
    assert not out.exists()
    assert weights.has_config(mlp)
