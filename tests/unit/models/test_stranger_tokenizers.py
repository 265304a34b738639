"""Tokenizers of strangers end in one line, whatever tokens they make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model

pytest.importorskip("transformers")

Tree = dict[str, Any]
VOCABULARY = {"[PAD]": 0, "?": 1, "a": 2, "dog": 3}


def export(vit: Model, folder: Path, change: Callable[[Tree], None]) -> Path:
    """An export with a tokenizer of words, whose tokenizer.json is changed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    own = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="?")
    vit.save(folder)
    own.save_pretrained(folder)
    config = json.loads((folder / weights.CONFIG).read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "roberta-base"
    (folder / weights.CONFIG).write_text(json.dumps(config))
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    return folder


def panicking(tree: Tree) -> None:
    """Its template has a token that it does not describe, which the library takes for granted."""
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tree["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}
    }  # fmt: skip


def outside(tree: Tree) -> None:
    tree["model"]["vocab"]["?"] = 10**6


def before_all(tree: Tree) -> None:
    """More tokens at the begin of every text than the context has."""
    tokens = [f"<{number}>" for number in range(3000)]
    single = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    special = {token: {"id": token, "ids": [2], "tokens": [token]} for token in tokens}
    tree["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special
    }  # fmt: skip


@pytest.mark.parametrize("change", [panicking, outside, before_all])
def test_what_its_files_say_ends_in_one_line(
    vit: Model, tmp_path: Path, change: Callable[[Tree], None]
) -> None:
    folder = export(vit, tmp_path / "model", change)
    with pytest.raises(ValueError, match=f"the tokenizer in {folder}") as caught:
        load_towers(folder)
    assert "\n" not in str(caught.value)


def test_an_id_outside_of_the_text_tower_is_told_when_a_text_has_it(
    vit: Model, tmp_path: Path
) -> None:
    def change(tree: Tree) -> None:
        tree["model"]["vocab"]["zebra"] = 10**6

    loaded = load_towers(export(vit, tmp_path / "model", change))
    assert loaded.tokenizer(["a dog"])[0, :3].tolist() == [2, 3, 0]
    with pytest.raises(ValueError, match="makes ids from 0 to 1,000,000, the text tower knows"):
        loaded.tokenizer(["a dog", "a zebra"])


def test_a_plan_reads_it_too(vit: Model, tmp_path: Path) -> None:
    """Its models are made where tensors have no values."""
    folder = export(vit, tmp_path / "model", lambda tree: None)
    shapes = load_shapes(str(folder))
    assert isinstance(shapes, Model) and shapes.tokenizer.context_length == 16
