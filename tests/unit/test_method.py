"""What a run refuses before it writes anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mclclip import config, method
from mclclip.eval import results
from mclclip.plan import memory
from mclclip.ranks.process_group import SINGLE
from tests import tiny

CLIP = {"kind": "info_nce"}
VIEWS = {"kind": "nt_xent"}
PAIRS = {"kind": "retrieval", "path": "{folder}", "options": {"captions": "."}}


def tree(run_dir: Path, **changes: Any) -> dict[str, Any]:
    vision = {"backbone": "mclclip:small_conv", "image_size": 16}
    return {
        "run_dir": str(run_dir),
        "num_stages": 1,
        "model": {"name": {"vision_cfg": vision}},
        "base": {"objective": VIEWS},
        "train": {"objective": VIEWS},
    } | changes


def test_a_benchmark_that_needs_faiss_says_so_before_stage_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    suite = {"near": {"kind": "knn", "path": "."}}
    with pytest.raises(ValueError, match=r"benchmark 'near': .* needs .*'mclclip\[search\]'"):
        method.run(config.from_tree(tree(tmp_path / "run", eval={"suite": suite})), SINGLE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes", [{"train": {"objective": CLIP}}, {"eval": {"suite": {"pairs": PAIRS}}}]
)
def test_a_tokenizer_that_cannot_be_had_is_told_before_anything_is_done(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made = tiny.make_data(tmp_path / "data", 8)
    text = tiny.MODEL["text_cfg"] | {"hf_tokenizer_name": "timm/ViT-B-16-SigLIP"}
    model = tiny.MODEL | {"text_cfg": text}
    named = json.loads(json.dumps(changes).replace("{folder}", str(made / "shards")))
    whole = tree(tmp_path / "run", model={"name": model}) | named
    with pytest.raises(FileNotFoundError, match="tokenizer files of 'timm/ViT-B-16-SigLIP' are ne"):
        method.run(config.from_tree(whole), SINGLE)
    assert not (tmp_path / "run").exists()


def test_a_model_of_transformers_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    whole = tree(tmp_path / "run", model={"name": "hf:me/clip"}, train={"objective": CLIP})
    with pytest.raises(FileNotFoundError, match="'me/clip'"):
        method.run(config.from_tree(whole), SINGLE)
    assert not (tmp_path / "run").exists()


FROZEN = {"match": "*", "lr_scale": 0}
OF_OBJECTIVE = {"match": "objective.*", "lr_scale": 2.0}


CLASSES = {"kind": "mlcd", "labels_per_sample": 1}
MATCHES, TRAINS = "parameters.match='objective.*' matches no parameter", "no parameter is trainable"
REFUSED = [
    ("train", VIEWS, OF_OBJECTIVE, MATCHES), ("base", VIEWS, FROZEN, TRAINS),
    ("train", CLASSES, FROZEN, TRAINS),
]  # fmt: skip


@pytest.mark.parametrize(("training", "objective", "entry", "message"), REFUSED)
def test_parameters_that_match_or_train_nothing_are_refused_first(
    tmp_path: Path, training: str, objective: Any, entry: Any, message: str
) -> None:
    changes = {training: {"objective": objective, "parameters": [entry]}}
    with pytest.raises(ValueError) as caught:
        method.run(config.from_tree(tree(tmp_path / "run", **changes)), SINGLE)
    assert str(caught.value).startswith(f"{training}: {message}")
    assert not (tmp_path / "run").exists()
    moco = {"train": {"objective": {"kind": "moco"}, "parameters": [OF_OBJECTIVE]}}
    memory.check_parameters(config.from_tree(tree(tmp_path / "run", **moco)), "train")


def test_a_checkpoint_is_not_chosen_by_training_images(tmp_path: Path) -> None:
    """What stage 0's row tells is refused before the next stage is trained."""
    changes: dict[str, Any] = {
        "base": None,
        "train": {"objective": VIEWS, "evaluate": {"every": 1, "metric": "near/accuracy"}},
        "eval": {"suite": {"near": {"kind": "knn", "path": str(tmp_path)}}},
    }
    protocol = {"training_images": 3, "judged_images": 8}
    row = results.Result("stage_0", "near", "accuracy", 25.0, 4, 5.0, 70.0, protocol)
    results.write(tmp_path / "run" / "results.jsonl", [row])
    with pytest.raises(ValueError, match=r"'near': .* 3 of its 8 images, and the checkpoint"):
        method.evaluations(config.from_tree(tree(tmp_path / "run", **changes)), SINGLE, 1, "mcl")
    assert not (tmp_path / "run" / "stage_1").exists()
