"""What counts as a url where a path is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mclclip.util.options import protocol_of, refuse_url


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("s3://bucket/a.tar", "s3"), ("HTTPS://host/a?b=c", "https"), ("file:///data/a", "file"),
        ("ftp://host/a", "ftp"), ("gs:/bucket/a", "gs"), ("local-dir:/tmp/x", None),
        ("photos", None), ("/data/a:/b", None), ("ViT-B-32@openai", None), ("hf:org/name", None),
    ],
)  # fmt: skip
def test_urls_and_paths(text: str, protocol: str | None) -> None:
    assert protocol_of(text) == protocol


def test_a_folder_with_a_colon_in_its_name_is_a_path(tmp_path: Path) -> None:
    refuse_url(Path("local-dir:/tmp/x"), "--out")
    refuse_url(tmp_path / "s3:" / "bucket", "--out")
    with pytest.raises(ValueError, match="s3://bucket/run"):
        refuse_url(Path("s3://bucket/run"), "--out")
