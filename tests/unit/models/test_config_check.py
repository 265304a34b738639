"""Models of strangers: nothing that comes with one runs, and what is harmless still loads."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
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
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import eval as evaluation
from tests.unit.models.conftest import CONFIGS, RunsWhenOpened, tiny_config

pytest.importorskip("transformers")

Tree = dict[str, Any]
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
    ids=["told", "asked", "asked_by_class"],
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
    (images := tmp_path / "mmvp/MLLM_VLM Images/A").mkdir(parents=True)
    for number in (1, 2):
        (images / f"{number}.jpg").touch()
    (tmp_path / "mmvp/Questions.csv").write_text("Question ID,Type,Statement\n1,A,x\n2,A,y\n")
    suite = {"mmvp": BenchmarkConfig("mmvp", str(tmp_path / "mmvp"))}
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


class _SetBadly:
    """Raises a TypeError where only weights are read, and nothing where any object is."""

    def __reduce__(self) -> Any:
        return torch.Tensor, (), (False, None, {})


def test_code_in_pickled_weights_never_runs(
    stranger: Stranger, vit: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the user allows code in other programs' files, and the first try fails."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    directory = stranger.model(vit, {})
    (directory / weights.WEIGHTS).unlink()
    runs = RunsWhenOpened(stranger.marker)
    for state in ([runs], [_SetBadly(), runs]):
        # Smaller files are refused before they are opened.
        torch.save({"state_dict": state, "pad": torch.zeros(2_000_000)}, directory / "weights.bin")
        refused(lambda: load_towers(directory), "weights.bin do not load")
        refused(
            lambda: load_towers(CONFIGS / "tiny_vit.json", str(directory / "weights.bin")),
            "weights.bin",
        )


def test_code_is_not_copied_beside_joined_models(
    stranger: Stranger, vit: Model, tmp_path: Path
) -> None:
    directory = stranger.model(vit, {}, tokenizer={"version": "1.0"})
    (directory / "tokenizer.py").write_text("raise SystemExit")
    save_concat([directory], "raw", tmp_path / "concat")
    found = {path.name for path in (tmp_path / "concat").iterdir()}
    assert "tokenizer.json" in found and not [name for name in found if name.endswith(".py")]


# --- other names and options --------------------------------------------------------------------


def backbone(name: str, **fields: Any) -> dict[str, Any]:
    return {"vision_cfg": {"backbone": name, "channels": 4, "image_size": 16, **fields}}


def convolutions(**options: Any) -> dict[str, Any]:
    return backbone("mclclip:small_conv", options=options)


VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
LOADS = "vision_cfg.options of the model config"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # What open_clip does not name.
        (tiny(hf_tokenizer_name="strange/tokenizer"), "is 'strange.* no model of open_clip's own"),
        (tiny(hf_tokenizer_name=[NAME]), "hf_tokenizer_name of the model config is .'roberta-base"),
        (tiny(hf_model_name="hf-hub:a/b"), "hf_model_name of the model config is 'hf-hub:a/b'"),
        (
            tiny(tokenizer_kwargs={"subfolder": "a", "revision": "b"}),
            "has revision, subfolder, wan",
        ),
        (tiny(tokenizer_kwargs=["clean"]), "tokenizer_kwargs of the model config is list"),
        (tiny(tokenizer_kwargs={"clean": "all"}), "cannot make the tokenizer"),
        (
            tiny("vision_cfg", timm_model_name="hf-hub:a/b"),
            "'hf-hub:a/b', which timm does not list",
        ),
        (tiny("vision_cfg", timm_model_name="resnet18.a:b"), "which timm does not list"),
        (tiny("vision_cfg", timm_model_name=["a"] * 5_000), "which timm does not list"),
        ({**TINY, "text_cfg": []}, "text_cfg of the model config is list, wanted a mapping"),
        # Backbones.
        (backbone("timm:resnet81"), "no listed model .*resnet18"),
        (backbone("resnet18"), "no listed model .*timm, torchvision"),
        (backbone("timm:hf-hub:stranger/model"), "no listed model"),
        (convolutions(widths=[8]), "mclclip:small_conv of .* cannot be built"),
        (convolutions(widths=[8.5, 2]), "^vision_cfg.options.widths.0 .*integer.*got 8.5"),
        (backbone("timm:vit_tiny_patch16_224", stem="cifar", options=VIT), "leave stem out"),
        (backbone("timm:resnet18", colours=3), "vision_cfg.colours"),
        (backbone("timm:resnet18", mean=[0.5, 0.5]), "mean has 2 values[^{]*$"),
        (backbone("timm:resnet18", options={"blocks": 3}), "cannot be built"),
        (backbone("timm:resnet18") | {"embed_dim": 100}, "embed_dim .* gives 512"),
        (backbone("timm:test_vit", options={"checkpoint_path": "../weights.pth"}), LOADS),
        (backbone("timm:test_vit", options={"act_layer": "local-dir:x"}), LOADS),
        # Types and numbers.
        (tiny("vision_cfg", layers="3"), "vision_cfg.layers in .*got '3'"),
        (tiny("vision_cfg", image_size=4, patch_size=8), "below patch_size 8"),
        (tiny("vision_cfg", image_size=True), "vision_cfg.image_size in .*got True"),
        (tiny("vision_cfg", mlp_ratio=float("nan")), "vision_cfg.mlp_ratio in .*got nan"),
        (tiny("vision_cfg", surprise=1), "vision_cfg.surprise in .* there is no such option"),
        (tiny(vocab_size=-1), "vocab_size .* above 0"),
        (TINY | {"quick_gelu": {"a": 1}}, "quick_gelu"),
        ({n: TINY[n] for n in ("vision_cfg", "text_cfg")} | {"model_cfg": {}}, "vision_cfg"),
        ({"model_cfg": 3}, "the model config lacks embed_dim, vision_cfg"),
        (TINY | {"class_name": "os.system"}, "class_name in .* there is no such option"),
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


# --- tokenizers of data alone -------------------------------------------------------------------


def with_words(
    vit: Model, folder: Path, change_tree: Callable[[Tree], None] = lambda tree: None
) -> Path:
    """An export with a tokenizer of words, whose tokenizer.json is changed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"[PAD]": 0, "?": 1, "red": 2, "dog": 3}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    options = {"pad_token": "[PAD]", "unk_token": "?", "sep_token": "dog"}
    vit.save(folder)
    PreTrainedTokenizerFast(tokenizer_object=plain, **options).save_pretrained(folder)
    change(folder, {"hf_tokenizer_name": NAME, "tokenizer_kwargs": {"strip_sep_token": True}})
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    change_tree(tree)
    path.write_text(json.dumps(tree))
    return folder


def test_a_tokenizer_of_data_alone_still_loads(vit: Model, tmp_path: Path) -> None:
    """As in plain open_clip, in a plan, and again from an export of what was loaded."""
    folder, texts = with_words(vit, tmp_path / "a"), ["a red  dog", "dog red", ""]
    expected = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    assert expected[0, :3].tolist() == [1, 2, 0] and expected.shape[1] == 16
    loaded = load_towers(folder)
    assert torch.equal(loaded.tokenizer(texts), expected)
    loaded.save(tmp_path / "b")
    save_concat([tmp_path / "b"], "raw", tmp_path / "c")
    for name in "bc":
        again = load_model(tmp_path / name)
        assert torch.equal(again.tokenizer(texts), expected)
    assert load_shapes(str(folder)).tokenizer.context_length == 16


def panicking(tree: Tree) -> None:
    """Its template has a token that it does not describe, which the library takes for granted."""
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tree["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}
    }  # fmt: skip


def outside(tree: Tree) -> None:
    tree["model"]["vocab"]["?"] = 10**6


@pytest.mark.parametrize("change_tree", [panicking, outside])
def test_what_a_tokenizers_files_say_ends_in_one_line(
    vit: Model, tmp_path: Path, change_tree: Callable[[Tree], None]
) -> None:
    folder = with_words(vit, tmp_path / "model", change_tree)
    refused(lambda: load_towers(folder), f"the tokenizer in {folder}")


def test_an_id_outside_of_the_text_tower_is_told_when_a_text_has_it(
    vit: Model, tmp_path: Path
) -> None:
    def add(tree: Tree) -> None:
        tree["model"]["vocab"]["zebra"] = 10**6

    loaded = load_towers(with_words(vit, tmp_path / "model", add))
    assert loaded.tokenizer(["red ?"])[0, :3].tolist() == [2, 1, 0]
    message = "makes ids from 0 to 1,000,000, the text tower knows"
    refused(lambda: loaded.tokenizer(["a dog", "a zebra"]), message)
