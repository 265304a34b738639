"""Names that are spelt otherwise than on disk: each cause is said."""

import unicodedata
from pathlib import Path

import pytest

from mclclip.data.findings import Findings
from mclclip.data.picture_folders import explain_missing, folder_format
from mclclip.util.files import Roots

NFC, NFD = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (f"sub/caf{NFC}.jpg", "Unicode form"),
        (f"file://{{}}/sub/caf{NFD}.jpg", "file://"),
        (f"file:{{}}/sub/caf{NFD}.jpg", "file://"),
        (f"sub/caf{NFD}", ".jpg"),
        (f"SUB/caf{NFC}.JPG", "capital letters"),
    ],
)
def test_the_cause_is_said(tmp_path: Path, name: str, cause: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / f"caf{NFD}.jpg").touch()
    explained = explain_missing(tmp_path, name.format(tmp_path))
    assert explained is not None and cause in explained


def test_a_link_to_nothing_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to(tmp_path / "gone.jpg")
    explained = explain_missing(tmp_path, "a.jpg")
    assert explained is not None and "a link to nothing" in explained
    assert "gone.jpg" in explained and "Unicode" not in explained


def test_nothing_is_said_of_a_name_that_nothing_is_near(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    for name in ("a.jpg", "b.jpg", "sub/a.jpg", "", "..", "a.jpg/b"):
        assert explain_missing(tmp_path, name) is None


@pytest.mark.parametrize(("text", "warns"), [("0 0.5 0.5 0.1 0.1", True), ("2 dogs", False)])
def test_texts_of_numbers_alone_may_be_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, warns: bool
) -> None:
    for number in range(20):
        (tmp_path / f"{number}.jpg").touch()
        (tmp_path / f"{number}.txt").write_text(text)
    folder_format(tmp_path, Roots(tmp_path))
    assert any(record.levelname == "WARNING" for record in caplog.records) == warns


def test_pictures_that_share_a_text_are_counted(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "b.jpg", "b.png"):
        (tmp_path / name).touch()
    for name in ("a.txt", "b.jpg.txt", "b.png.txt"):
        (tmp_path / name).write_text(name)
    rows = folder_format(tmp_path, Roots(tmp_path)).rows(findings := Findings())
    texts = {fields["file_name"]: fields["text"] for _, fields in rows}
    assert texts["a.jpg"] == texts["a.png"] == ["a.txt"]
    assert findings.to_json() == {"shared_text": {"count": 1, "examples": ["a.png"]}}
