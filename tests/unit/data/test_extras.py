"""Wrong captions of samples: drawn by key from rules or a field, and surveyed before training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.data.bytes import RawSample
from mclclip.data.extras import EditedCaptions, report_edits
from mclclip.data.options import DataConfig
from mclclip.data.samples import Sample, TarDataset, cut_sentences
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.util.caption_rules import HardCaptions, all_edits
from tests.unit.data.test_samples import build_index, png, to_tensor

CAPTIONS = ["Two dogs run .", "A red hat", "nothing"]


def tokenizer(texts: list[str]) -> Tensor:
    """The bytes of a text."""
    return torch.tensor([list(text.encode().ljust(40)[:40]) for text in texts])


def read(tokens: Tensor) -> list[str]:
    return [bytes(row.tolist()).decode().strip() for row in tokens]


def test_edits_are_drawn_by_key_and_the_others_are_marked() -> None:
    raw, seen = RawSample(0, b"", b""), set()
    extra = EditedCaptions(HardCaptions(rules=["number", "colour"], per_caption=4), tokenizer)
    for key in (*range(30), 2**64 - 1):
        made = extra(raw, CAPTIONS, 0, key)
        texts = read(made["edited_text"])
        assert {*texts} <= {edit.text for edit in all_edits("number", CAPTIONS[0])} | {CAPTIONS[0]}
        assert made["has_edit"].tolist() == [text != CAPTIONS[0] for text in texts]
        assert texts == read(extra(raw, CAPTIONS, 0, key)["edited_text"])
        seen.add(texts[0])
    assert len(seen) == 3
    none = extra(raw, CAPTIONS, 2, 5)
    assert not none["has_edit"].any() and read(none["edited_text"]) == ["nothing"] * 4


def test_an_edit_is_checked_against_the_sentences_that_were_left_out(tmp_path: Path) -> None:
    """An edit of "three dogs" is "two dogs", which another sentence of the caption says."""
    caption = "Three dogs run. A man sees two dogs. He laughs."
    samples = [PackedSample("0", png(0), "png", [caption])]
    index = build_index(
        tmp_path / "index", write_shards(samples, tmp_path / "s", 1), "json:captions"
    )
    extra = EditedCaptions(HardCaptions(rules=["number"], per_caption=16), tokenizer)
    dataset = TarDataset(index, DataConfig(), to_tensor, tokenizer=tokenizer, extras=[extra])
    [raw] = dataset.read_many([0])
    first = dataset.decode(raw, part_of=lambda text: cut_sentences(text)[0])
    assert isinstance(first, Sample)
    edits = first.extras["edited_text"][first.extras["has_edit"]]
    found = {*read(edits)}
    assert found and not any("wo dogs" in text for text in found)


def test_a_field_has_them_but_not_those_that_are_captions() -> None:
    extra = EditedCaptions(HardCaptions(field="wrong", per_caption=2), tokenizer)

    def texts(member: str, key: int = 0) -> list[str]:
        made = extra(RawSample(0, b"", member.encode()), CAPTIONS, 1, key)
        return read(made["edited_text"][made["has_edit"]])

    assert texts('{"wrong": "A blue hat"}') == ["A blue hat"]
    assert texts('{"wrong": ["a", "TWO dogs run", "b", "c", "a"]}') == ["a", "b"]
    assert texts('{"wrong": ["a", "b", "c"]}', 2) == ["c", "a"]
    for member in ('{"right": "x"}', '{"wrong": 3}', "{", "[]", "", '{"wrong": "a red hat."}'):
        assert texts(member) == []


def test_a_dataset_adds_them(tmp_path: Path) -> None:
    index = made(tmp_path)
    extra = EditedCaptions(HardCaptions(rules=["colour"]), tokenizer)
    dataset = TarDataset(index, DataConfig(), to_tensor, tokenizer=tokenizer, extras=[extra])
    sample = dataset[0]
    assert isinstance(sample, Sample) and sample.text is not None
    assert read(sample.text[None]) == ["a red mat"] and sample.extras["has_edit"].tolist() == [True]
    (edit,) = read(sample.extras["edited_text"])
    assert edit in {e.text for e in all_edits("colour", "a red mat")}


def made(folder: Path, captions: str = "json:captions") -> Any:
    samples = [
        PackedSample(f"s{n}", png(n), "png", [text], {"wrong": wrong} if wrong else {})
        for n, (text, wrong) in enumerate([("a red mat", "a blue mat"), ("a mat", ""), ("x", "")])
    ]
    paths = write_shards(samples, folder / "shards", 10)
    return build_index(folder / "index", [Path(path) for path in paths], captions)


def test_the_shares_are_shown_before_a_training(tmp_path: Path, caplog: Any) -> None:
    index = made(tmp_path)
    with caplog.at_level(logging.INFO, "mclclip"):
        report_edits(HardCaptions(rules=["colour", "size"]), index, DataConfig(), "train")
        report_edits(HardCaptions(field="wrong"), index, DataConfig(), "train")
    by_rules, by_field = caplog.messages
    assert "of 3 captions, of 3 samples that were looked at, 33.3 %" in by_rules
    assert "(colour 33.3%, size 0.0%)" in by_rules and "for 'a red mat'" in by_rules
    assert "33.3 % have a wrong one in the field 'wrong', in which 1 of 3 samples have" in by_field
    assert "such as 'a blue mat' for 'a red mat'" in by_field


def test_what_fits_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    index, text = made(tmp_path / "a"), made(tmp_path / "b", "txt")
    with pytest.raises(ValueError, match="hard_captions: rules swap gave no wrong caption for any"):
        report_edits(HardCaptions(rules=["swap"]), index, DataConfig(), "train")
    for field, count in (("nowhere", 0), ("captions", 3)):
        with pytest.raises(
            ValueError,
            match=rf"field '{field}', in which {count} of 3 samples have a text, gave no wrong "
            r"caption .* wanted the name of a field .* a string or a list of strings",
        ):
            report_edits(HardCaptions(field=field), index, DataConfig(), "base")
    for field in ("", "json:wrong"):
        with pytest.raises(ValueError, match=f"field is '{field}': wanted the name of the field"):
            HardCaptions(field=field)
    with pytest.raises(ValueError, match=r"captions=txt reads their .txt: set it to json:FIELD"):
        report_edits(HardCaptions(field="wrong"), text, DataConfig(), "train")
