"""Tokenizers of strangers end in one line, whatever their files say, and harm only a process of
their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mclclip.models import tokenizer, weights
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


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_towers(folder)
    assert "\n" not in str(caught.value) and f"the tokenizer in {folder}" in str(caught.value)


def doubling(tree: Tree) -> None:
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
    tree["normalizer"] = {"type": "Sequence", "normalizers": steps}


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (doubling, "may make a text 1.1e\\+12 times as long"),
        (panicking, "cannot be used \\(PanicException"),
        (outside, "makes ids from 0 to 1,000,000, the text tower knows those below"),
        (before_all, "it makes 4,... ids of a text, wanted 16"),
    ],
)
def test_what_its_files_say_ends_in_one_line(
    vit: Model, tmp_path: Path, change: Callable[[Tree], None], message: str
) -> None:
    refused(export(vit, tmp_path / "model", change), message)


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


def test_equal_files_are_tried_once(
    vit: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export(vit, tmp_path / "first", lambda tree: None)
    load_towers(first)
    monkeypatch.setattr(sys, "executable", "/none")
    load_towers(export(vit, tmp_path / "second", lambda tree: None))
    (first / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="/none"):
        load_towers(first)


def test_a_process_that_crashes_or_never_ends_is_one_line(
    vit: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(vit, tmp_path / "model", lambda tree: None)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(tokenizer, "_proven", set())
    monkeypatch.setattr(sys, "executable", str(script))
    refused(folder, "was ended by SIGABRT; it may take 4 GiB and 60 s")
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(tokenizer, "_WALL_S", 0.1)
    refused(folder, "it took more than 0.1 s")


BOUNDED = """
import sys
from mclclip.models import tokenizer as proof
proof._MEMORY_BYTES, proof._MOST_GROWTH = 320 << 20, float("inf")
sys.exit(proof.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("change", [lambda tree: None, doubling])
def test_memory_is_bounded_in_the_process_that_tries(
    vit: Model, tmp_path: Path, change: Callable[[Tree], None]
) -> None:
    folder = export(vit, tmp_path / "model", change)
    words = [sys.executable, "-c", BOUNDED, str(folder), "16", "AutoTokenizer"]
    ended = subprocess.run(words, capture_output=True, timeout=60, check=False)
    memory = b"memory" in ended.stderr or b"MemoryError" in ended.stdout
    assert (ended.returncode != 0) == memory == (change is doubling), ended


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([("String", " ", "\u2581")], 1.0),  # Gemma's
        ([("Regex", r"\s+", " "), ("String", "``", '"'), ("Regex", "[!]", "")], 2.0),
        ([("String", "ab", "abab"), ("String", "", "xy")], 6.0),
    ],
)
def test_how_much_longer_a_text_may_become(
    steps: list[tuple[str, str, str]], wanted: float
) -> None:
    parts = [{"type": "Replace", "pattern": {k: p}, "content": c} for k, p, c in steps]
    inner = {"type": "Sequence", "normalizers": parts}
    whole = {"type": "Sequence", "normalizers": [{"type": "NFC"}, inner]}
    assert tokenizer.growth(whole) == wanted and tokenizer.growth(None) == 1.0
    assert tokenizer.growth({"type": "Prepend", "prepend": "x" * 9}) == 10.0


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"cannot be used \(merges.txt is no file\)"):
        tokenizer.prove(tmp_path, 16)
