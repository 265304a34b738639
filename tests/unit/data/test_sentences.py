"""Sentences of a paragraph: where it is cut, how often each is drawn, and by which keys."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.data.batches import TrainingBatches
from mclclip.data.groups import group_samples
from mclclip.data.options import SentencesConfig
from mclclip.data.samples import cut_sentences, draw_sentences
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.util.randomness import mix
from tests import tiny
from tests.batches import training_batches
from tests.unit.data.test_batches import png, text_of, tokenize
from tests.unit.data.test_samples import build_index

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


@pytest.mark.slow
def test_the_first_sentence_is_left_out_as_often_as_asked() -> None:
    """Its share is (1 - p) 2/5, that of each other one (1 - p) 2/5 + p 2/4."""
    found = counted(2, 0.3)
    for sentence in cut_sentences(PARAGRAPH):
        share = sum(n for text, n in found.items() if sentence in text) / len(KEYS)
        wanted = 0.7 * 2 / 5 + (0.0 if sentence == "A." else 0.3 * 2 / 4)
        assert abs(share - wanted) < 4.5 * (wanted * (1 - wanted) / len(KEYS)) ** 0.5
    found = counted("all", 0.3)
    assert found.keys() == {PARAGRAPH, "B! C? D. E."}
    assert abs(found[PARAGRAPH] / len(KEYS) - 0.7) < 4.5 * (0.21 / len(KEYS)) ** 0.5
    assert counted("all", 1.0).keys() == {"B! C? D. E."}
    assert counted(9, 1.0).keys() == {"B! C? D. E."}  # fewer than asked for: all of them


def test_one_sentence_stays_as_it_is() -> None:
    options = SentencesConfig(number=3, leave_out_first=1.0)
    text = "  a dog, two cats. and more "
    assert draw_sentences(text, 5, options) == text


def batches(folder: Path, **changes: Any) -> TrainingBatches:
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


def texts(made: TrainingBatches, steps: range) -> list[str]:
    return [text_of(row) for step in steps for row in made[step].text]


def test_draws_depend_on_sample_and_epoch_and_on_nothing_else(tmp_path: Path) -> None:
    whole = batches(tmp_path / "whole")
    epochs = [texts(whole, range(4 * epoch, 4 * epoch + 4)) for epoch in range(12)]
    again = batches(tmp_path / "again")
    assert texts(again, range(12, 16)) == epochs[3]  # without those before it
    halves = [batches(tmp_path / str(r), rank=r, world_size=2) for r in range(2)]
    steps = [range(step, step + 1) for step in range(4)]
    columns = [text for step in steps for half in halves for text in texts(half, step)]
    assert columns == epochs[0]
    drawn = Counter(text for epoch in epochs for text in epoch)
    others = {"Then b.", "Then c.", "Then d."}
    assert others < drawn.keys() <= others | {f"{n} is first." for n in range(32)}
    firsts = sum(n for text, n in drawn.items() if "first" in text) / (32 * 12)
    assert abs(firsts - 0.125) < 4.5 * (0.125 * 0.875 / 384) ** 0.5
    # Other seeds draw others, and the choice does not follow that of augmentation or caption.
    assert texts(batches(tmp_path / "other", seed=4), range(4)) != epochs[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["base.sentences={number: all}"], "which is the whole caption"),
        (["train.sentences={number: 0}"], "train.sentences"),
        (["train.sentences={leave_out_first: 1.5}"], "train.sentences.leave_out_first"),
    ],
)
def test_bad_options_are_one_line(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        tiny.make_config(tmp_path, tmp_path, *overrides)
    assert "\n" not in str(error.value)


def test_a_frozen_tower_that_runs_reads_sentences(tmp_path: Path) -> None:
    own = ("train.sentences={number: 2}", "train.lock.text=false", "train.cached_text=false")
    assert tiny.make_config(tmp_path, tmp_path, *own).train.sentences is not None
