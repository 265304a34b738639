"""Models of strangers: nothing that comes with one runs, and what is harmless still loads."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import torch

from mclclip import config as configuration
from mclclip.eval.protocols import BenchmarkConfig
from mclclip.models import weights
from mclclip.models.encoder import load_model, save_concat
from mclclip.models.loading import load_towers, model_config
from mclclip.models.model import Model
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import eval as evaluation
from tests.unit.models.conftest import CONFIGS, RunsWhenOpened, tiny_config

pytest.importorskip("transformers")

TINY = tiny_config()
NAME = "roberta-base"  # a tokenizer and a text tower of open_clip's own models
CODE = """
open({marker!r}, "w").close()
from transformers import PreTrainedTokenizer, PretrainedConfig
class Tokenizer(PreTrainedTokenizer): pass
class Config(PretrainedConfig): model_type = "strange"
"""
TOLD = {"hf_tokenizer_name": NAME, "tokenizer_kwargs": {"trust_remote_code": True}}
TOKENIZER = {
    "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]},
    "tokenizer_class": "Tokenizer",
}
CONFIG = {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "strange"}


class Stranger:
    """Makes directories with Python in them, which says that it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = folder, folder / "it_ran"

    def files(self, directory: Path, **records: object) -> Path:
        """Python, and JSON files by name."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "code.py").write_text(CODE.format(marker=str(self.marker)))
        for name, record in records.items():
            (directory / f"{name}.json").write_text(json.dumps(record))
        return directory

    def model(self, model: Model, text_cfg: dict[str, Any], **records: object) -> Path:
        """A whole model directory, whose text_cfg is changed."""
        directory = self.folder / "model"
        model.save(directory)
        change(directory, text_cfg)
        return self.files(directory, **records)


def change(directory: Path, text_cfg: dict[str, Any]) -> None:
    config = json.loads((directory / weights.CONFIG).read_text())
    config["model_cfg"]["text_cfg"] |= text_cfg
    (directory / weights.CONFIG).write_text(json.dumps(config))


def tiny(part: str = "text_cfg", **changes: Any) -> Any:
    return tiny_config(**{part.removesuffix("_cfg"): changes})


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stranger]:
    """Nothing of his has run at the end, though the user says yes to every question."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    made = Stranger(tmp_path)
    yield made
    assert not made.marker.exists(), "the stranger's code ran"


def refused(found: Any, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        found()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "trust_remote_code=True" not in str(caught.value)  # transformers' advice


# --- code beside a model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text_cfg", "records", "message"),
    [
        (TOLD, {"tokenizer_config": TOKENIZER}, "has trust_remote_code, which runs Python"),
        (TOLD, {"tokenizer_config": {}, "config": CONFIG}, "has trust_remote_code"),
        (
            {"hf_tokenizer_name": NAME},
            {"tokenizer_config": TOKENIZER},
            "tokenizer_config.json has auto_map, which names Python",
        ),
        (
            {"hf_tokenizer_name": NAME},
            {"tokenizer_config": {"tokenizer_class": "AutoConfig"}, "config": CONFIG},
            "is 'AutoConfig', wanted a fast tokenizer",
        ),
    ],
    ids=["told", "told_by_config", "asked", "asked_by_class"],
)
def test_python_beside_a_tokenizer_never_runs(
    stranger: Stranger, vit: Model, text_cfg: Any, records: Any, message: str
) -> None:
    directory = stranger.model(vit, text_cfg, **records)
    refused(lambda: load_towers(directory), message)


def test_python_beside_a_model_without_a_tokenizer_never_runs(
    stranger: Stranger, vit: Model
) -> None:
    """Its tokenizer comes from the hub by its name, and nothing in the directory is asked."""
    model = load_towers(stranger.model(vit, {"hf_tokenizer_name": NAME}, config=CONFIG))
    refused(lambda: model.tokenizer(["a"]), f"tokenizer files of {NAME!r} are neither cached nor")


def test_every_way_to_a_directory(stranger: Stranger, vit: Model, tmp_path: Path) -> None:
    directory = stranger.model(vit, TOLD, tokenizer_config=TOKENIZER)
    run = configuration.from_tree({"run_dir": str(tmp_path / "run")})
    suite = {"mmvp": BenchmarkConfig("mmvp", str(tmp_path))}
    vit.save(tmp_path / "own")
    save_concat([tmp_path / "own"], "raw", tmp_path / "concat")
    change(tmp_path / "concat", TOLD)
    stranger.files(tmp_path / "concat", tokenizer_config=TOKENIZER)
    for way in (
        lambda: load_model(directory),
        lambda: load_model(f"local-dir:{directory}"),
        lambda: load_model(directory / weights.CONFIG),
        lambda: load_model(tmp_path / "concat"),
        lambda: evaluation.evaluate(run, SINGLE, {"it": directory}, benchmarks=suite),
        lambda: model_config(directory),
    ):
        refused(way, "has trust_remote_code")


def test_a_model_of_the_hub(
    stranger: Stranger, vit: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its tokenizer comes from the hub too, by a name: here from a folder that stands for it."""
    folder = stranger.files(tmp_path / "tokenizer", tokenizer_config=TOKENIZER)
    named = TOLD | {"hf_tokenizer_name": str(folder)}
    directory = stranger.model(vit, named)

    def fetch(_: str, filename: str = weights.WEIGHTS, **__: Any) -> str:
        return str(directory / filename)

    monkeypatch.setattr("mclclip.models.clip.download_pretrained_from_hf", fetch)
    monkeypatch.setattr("open_clip.factory.download_pretrained_from_hf", fetch)
    refused(lambda: load_towers("hf-hub:strange/model"), "which no model of open_clip's own has")
    change(directory, {"hf_tokenizer_name": NAME})
    refused(lambda: load_towers("hf-hub:strange/model"), "has trust_remote_code")


def test_a_folder_of_a_public_name_is_not_taken_for_it(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stranger.files(tmp_path / NAME, tokenizer_config=TOKENIZER, config=CONFIG)
    monkeypatch.chdir(tmp_path)
    for name in ("roberta-ViT-B-32", tiny(hf_tokenizer_name=NAME), tiny(hf_model_name=NAME)):
        refused(lambda name=name: load_towers(name), f"{tmp_path / NAME} would be read instead")


def test_a_text_tower_with_code(stranger: Stranger, tmp_path: Path) -> None:
    folder = stranger.files(tmp_path / "tower", config=CONFIG)
    refused(
        lambda: load_towers(tiny(hf_model_name=str(folder))), "text_cfg.hf_model_name of the model"
    )


class _SetBadly:
    """Raises a TypeError where only weights are read, and nothing where any object is."""

    def __reduce__(self) -> Any:
        return torch.Tensor, (), (False, None, {})


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt"])
def test_code_in_pickled_weights_never_runs(
    stranger: Stranger, vit: Model, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not even where the user allows code in other programs' files, and the first try fails."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    directory = stranger.model(vit, {})
    (directory / weights.WEIGHTS).unlink()
    runs = RunsWhenOpened(stranger.marker)
    for state in ([runs], [_SetBadly(), runs]):
        # Smaller files are refused before they are opened.
        torch.save({"state_dict": state, "pad": torch.zeros(2_000_000)}, directory / name)
        refused(lambda: load_towers(directory), f"{name} do not load")
        refused(lambda: load_towers(CONFIGS / "tiny_vit.json", str(directory / name)), name)


def test_code_is_not_copied_beside_joined_models(
    stranger: Stranger, vit: Model, tmp_path: Path
) -> None:
    directory = stranger.model(vit, {}, tokenizer={"version": "1.0"})
    (directory / "tokenizer.py").write_text("raise SystemExit")
    save_concat([directory], "raw", tmp_path / "concat")
    found = {path.name for path in (tmp_path / "concat").iterdir()}
    assert "tokenizer.json" in found and not [name for name in found if name.endswith(".py")]


# --- other names and options --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            tiny(hf_tokenizer_name="strange/tokenizer"),
            "hf_tokenizer_name of the model config is 'strange",
        ),
        (tiny(hf_tokenizer_name="./tokenizer"), "which no model of open_clip's own has"),
        (
            tiny(hf_tokenizer_name=[NAME]),
            "hf_tokenizer_name of the model config is ['roberta-base']",
        ),
        (tiny(hf_model_name="hf-hub:a/b"), "hf_model_name of the model config is 'hf-hub:a/b'"),
        (
            tiny(tokenizer_kwargs={"subfolder": "a", "revision": "b"}),
            "has revision, subfolder, wan",
        ),
        (tiny(tokenizer_kwargs={"bpe_path": "/x"}), "has bpe_path, wanted only clean, strip_sep"),
        (tiny(tokenizer_kwargs=["clean"]), "tokenizer_kwargs of the model config is list"),
        (tiny(tokenizer_kwargs={"clean": "all"}), "cannot make the tokenizer"),
        (
            tiny("vision_cfg", timm_model_name="hf-hub:a/b"),
            "'hf-hub:a/b', which timm does not list",
        ),
        (tiny("vision_cfg", timm_model_name="local-dir:/x"), "which timm does not list"),
        (tiny("vision_cfg", timm_model_name="resnet18.a:b"), "which timm does not list"),
        (tiny("vision_cfg", timm_model_name=["resnet18"]), "which timm does not list"),
        ({**TINY, "text_cfg": []}, "text_cfg of the model config is list, wanted a mapping"),
        (
            {"model_cfg": {"embed_dim": 1, "vision_cfg": 1, "text_cfg": {}}},
            "vision_cfg of the model",
        ),
    ],
)
def test_what_open_clip_does_not_name_is_refused(config: Any, message: str) -> None:
    refused(lambda: load_towers(config), message)


def backbone(name: str, **fields: Any) -> dict[str, Any]:
    return {"vision_cfg": {"backbone": name, "channels": 4, "image_size": 16, **fields}}


VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (backbone("timm:resnet81"), "no listed model .*resnet18"),
        (backbone("resnet18"), "no listed model .*timm, torchvision"),
        (backbone("timm:hf-hub:stranger/model"), "no listed model"),
        (backbone("torchvision:vgg11"), "no listed model"),
        (
            backbone("mclclip:small_conv", options={"widths": [8]}),
            "mclclip:small_conv of .* cannot be built",
        ),
        (
            backbone("mclclip:small_conv", options={"widths": 8}),
            "mclclip:small_conv of .* cannot be built",
        ),
        (
            backbone("mclclip:small_conv", options={"widths": [8.5, 2]}),
            "^vision_cfg.options.widths.0 of the model config: .*integer.*got 8.5",
        ),
        (backbone("timm:vit_tiny_patch16_224", stem="cifar", options=VIT), "leave stem out"),
        (backbone("timm:resnet18", colours=3), "vision_cfg.colours"),
        (
            backbone("timm:resnet18", mean=[0.5, 0.5]),
            "^vision_cfg of the model config: mean has 2 values[^{]*$",
        ),
        (backbone("timm:resnet18", options={"blocks": 3}), "cannot be built"),
        (backbone("timm:resnet18") | {"embed_dim": 100}, "embed_dim .* gives 512"),
        (tiny("vision_cfg", layers="3"), "layers in vision_cfg .*got '3'"),
        (tiny("vision_cfg", image_size=4, patch_size=8), "below patch_size 8"),
        (tiny("vision_cfg", image_size=True), "image_size in vision_cfg .*got True"),
        (tiny("vision_cfg", mlp_ratio=float("nan")), "is nan"),
        (tiny("vision_cfg", act_kwargs=[1]), "act_kwargs in vision_cfg .*got .1."),
        (tiny("vision_cfg", surprise=1), "'surprise', which open_clip does not know"),
        (tiny(context_length="x"), "context_length in text_cfg .*got 'x'"),
        (tiny(vocab_size=-1), "vocab_size .* above 0"),
        (TINY | {"embed_dim": {"a": 1}}, "embed_dim"),
        (TINY | {"quick_gelu": {"a": 1}}, "quick_gelu"),
        (tiny("vision_cfg", timm_model_name=["a"] * 5_000), "which timm does not list"),
        ({n: TINY[n] for n in ("vision_cfg", "text_cfg")} | {"model_cfg": {}}, "vision_cfg"),
        ({"model_cfg": 3}, "the model config lacks embed_dim, vision_cfg"),
        (TINY | {"class_name": "os.system"}, "'class_name', which open_clip does not know"),
        *(
            (backbone("timm:test_vit", options=options), "vision_cfg.options of the model config")
            for options in (
                {"checkpoint_path": "../weights.pth"},
                {"cache_dir": "/tmp"},
                {"pretrained": True},
                {"act_layer": "local-dir:x"},
            )
        ),
    ],
)
def test_wrong_fields_are_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_towers(config)
    assert "\n" not in str(caught.value)


def test_open_clips_own_configurations_are_not_refused() -> None:
    folder = Path(open_clip.__file__).parent / "model_configs"
    configs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    checked = [config for config in configs if "multimodal_cfg" not in config]
    names = {config["text_cfg"].get("hf_tokenizer_name") for config in checked}
    assert len(checked) > 100 and {NAME, "timm/ViT-B-16-SigLIP2", "bert-base-uncased"} <= names
    for config in checked:
        assert model_config(config) == config


def test_a_tokenizer_that_cannot_be_fetched_is_one_line_once_it_is_needed(tmp_path: Path) -> None:
    name = "timm/ViT-gopt-16-SigLIP2-384"
    model = load_towers(tiny(hf_tokenizer_name=name))
    images = torch.zeros(1, 3, 32, 32)
    features = model.encode_image(images)
    assert model.tokenizer.context_length == 16
    model.save(tmp_path)
    encoder = load_model(tmp_path)
    found = encoder.encode_image(images)
    torch.testing.assert_close(found, model.encode_image(images, normalize=True).detach())
    assert torch.equal(copy.deepcopy(model).encode_image(images), features)
    for use in (
        lambda: model.tokenizer(["a dog"]),
        lambda: encoder.tokenizer(["a dog"]),
        lambda: pickle.dumps(model.tokenizer),  # a worker could not say it in one line
    ):
        refused(use, f"tokenizer files of {name!r} are neither cached nor reachable")


def test_a_tokenizer_is_made_once_and_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(name: str, **options: Any) -> Any:
        made.append(name)
        return open_clip.SimpleTokenizer(context_length=options["context_length"])

    monkeypatch.setattr("mclclip.models.clip.HFTokenizer", make)
    model = load_towers(tiny(hf_tokenizer_name=NAME))
    assert not made
    sent = pickle.loads(pickle.dumps(model.tokenizer))
    tokens = model.tokenizer(["a dog"])
    assert torch.equal(sent(["a dog"]), tokens) and tokens.shape == (1, 16)
    assert made == [NAME]


# --- harmless tokenizers ------------------------------------------------------------------------


def test_a_tokenizer_of_data_alone_still_loads(vit: Model, tmp_path: Path) -> None:
    """As in plain open_clip, and again from an export of what was loaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"[PAD]": 0, "?": 1, "red": 2, "dog": 3}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    options = {"pad_token": "[PAD]", "unk_token": "?", "sep_token": "dog"}
    own = PreTrainedTokenizerFast(tokenizer_object=plain, **options)
    vit.save(tmp_path / "a")
    own.save_pretrained(tmp_path / "a")
    change(
        tmp_path / "a",
        {"hf_tokenizer_name": NAME, "tokenizer_kwargs": {"strip_sep_token": True}},
    )
    texts = ["a red  dog", "dog red", ""]
    expected = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'a'}")(texts)
    assert expected[0, :3].tolist() == [1, 2, 0] and expected.shape[1] == 16
    loaded = load_towers(tmp_path / "a")
    assert torch.equal(loaded.tokenizer(texts), expected)
    loaded.save(tmp_path / "b")
    save_concat([tmp_path / "b"], "raw", tmp_path / "c")
    for folder in "bc":
        again = load_model(tmp_path / folder)
        assert torch.equal(again.tokenizer(texts), expected)


def test_clips_own_tokenizer_is_open_clips() -> None:
    texts = ["A  dog &amp; a CAT.", "été"]
    found = load_towers(tiny(tokenizer_kwargs={"clean": "canonicalize"})).tokenizer
    expected = open_clip.SimpleTokenizer(context_length=16, clean="canonicalize")
    assert torch.equal(found(texts), expected(texts))
    longer = load_towers(tiny(context_length=20)).tokenizer
    assert torch.equal(longer(texts), open_clip.get_tokenizer("ViT-B-32", context_length=20)(texts))
