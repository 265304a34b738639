"""The MMVP-VLM evaluator on planted encoders and on folders that are not as they should be."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mclclip.eval.features import Extractor
from mclclip.eval.protocols import mmvp
from mclclip.eval.protocols.mmvp import read_pairs

Row = tuple[int | str, str, str]


def write_questions(root: Path, rows: Sequence[Row]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "Questions.csv", "w", newline="") as file:
        csv.writer(file).writerows([("Question ID", "Type", "Statement"), *rows])


@pytest.fixture
def make_folder(tmp_path: Path, draw: Callable[[Path, int], None]) -> Callable[..., Path]:
    """``make_folder({"Color": 3, ...})``: that many pairs per Type, id n on image n."""

    def make(pairs: dict[str, int], images: str = "MLLM_VLM Images", suffix: str = ".jpg") -> Path:
        root, rows, number = tmp_path / "MMVP_VLM", [], 0
        for kind, count in pairs.items():
            for _ in range(2 * count):
                number += 1
                rows.append((number, kind, f"a thing, numbered {number}"))
                draw(root / images / kind / f"{number}{suffix}", number)
        write_questions(root, rows)
        return root

    return make


def by_metric(figures: Sequence[Any]) -> dict[str, float]:
    return {figure.metric: figure.value for figure in figures}


def test_average_is_over_types_and_pooled_over_pairs(make_folder: Any, planted: Any) -> None:
    root = make_folder({"Color": 1, "State": 3})
    encoder = planted("perfect", 9)
    encoder.text_table[1] = encoder.image_table[2]  # spoils the only pair of Color
    values = by_metric(mmvp.evaluate(Extractor(encoder), root))
    assert values == {"Color": 0.0, "State": 100.0, "average": 50.0, "pooled": 75.0}
    encoder.seen_texts.clear()
    (first, *_) = mmvp.evaluate(Extractor(encoder), root, prompt="see: ")
    assert first.count == 1 and encoder.seen_texts[0] == "see: a thing, numbered 1"
    settings = {"prompt": "see: ", "direction": "statement_to_image", "right_decisions": 7}
    assert settings.items() <= first.protocol.items()


def test_near_ties_are_counted(make_folder: Any, planted: Any) -> None:
    encoder = planted("perfect", 5)
    encoder.text_table[1, 2] = 1 - 2e-4  # statement 1 nearly prefers image 2; not normalised again
    root = make_folder({"Color": 2})
    figures = mmvp.evaluate(Extractor(encoder), root)
    assert by_metric(figures)["pooled"] == 100.0
    assert figures[0].protocol["near_ties"] == 1
    assert figures[0].protocol["tied_decisions"] == 0
    equal = mmvp.evaluate(Extractor(planted("constant", 5)), root, directions=mmvp.DIRECTIONS)
    protocol = equal[0].protocol
    assert protocol["tied_decisions"] == protocol["near_ties"] == protocol["decisions"] == 4
    assert protocol["ties"] == "against the model"


def test_accepted_layouts(make_folder: Any, planted: Any) -> None:
    """Folders with underscores, suffixes in capitals, zeros before numbers, a byte order mark."""
    root = make_folder({"Camera Perspective": 2}, images="MLLM_VLM_Images", suffix=".JPEG")
    images = root / "MLLM_VLM_Images"
    (images / "Camera Perspective").rename(images / "Camera_Perspective")
    (images / "Camera_Perspective" / "2.JPEG").rename(images / "Camera_Perspective" / "002.JPEG")
    text = (root / "Questions.csv").read_text()
    (root / "Questions.csv").write_text(text, encoding="utf-8-sig")
    assert by_metric(mmvp.evaluate(Extractor(planted("perfect", 5)), root))["pooled"] == 100.0


def test_a_number_of_its_own_goes_before_one_with_zeros(make_folder: Any, planted: Any) -> None:
    root = make_folder({"Color": 1})
    images = root / "MLLM_VLM Images" / "Color"
    (images / "01.jpg").write_bytes((images / "2.jpg").read_bytes())
    assert by_metric(mmvp.evaluate(Extractor(planted("perfect", 3)), root))["pooled"] == 100.0


def test_statements_may_hold_commas_quotes_and_line_breaks(make_folder: Any) -> None:
    root = make_folder({"Color": 1})
    write_questions(root, [(1, "Color", 'one, "two"\nthree'), (2, "Color", "plain")])
    (pair,) = read_pairs(root)
    assert pair.texts == ('one, "two"\nthree', "plain")
    assert pair.name == "1-2" and pair.kind == "Color"
    assert [path.name for path in pair.images] == ["1.jpg", "2.jpg"]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "0 questions: expected an even number"),
        ([(1, "Color", "a"), (2, "State", "b")], "Types are 'Color' and 'State'"),
        ([(2, "Color", "a"), (1, "Color", "b")], "an odd ID"),
        ([(1, "Color", "a"), (2, "Color", "b")] * 2, "Question ID 1 more than once"),
        ([("x", "Color", "a"), (2, "Color", "b")], "line 2: got Question ID 'x'"),
        (
            [(1, "Color", ""), (2, "Color", "b")],
            "1 of 2 rows have no Statement, .*Questions.csv line 2",
        ),
        ([(1, "", "a"), (2, "Color", "b")], "line 2: got Question ID '1'"),
    ],
)
def test_wrong_questions_get_one_clear_line(
    make_folder: Any, rows: list[Row], message: str
) -> None:
    root = make_folder({"Color": 2, "State": 1})
    write_questions(root, rows)
    with pytest.raises(ValueError, match=message) as caught:
        read_pairs(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["../../private", "Color/../../../private"])
def test_a_type_does_not_lead_out_of_the_folder(
    make_folder: Any, draw: Callable[[Path, int], None], tmp_path: Path, kind: str
) -> None:
    root = make_folder({"Color": 1})
    for folder in (tmp_path / "private", root / "private"):
        for number in (1, 2):
            draw(folder / f"{number}.jpg", number)
    for name in (kind, str(tmp_path / "private")):
        write_questions(root, [(1, name, "a"), (2, name, "b")])
        with pytest.raises(ValueError, match="Questions.csv names .*no file below"):
            read_pairs(root)


def test_links_in_the_hubs_cache_are_followed(make_folder: Any, tmp_path: Path) -> None:
    """There a snapshot consists of links to the blobs of its data set."""
    blobs, root = tmp_path / "blobs", tmp_path / "snapshots" / "0123" / "MMVP_VLM"
    blobs.mkdir()
    for number, path in enumerate(sorted(make_folder({"Color": 1}).rglob("*.*"))):
        link = root / path.relative_to(tmp_path / "MMVP_VLM")
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(blobs / str(number))
    assert len(read_pairs(root)) == 1
