"""Rows of text embeddings that a user brings are found by text and by key, and bad ones refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mclclip import config
from mclclip.data.text_rows import KIND, TextRows, digest_of, files_of, width_of
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import texts

Names = Sequence[dict[str, Any]]


def write_npy(path: Path, names: Names, rows: Any) -> str:
    np.save(path, np.asarray(rows))
    lines = "".join(json.dumps(name) + "\n" for name in names)
    path.with_suffix(".jsonl").write_text(lines)
    return str(path)


def write_parquet(path: Path, rows: Sequence[Any], **columns: Sequence[Any]) -> str:
    pq.write_table(pa.table({**columns, "embedding": rows}), path)
    return str(path)


def opened(folder: Path, *files: str, width: int = 2) -> TextRows:
    options = {"run_dir": str(folder / "run"), "model": {"text_rows": [*files]}}
    return TextRows([texts.run(config.from_tree(options), SINGLE)], width)


def test_rows_are_found_by_text_in_both_kinds_of_files(tmp_path: Path) -> None:
    long = "word " * 3000
    first = write_npy(
        tmp_path / "a.npy",
        [{"text": "a dog"}, {"text": "a  cat \n"}, {"text": "a dog"}],
        np.array([[1, 2], [3, 4], [5, 6]], np.float64),
    )
    second = write_parquet(tmp_path / "b.parquet", [[7.0, 8.0], [9.0, 1.0]], text=[long, "é 🐈"])
    rows = opened(tmp_path, first, second)
    found = rows(["é 🐈", " a cat", long[:5000], "a dog"])  # the first of equal texts counts
    assert found.dtype == torch.float32
    assert found.tolist() == [[9, 1], [3, 4], [7, 8], [1, 2]]
    assert rows.has("a dog") and not rows.has("A dog")
    copy = pickle.loads(pickle.dumps(rows))
    assert copy("a dog").tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="1 of 2 texts .* 'a mouse'.*--missing"):
        rows(["a dog", "a mouse"])


def test_rows_by_key_come_before_rows_by_text(tmp_path: Path) -> None:
    names = [
        {"key": "web/0001"}, {"key": "0002", "number": 1}, {"text": "a dog"},
        {"key": "web/0002", "number": 0},
    ]  # fmt: skip
    rows = opened(tmp_path, write_npy(tmp_path / "a.npy", names, np.eye(4, dtype=np.float16)),
                  width=4)  # fmt: skip
    places = [
        rows.find_caption("web/0001", 0, "a dog"), rows.find_caption("web/0001", 3, "a cat"),
        rows.find_caption("web/0002", 1, "a cat"), rows.find_caption("web/0002", 0, ""),
        rows.find_caption("web/0002", 2, "a cat"), rows.find_caption("web/0003", 0, "a dog"),
    ]  # fmt: skip
    assert places == [0, 0, 1, 3, None, 2]
    assert rows.read([2]).tolist() == [[0, 0, 1, 0]]
    assert np.load(tmp_path / "run" / KIND / "rows.npy").dtype == np.float16
    assert not rows.has("web/0001")  # a key is no text


def test_patterns_name_files_in_order_and_the_digest_follows_the_bytes(tmp_path: Path) -> None:
    for name in "ba":
        write_parquet(tmp_path / f"{name}.parquet", [[1.0, 2.0]], text=[name])
    pattern = str(tmp_path / "*.parquet")
    assert [path.stem for path in files_of([pattern, str(tmp_path / "b.parquet")])] == ["a", "b"]
    assert width_of([pattern]) == 2
    before = digest_of([pattern])
    assert digest_of([pattern]) == before
    write_parquet(tmp_path / "a.parquet", [[1.0, 3.0]], text=["a"])
    assert digest_of([pattern]) != before


@pytest.mark.parametrize(
    ("names", "rows", "reason"),
    [
        ([{"text": "a"}, {"text": "b"}], [[1.0, np.nan], [1.0, 2.0]], "NaN.*'a'"),
        ([{"text": "a"}, {"key": "b"}], [[1.0, 2.0], [0.0, 0.0]], "zeros.*'b'"),
        ([{"text": "a"}], [[1.0, 2.0], [3.0, 4.0]], "2 rows.* 1 lines"),
        ([{"key": "a"}, {"key": "a"}], [[1.0, 2.0], [3.0, 4.0]], "row 2 .*number"),
        ([{"caption": "a"}], [[1.0, 2.0]], "line 1.*'text'"),
        ([{"text": "a"}], [[1, 2]], "int64"),
        ([{"text": "a"}], [1.0], r"float64 \[1\]"),
    ],
)
def test_rows_that_cannot_be_used_are_one_line(
    tmp_path: Path, names: Names, rows: Any, reason: str
) -> None:
    file = write_npy(tmp_path / "a.npy", names, rows)
    with pytest.raises(ValueError, match=rf"text_rows: .*{reason}") as caught:
        opened(tmp_path, file)
    assert "\n" not in str(caught.value)
    assert not [*(tmp_path / "run").rglob("*.npy")]


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    two = write_parquet(tmp_path / "two.parquet", [[1.0, 2.0]], text=["a"])
    three = write_parquet(tmp_path / "three.parquet", [[1.0, 2.0, 3.0]], text=["b"])
    rows = [[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]]  # of two numbers in the mean
    ragged = write_parquet(tmp_path / "ragged.parquet", rows, text=["a", "b", "c"])
    nameless = write_parquet(tmp_path / "nameless.parquet", [[1.0, 2.0]], caption=["a"])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    numbers = write_parquet(tmp_path / "numbers.parquet", [1.0], text=["a"])
    np.save(tmp_path / "alone.npy", np.ones((1, 2)))
    for files, reason in [
        ([two, three], "width 3.*of 2"), ([ragged], "several widths"), ([nameless], "caption"),
        ([str(broken)], "broken.parquet"), ([numbers], "numbers.parquet"),
        ([str(tmp_path / "alone.npy")], "alone.jsonl"), ([f"{tmp_path}/no*.npy"], "no file"),
        ([str(tmp_path / "alone.csv")], "no file"),
    ]:  # fmt: skip
        with pytest.raises((ValueError, FileNotFoundError), match=reason) as caught:
            opened(tmp_path, *files)
        assert "\n" not in str(caught.value) and "text_rows" in str(caught.value)


def test_rows_of_another_width_than_the_projection_are_refused(tmp_path: Path) -> None:
    rows = opened(tmp_path, write_parquet(tmp_path / "a.parquet", [[1.0, 2.0]], text=["a"]))
    with pytest.raises(ValueError, match="width 2, .* takes 3"):
        TextRows(rows.folders, 3)
    with pytest.raises(ValueError, match=r"no folder 'text_rows'.*\[N, 3\]"):
        TextRows([], 3)(["a"])
