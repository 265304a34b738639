"""Documents and paths that others wrote: bounded, named, in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mclclip.util import files
from mclclip.util.files import MAX_DEPTH, below, parse_json, printable

BAD_JSON = {
    "deep_lists": ("[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
    "deep_objects": ('{"a":' * 5000 + "1" + "}" * 5000, "nested deeper than 64 levels"),
    "deep_and_open": ("[" * 200_000, "nested deeper than 64 levels"),
    "not_json": ("[1,", "is not valid JSON"),
    "long_number": ("9" * 5000, "is not valid JSON"),
    "not_utf8": (b'"\xff"', "is not valid JSON"),
    "nothing": (b"", "is not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_that_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    data, message = BAD_JSON[case]
    path = tmp_path / "other.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=message) as caught:
        files.read_json(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_json_at_its_limits_is_read(tmp_path: Path) -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(deep, "x")) == deep
    assert parse_json(b'\xef\xbb\xbf{"a": 1, "a": 2}', "x") == {"a": 2}
    with pytest.raises(ValueError, match="^x has the key 'a' twice"):
        parse_json('[{"a": 1, "a": 2}]', "x", unique_keys=True)


@pytest.mark.parametrize("read", [files.read_json, files.read_model_json])
def test_documents_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_MODEL_JSON_BYTES", 1000)
    path = tmp_path / "large"
    path.write_text("[" + " " * 998 + "]")
    assert read(path) == []
    path.write_text("[" + " " * 999 + "]")
    with pytest.raises(ValueError, match="large has more than 1,000 bytes"):
        read(path)


# --- paths that a table names -------------------------------------------------------------------


def test_names_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    for name in ("d/a.jpg", "./a.jpg", "d/../a.jpg", "..a.jpg", "d/..a"):
        assert below(tmp_path, name, "t.csv") == tmp_path / os.path.normpath(name)
    for name in ("", "/etc/hosts", "..", "d/../../a.jpg", "a\0b", "//a"):
        with pytest.raises(ValueError, match="t.csv line 3 names .* no file below"):
            below(tmp_path, name, "t.csv line 3")


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """The temporary name of a file can be guessed: a link of that name must not be followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = f".state.json.{os.uname().nodename}.{os.getpid()}.tmp"
    (tmp_path / name).symlink_to(victim)
    files.write_json(tmp_path / "state.json", 1)
    assert victim.read_text() == "precious" and not (tmp_path / "state.json").is_symlink()
    assert files.read_json(tmp_path / "state.json") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s3://b/a.tar", "s3://b/a.tar"),
        ("https://h/a.tar?X-Sig=s3cret&b=1", "https://h/a.tar?..."),
        ("https://me:s3cret@h/a?s3cret", "https://...@h/a?..."),
        ("'https://h/a?s3cret', 'gs://h/b?s3cret'.", "'https://h/a?...', 'gs://h/b?...'."),
        ("bad (url='http://h/?s3cret'): why?", "bad (url='http://h/?...'): why?"),
        ("http://h/a?s3cret\nx", "http://h/a?...\\nx"),
        ("what? /folder/a?b.tar x@y", "what? /folder/a?b.tar x@y"),
        ("http://h/a?...", "http://h/a?..."),  # shown before
        ("https:/h/a?s3cret", "https:/h/a?..."),
        ("https://h/a#s3cret", "https://h/a?..."),
    ],
)
def test_urls_are_shown_without_their_secrets(text: str, wanted: str) -> None:
    assert printable(text) == wanted
