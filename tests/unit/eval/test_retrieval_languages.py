"""Retrieval with captions in several languages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mclclip.eval import captions
from mclclip.eval.features import Extractor
from mclclip.eval.protocols.retrieval import evaluate


def xm3600(root: Path, draw: Any, captions: dict[str, list[list[str]]]) -> Path:
    """Crossmodal-3600's layout: a line per image, an object with captions per language."""
    lines = []
    for number in range(len(captions["en"])):
        draw(root / "images" / f"{number:04x}.jpg", number)
        said: dict[str, Any] = {name: {"caption": own[number]} for name, own in captions.items()}
        lines.append({"image/key": f"{number:04x}", "image/locale": "en"} | said)
    (root / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


@pytest.fixture
def languages(tmp_path: Path, draw: Any) -> Path:
    """Ten images; in English each caption names its image, in French every other names another."""
    english = [[f"a {n}", f"the {n}"] for n in range(10)]
    french = [[f"un {n if n % 2 else (n + 2) % 10}"] for n in range(10)]
    return xm3600(tmp_path, draw, {"en": english, "fr": french})


OPTIONS: dict[str, Any] = {"captions": "captions.jsonl", "images": "images"}


def test_languages_are_measured_alone_and_averaged(languages: Path, planted: Any) -> None:
    encoder = planted("perfect", 10)
    found = {
        f.metric: f for f in evaluate(Extractor(encoder), languages, **OPTIONS, languages="all")
    }
    for direction, of_french in (("image_to_text", 50.0), ("text_to_image", 50.0)):
        assert found[f"en/{direction}/R@1"].value == 100.0
        assert found[f"fr/{direction}/R@1"].value == of_french
        mean = found[f"{direction}/R@1"]
        assert mean.value == 75.0 and mean.protocol["of"] == ["en", "fr"]
        assert found[f"en/{direction}/R@1"].protocol["level"] == "detail"
        assert mean.protocol["level"] == "headline" and "language" not in mean.protocol
    mean = found["text_to_image/R@1"]
    assert mean.count == 30 and mean.protocol["num_captions"] == [20, 10]
    assert mean.outcomes is not None and len(set(mean.outcomes.units or [])) == 10
    assert sum(encoder.seen_batches) == 10  # images are encoded once for all languages


def test_one_language_is_what_its_table_alone_gives(
    languages: Path, planted: Any, tmp_path: Path
) -> None:
    encoder = planted("random", 10)
    rows = [["filepath", "title"]] + [
        [f"{n:04x}.jpg", f"un {n if n % 2 else (n + 2) % 10}"] for n in range(10)
    ]
    (tmp_path / "french.csv").write_text("\n".join(map(",".join, rows)))
    alone = evaluate(Extractor(encoder), languages, captions="french.csv", images="images")
    both = evaluate(Extractor(encoder), languages, **OPTIONS, languages=["fr"])
    assert {f"fr/{f.metric}": f.value for f in alone}.items() <= {
        f.metric: f.value for f in both
    }.items()
    assert {f.metric: f.value for f in alone}.items() <= {f.metric: f.value for f in both}.items()
    means = {f.metric: (f.ci_low, f.ci_high) for f in both}
    assert all(means[f.metric] == pytest.approx((f.ci_low, f.ci_high)) for f in alone)


def test_a_table_has_a_column_of_languages(languages: Path, planted: Any) -> None:
    rows = ["filepath,title,language", "0001.jpg,one 1,en", "0002.jpg,two 2,en", "0001.jpg,1,de"]
    (languages / "captions.csv").write_text("\n".join(rows))
    found = captions.read_languages(languages / "captions.csv", languages / "images")
    assert [*found] == ["de", "en"]
    assert [len(data.images) for data in found.values()] == [2, 2]  # candidates of both
    assert found["de"].captions == ["1"] and found["de"].caption_image.tolist() == [0]
    (languages / "captions.csv").write_text("\n".join([*rows, "0002.jpg,no one's,"]))
    with pytest.raises(ValueError, match="line 5 has no language"):
        captions.read_languages(languages / "captions.csv", languages / "images")


def test_mistakes_in_languages_are_one_line(languages: Path, planted: Any) -> None:
    extractor, path = Extractor(planted("perfect", 10)), languages / "captions.jsonl"
    with pytest.raises(ValueError, match="has no captions in 'de': its languages are en, fr"):
        evaluate(extractor, languages, **OPTIONS, languages=["de"])
    with pytest.raises(ValueError, match="10 captions in 'en', xm3600_first has"):
        evaluate(extractor, languages, **OPTIONS, languages="all", protocol="xm3600_first")
    with pytest.raises(ValueError, match="without split"):
        evaluate(extractor, languages, **OPTIONS, languages="all", split="test")
    lines = path.read_text()
    for line, message in (
        ('{"image/locale": "en"}', "line 11 has no image/key"),
        ('{"image/key": "a", "en": {"text": []}}', "line 11 has no list caption in 'en'"),
        ("{", "line 11 is not valid JSON"),
    ):
        path.write_text(f"{lines}{line}\n")
        with pytest.raises(ValueError, match=message):
            evaluate(extractor, languages, **OPTIONS, languages="all")
