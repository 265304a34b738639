"""What batches hold beside pictures and captions: digests of equal ones, and wrong captions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.data.batches import TrainingBatches
from mclclip.data.bytes import RawSample
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.extras import EditedCaptions, EqualityDigests, caption_digest, report_edits
from mclclip.data.groups import group_samples
from mclclip.data.options import DataConfig, Policy, SentencesConfig
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset, cut_sentences
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.models.clip import clean_caption
from mclclip.util.caption_rules import HardCaptions, all_edits
from tests.unit.data.test_batches import plain, png, tokenize
from tests.unit.data.test_samples import build_index, to_tensor

# A table with a row per caption: picture, caption. Some captions are equal after cleaning.
ROWS = [
    (0, "A dog."), (0, "two dogs"), (1, "a  DOG."), (1, "cat &amp; dog"), (2, "Cat & dog"),
    (2, "a bird"), (3, "a plane"), (3, "a plane"), (4, "a boat"), (5, "\u201ca boat\u201d"),
    (6, '"a boat"'), (7, "a tree"),
]  # fmt: skip
PICTURES = [picture for picture, _ in ROWS]
CLASSES = [0, 1, 0, 2, 2, 3, 4, 4, 5, 6, 6, 7]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return index_of(tmp_path_factory.mktemp("rows"), ROWS)


def index_of(folder: Path, rows: Sequence[tuple[int, str]]) -> SampleIndex:
    """Indexes shards of five samples each, of pictures (by their numbers) and captions."""
    samples = [PackedSample(f"{n:03d}", png(p), "png", [c]) for n, (p, c) in enumerate(rows)]
    paths = write_shards(samples, folder / "shards", 5)
    return build_index(folder / "index", paths, "json:captions", pixels=True)


def batches_of(
    index: SampleIndex,
    *,
    labels: Any = None,
    policy: Policy = "backoff",
    global_batch: int = 4,
    rank: int = 0,
    world_size: int = 1,
    sentences: SentencesConfig | None = None,
    **how: Any,
) -> TrainingBatches:
    labels = np.zeros(len(ROWS), np.int64) if labels is None else np.array(labels)
    grouped = group_samples(labels, (int(labels.max()) + 1,) if labels.any() else ())
    dataset = TarDataset(
        index,
        DataConfig(),
        plain,
        extras=[EqualityDigests(clean_caption)],
        **({"tokenizer": tokenize} | how),
    )
    plan = EpochPlan(grouped, global_batch, policy, "round_robin", 3, 1, 0)
    return TrainingBatches(dataset, plan, rank=rank, world_size=world_size, sentences=sentences)


def classes_of(digests: torch.Tensor) -> list[int]:
    """Each number replaced by the place where it is met first."""
    return [digests.tolist().index(number) for number in digests.tolist()]


@pytest.mark.parametrize(
    "texts",
    [
        ["A  photo of\n a DOG ", "a photo of a dog"],
        ["cat &amp;amp; dog", "cat &amp; dog", "cat & dog"],
        ["it&#39;s", "it\u2019s", "IT'S"],
        ["d\u00e9j\u00e0", "D\u00c9J\u00c0", "d\u00c3\u00a9j\u00c3\u00a0"],  # the last is mojibake
    ],
)
def test_captions_that_are_equal_after_cleaning_have_one_digest(texts: list[str]) -> None:
    assert len({caption_digest(text, clean_caption) for text in texts}) == 1
    others = [f"{text}." for text in texts] + ["", "a photo of a dog!"]
    assert caption_digest(texts[0], clean_caption) not in {
        caption_digest(text, clean_caption) for text in others
    }


def test_captions_are_told_apart_and_long_ones_by_their_beginning() -> None:
    digests = {caption_digest(f"caption {n}", clean_caption) for n in range(5000)}
    assert len(digests) == 5000 and min(digests) < -(2**62) and max(digests) > 2**62
    assert caption_digest("\ud800", clean_caption) != caption_digest("?", clean_caption)
    start = "ab " * 2048
    one, two, other = (caption_digest(t, clean_caption) for t in (start + "c", start + "d", "ab"))
    assert one == two != other


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_has_the_digests_of_its_captions_and_pictures(
    index: SampleIndex, world_size: int
) -> None:
    every = [
        [batches_of(index, rank=rank, world_size=world_size)[step] for rank in range(world_size)]
        for step in range(6)  # two epochs
    ]
    parts = [part for step in every for part in step]
    ids = torch.cat([part.sample_id for part in parts]).tolist()
    found = {n: torch.cat([part.extras[n] for part in parts]) for n in parts[0].extras}
    assert sorted(set(ids)) == list(range(len(ROWS))) and sorted(found) == [
        "caption_digest", "picture_digest",
    ]  # fmt: skip
    pictures = torch.tensor([ROWS[i][0] for i in ids])
    assert classes_of(found["caption_digest"]) == classes_of(
        torch.tensor([CLASSES[i] for i in ids])
    )
    assert classes_of(found["picture_digest"]) == classes_of(pictures)


def test_stored_text_embeddings_have_the_digests_of_tokens(
    index: SampleIndex, tmp_path: Path
) -> None:
    for number, shard in enumerate(index.shards):
        rows = np.random.default_rng(number).normal(size=(shard.stop - shard.start, 3))
        np.save(tmp_path / f"{number:05d}.npy", rows.astype(np.float16))
    of_tokens, of_features = batches_of(index), batches_of(
        index, tokenizer=None, text_features=StoredRows(tmp_path, index)
    )  # fmt: skip
    for step in range(3):
        one, two = of_tokens[step], of_features[step]
        assert one.text is not None and two.text_features is not None
        for name, digests in one.extras.items():
            assert torch.equal(two.extras[name], digests)


def test_rows_of_a_trunk_are_told_by_the_pictures_of_the_index(index: SampleIndex) -> None:
    """Whatever bytes stand for the picture."""
    extra = EqualityDigests(clean_caption, index)
    found = [
        extra(RawSample(n, bytes([n]), b""), [caption], 0, 0) for n, (_, caption) in enumerate(ROWS)
    ]
    pictures = torch.stack([each["picture_digest"] for each in found])
    assert classes_of(pictures) == classes_of(torch.tensor(PICTURES))
    captions = torch.stack([each["caption_digest"] for each in found])
    assert classes_of(captions) == classes_of(torch.tensor(CLASSES))
    bare = SampleIndex(index.directory, index.digest)
    bare.image_crc32 = None
    with pytest.raises(ValueError, match="has none: run 'mclclip index' with data.verify=full"):
        EqualityDigests(clean_caption, bare)


# --- wrong captions ----------------------------------------------------------------------------


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
    assert "33.3 % have a wrong one in the field 'wrong', a text in 1 of 3" in by_field
    assert "such as 'a blue mat' for 'a red mat'" in by_field


def test_what_fits_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    index, text = made(tmp_path / "a"), made(tmp_path / "b", "txt")
    with pytest.raises(ValueError, match="hard_captions: rules swap gave no wrong caption for any"):
        report_edits(HardCaptions(rules=["swap"]), index, DataConfig(), "train")
    for field, count in (("nowhere", 0), ("captions", 3)):
        with pytest.raises(
            ValueError,
            match=rf"field '{field}', a text in {count} of 3 samples, gave no wrong "
            r"caption .* a field with a string or a list of strings",
        ):
            report_edits(HardCaptions(field=field), index, DataConfig(), "base")
    for field in ("", "json:wrong"):
        with pytest.raises(ValueError, match=f"field is '{field}': wanted the name of the field"):
            HardCaptions(field=field)
    with pytest.raises(ValueError, match=r"captions=txt reads their .txt: set it to json:FIELD"):
        report_edits(HardCaptions(field="wrong"), text, DataConfig(), "train")
