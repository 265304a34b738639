"""Which part of a caption is drawn: fields by their shares, and sentences of a paragraph."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.config import Config
from mclclip.data.batches import TrainingBatches
from mclclip.data.groups import group_samples
from mclclip.data.options import SentencesConfig
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import cut_sentences, draw_sentences
from mclclip.data.shard_scan import (
    PER_FIELD,
    captions_by_field,
    captions_text,
    parse_captions,
)
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths, read_manifest
from mclclip.util.randomness import mix
from mclclip.util.remake import Remake
from mclclip.verbs import index
from tests import tiny
from tests.batches import training_batches
from tests.unit.data.test_batches import png, text_of, tokenize
from tests.unit.data.test_samples import build_index

FIELDS = {"json:long": 0.3, "json:short": 0.6, "json:tags": 0.1}
EPOCHS, NUM_SAMPLES = 400, 16


def fields_of(number: int) -> dict[str, Any]:
    """Of every sample a long caption, of most three short ones and some tags; one has none."""
    facts: dict[str, Any] = {"long": f"{number} long"}
    if number % 4:
        facts["short"] = [f"{number} short {k}" for k in range(3)]
    if number % 2:
        facts["tags"] = [f"{number} tags", " ", 5]
    return {} if number == 7 else facts


def settled(folder: Path, captions: Any = FIELDS) -> Config:
    samples = [
        PackedSample(f"{n:02d}", png(n), "png", [], fields_of(n)) for n in range(NUM_SAMPLES)
    ]
    if not (folder / "shards").exists():
        write_shards(samples, folder / "shards", 9)
    tree = tiny.tree(folder / "run", folder)
    tree["data"]["sources"]["patterns"]["captions"] = captions
    return tiny.config.from_tree(tree, ())


def indexed(config: Config, force: Remake = Remake.NOTHING) -> SampleIndex:
    index.run(config, SINGLE, force=force)
    return SampleIndex.open(RunPaths.of(config).index)


def batches(found: SampleIndex, **changes: Any) -> TrainingBatches:
    options: dict[str, Any] = dict(
        index=found, grouped=group_samples(np.zeros(NUM_SAMPLES, np.int64), ()),
        transform=lambda image: tokenize(["x"])[0], global_batch=4, seed=3,
    )  # fmt: skip
    return training_batches(**(options | changes))


def test_a_field_is_drawn_as_often_as_asked_among_those_that_are_there(tmp_path: Path) -> None:
    made = batches(indexed(settled(tmp_path)), tokenizer=tokenize)
    ids = np.arange(NUM_SAMPLES)
    drawn = np.stack([made.caption_numbers(ids, epoch) for epoch in range(EPOCHS)])
    for number in set(range(NUM_SAMPLES)) - {7}:
        facts = fields_of(number)
        texts = captions_by_field(json.dumps(facts).encode(), captions_text(FIELDS))
        whole = sum(share for share, own in zip(FIELDS.values(), texts, strict=True) if own)
        counts = np.bincount(drawn[:, number], minlength=sum(map(len, texts)))
        assert len(counts) == sum(map(len, texts))
        place = 0
        for share, own in zip(FIELDS.values(), texts, strict=True):
            for _ in own:
                wanted = share / whole / len(own)
                bound = 4.5 * (wanted * (1 - wanted) / EPOCHS) ** 0.5
                assert abs(counts[place] / EPOCHS - wanted) <= bound, (number, place)
                place += 1


def test_tokens_and_stored_features_are_of_the_same_caption(tmp_path: Path) -> None:
    found = indexed(settled(tmp_path))
    (tmp_path / "texts").mkdir()
    rows = 1 + np.arange(found.num_captions.sum(), dtype=np.float32)[:, None]
    for number, shard in enumerate(found.shards):
        own = slice(found.caption_start[shard.start], found.caption_start[shard.stop])
        np.save(tmp_path / "texts" / f"{number:05d}.npy", rows[own])
    tokens = batches(found, tokenizer=tokenize)
    stored = batches(found, text_features=StoredRows(tmp_path / "texts", found))
    text = captions_text(FIELDS)
    captions = [
        caption
        for number in range(NUM_SAMPLES)
        for caption in parse_captions(json.dumps(fields_of(number)).encode(), text)
    ]
    seen = set()
    for step in range(24):
        a, b = tokens[step], stored[step]
        texts = [text_of(row) for row in a.text]
        assert texts == [captions[int(row) - 1] for row in b.text_features[:, 0]]
        assert all(int(t.split()[0]) == n for t, n in zip(texts, a.sample_id.tolist(), strict=True))
        seen |= {t.split()[1] for t in texts}
    assert seen == {"long", "short", "tags"}


def test_missing_fields_are_counted_and_digests_follow(tmp_path: Path) -> None:
    config = settled(tmp_path)
    first = indexed(config)
    manifest = read_manifest(RunPaths.of(config).index, "index")
    counts = {name: entry["count"] for name, entry in manifest.counts["findings"].items()}
    assert counts == {"no_caption": 1, "no_field:short": 4, "no_field:tags": 8}
    assert manifest.counts["captions"] == int(first.num_captions.sum()) == 15 + 3 * 11 + 7
    assert "attributes" not in manifest.counts
    with pytest.raises(ValueError, match="it has none: name it"):
        first.attribute("colour")
    digests = [first.digest]
    for captions in ({**FIELDS, "json:short": 0.5, "json:tags": 0.2}, "json:long"):
        other = settled(tmp_path, captions)
        with pytest.raises(ValueError, match="was indexed with captions="):
            indexed(other)
        digests.append(indexed(other, force=Remake.ALL).digest)
    assert len(set(digests)) == 3
    assert indexed(settled(tmp_path, {"json:long": 1.0})).digest == digests[-1]  # one is no draw


def test_a_single_field_draws_what_it_drew(tmp_path: Path) -> None:
    """Beside a source of several fields too."""
    single = settled(tmp_path, "json:short")
    before = batches(indexed(single)).caption_numbers(np.arange(NUM_SAMPLES), 5)
    tree = tiny.tree(tmp_path / "both", tmp_path)
    source = {"shards": f"{tmp_path}/shards/*.tar"}
    tree["data"]["sources"] = {
        "patterns": source | {"captions": "json:short"},
        "second": {"shards": f"{tmp_path}/copies/*.tar", "captions": FIELDS},
    }
    samples = [PackedSample(f"{n:02d}", png(n), "png", [], fields_of(n)) for n in range(9)]
    write_shards(samples, tmp_path / "copies", 9)
    both = indexed(tiny.config.from_tree(tree, ()))
    made = batches(both, grouped=group_samples(np.zeros(len(both), np.int64), ()))
    np.testing.assert_array_equal(made.caption_numbers(np.arange(NUM_SAMPLES), 5), before)
    codes, values = both.attribute(PER_FIELD)
    assert (codes[:NUM_SAMPLES] == -1).all() and "1x0.3 3x0.6 1x0.1" in values


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ({}, "captions is '{}', expected 'json:FIELD' for every field"),
        ({"a": 0.5}, "captions is 'a', expected 'txt', 'lines' or 'json:FIELD'"),
        ({"json:a": 0.0, "json:b": 1.0}, "greater than 0"),
        ({"json:a": 0.3, "json:b": 0.9}, "the probabilities sum to 1.2, wanted 1"),
        ({"json:a": float("inf"), "json:b": 1.0}, "finite"),
        (["json:a"], "data.sources.patterns.captions"),
        ("csv", "captions is 'csv', expected 'txt', 'lines' or 'json:FIELD'"),
    ],
)
def test_what_names_no_field_is_one_line(captions: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        indexed(settled(tmp_path, captions))
    assert "data.sources.patterns.captions" in str(error.value) and "\n" not in str(error.value)


# --- sentences of a paragraph ------------------------------------------------------------------


PARAGRAPH = "A. B! C? D. E."
KEYS = [int(key) for key in np.asarray(mix(7, np.arange(4_000)))]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("A dog runs. It is red! Why? Nobody knows", ["A dog runs.", "It is red!", "Why?",
                                                      "Nobody knows"]),
        ("It costs 3.50 dollars. the rest is small", ["It costs 3.50 dollars. the rest is small"]),
        ("One...  \n Two", ["One...", "Two"]),
        ("Un café. Évidemment. 2 more", ["Un café.", "Évidemment. 2 more"]),
        ("End. ", ["End."]),
        ("", [""]),
    ],
)  # fmt: skip
def test_a_text_is_cut_before_capitals(text: str, sentences: list[str]) -> None:
    assert cut_sentences(text) == sentences


def counted(number: Any, leave_out: float) -> Counter[str]:
    options = SentencesConfig(number=number, leave_out_first=leave_out)
    return Counter(draw_sentences(PARAGRAPH, key, options) for key in KEYS)


def test_all_sets_are_drawn_equally_often_and_in_order() -> None:
    found = counted(2, 0.0)
    pairs = [" ".join(pair) for pair in itertools.combinations(cut_sentences(PARAGRAPH), 2)]
    assert found.keys() == set(pairs)
    wanted = len(KEYS) / len(pairs)
    assert all(abs(found[pair] - wanted) < 4.5 * wanted**0.5 for pair in pairs)


def test_one_sentence_stays_as_it_is() -> None:
    options = SentencesConfig(number=3, leave_out_first=1.0)
    text = "  a dog, two cats. and more "
    assert draw_sentences(text, 5, options) == text


def sentence_batches(folder: Path, **changes: Any) -> TrainingBatches:
    samples = [
        PackedSample(f"{n}", png(n), "png", [f"{n} is first. Then b. Then c. Then d."])
        for n in range(32)
    ]
    paths = write_shards(samples, folder / "shards", 16)
    index = build_index(folder / "index", paths, "json:captions")
    options: dict[str, Any] = dict(
        index=index, grouped=group_samples(np.zeros(32, np.int64), ()),
        transform=lambda image: tokenize(["x"])[0], tokenizer=tokenize, global_batch=8,
        policy="backoff", order="proportional", seed=3, stage=1,
        sentences=SentencesConfig(number=1, leave_out_first=0.5),
    )  # fmt: skip
    return training_batches(**(options | changes))


def sentence_texts(made: TrainingBatches, steps: range) -> list[str]:
    return [text_of(row) for step in steps for row in made[step].text]


def test_draws_depend_on_sample_and_epoch_and_on_nothing_else(tmp_path: Path) -> None:
    whole = sentence_batches(tmp_path / "whole")
    epochs = [sentence_texts(whole, range(4 * epoch, 4 * epoch + 4)) for epoch in range(6)]
    again = sentence_batches(tmp_path / "again")
    assert sentence_texts(again, range(12, 16)) == epochs[3]  # without those before it
    halves = [sentence_batches(tmp_path / str(r), rank=r, world_size=2) for r in range(2)]
    steps = [range(step, step + 1) for step in range(4)]
    columns = [text for step in steps for half in halves for text in sentence_texts(half, step)]
    assert columns == epochs[0]
    drawn = Counter(text for epoch in epochs for text in epoch)
    others = {"Then b.", "Then c.", "Then d."}
    assert others < drawn.keys() <= others | {f"{n} is first." for n in range(32)}
    firsts = sum(n for text, n in drawn.items() if "first" in text) / (32 * 6)
    assert abs(firsts - 0.125) < 4.5 * (0.125 * 0.875 / 192) ** 0.5
    # Other seeds draw others, and the choice does not follow that of augmentation or caption.
    assert sentence_texts(sentence_batches(tmp_path / "other", seed=4), range(4)) != epochs[0]


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    for override, message in (
        ("base.sentences={number: all}", "which is the whole caption"),
        ("train.sentences={leave_out_first: 1.5}", "train.sentences.leave_out_first"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            tiny.make_config(tmp_path, tmp_path, override)
        assert "\n" not in str(error.value)
