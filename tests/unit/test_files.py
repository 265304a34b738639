"""Documents and paths that others wrote: bounded, named, in one line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mclclip import config, files
from mclclip.files import MAX_DEPTH, Roots, below, parse_json, parse_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 300))

BAD_YAML = {
    "billion_laughs": (LAUGHS, "stands for more than 100,000 values"),
    "billion_laughs_by_merging": (MERGES, "stands for more than 100,000 values"),
    "deep_list": ("[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
    "deep_blocks": ("".join(" " * n + "a:\n" for n in range(5000)), "deeper than 64 levels"),
    "deep_by_aliases": (CHAIN, "nested deeper than 64 levels"),
    "contains_itself": ("a: 1\nb: &b [1, *b]\n", "contains itself, which begins in line 2"),
    "key_of_itself": ("&a {*a : 1}", "contains itself"),
    "key_twice": ("lr: 1\nseed: 2\nlr: 3\n", "the key 'lr' twice, in line 1 and in line 3: keep"),
    "nested_key_twice": ("x: [{lr: 1, lr: 2}]", "the key 'lr' twice, in line 1 and in line 1"),
    "quoted_key_twice": ("lr: 1\n'lr': 2\n", "the key 'lr' twice, in line 1 and in line 2"),
    "number_of_a_hundred_thousand_digits": ("a: " + "9" * 100_000, "a number of 100000 digits"),
    "number_to_the_base_60": ("a: 1" + ":59" * 30_000, "a number of 90001 digits"),
    "tag_of_python": ("!!python/object/apply:os.system [ls]", "is not valid YAML"),
    "wrong_number": ('!!int ""', "is not valid YAML"),
    "wrong_truth": ("!!bool maybe", "is not valid YAML"),
    "set": ("!!set {a, b}", "is not valid YAML"),
    "open_list": ("[1,\n2", "is not valid YAML"),
    "bytes": (b"\xff\xfe\xff", "is not valid YAML"),
    "control_characters": ("a: \x00", "is not valid YAML"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_is_refused_in_one_line(case: str) -> None:
    text, message = BAD_YAML[case]
    start = time.monotonic()
    with pytest.raises(ValueError, match="^other.yaml ") as caught:
        parse_yaml(text, "other.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert time.monotonic() - start < 5


def test_yaml_at_its_limits_is_read() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_yaml(deep, "x")) == deep
    assert len(parse_yaml(f"[{'a,' * 10_000}]", "x")) == 10_000
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "x")["b"] == {"x": 1, "y": 3}
    assert parse_yaml("day: 2024-01-02", "x") == {"day": "2024-01-02"}


def test_yaml_is_otherwise_what_safe_load_reads() -> None:
    for recipe in config.recipes.folder().glob("*.yaml"):
        assert files.read_yaml(recipe) == yaml.safe_load(recipe.read_text()), recipe


BAD_JSON = {
    "deep_lists": ("[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
    "deep_objects": ('{"a":' * 5000 + "1" + "}" * 5000, "nested deeper than 64 levels"),
    "a_little_too_deep": ("[" * 65 + "]" * 65, "nested deeper than 64 levels"),
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


@pytest.mark.parametrize("read", [files.read_json, files.read_yaml, files.read_model_json])
def test_documents_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_MODEL_JSON_BYTES", 1000)
    monkeypatch.setattr(files, "MAX_YAML_BYTES", 1000)
    path = tmp_path / "large"
    path.write_text("[" + " " * 998 + "]")
    assert read(path) == []
    path.write_text("[" + " " * 999 + "]")
    with pytest.raises(ValueError, match="large has more than 1,000 bytes"):
        read(path)


@pytest.mark.parametrize("where", ["model.name", "train", "eval.suite.x.options"])
def test_no_option_takes_a_billion_values(tmp_path: Path, where: str) -> None:
    lines = LAUGHS.splitlines()
    flow = "{" + ", ".join(lines) + "}"
    with pytest.raises(ValueError, match="stands for more than"):
        config.load(None, ["run_dir=x", f"{where}={flow}"])
    path = tmp_path / "laughs.yaml"
    path.write_text("run_dir: x\nmodel:\n  name:\n" + "".join(f"    {x}\n" for x in lines))
    with pytest.raises(ValueError, match="laughs.yaml stands for more than"):
        config.load(path)
    path.write_text("run_dir: x\nmodel:\n  name: " + "{a: " * 5000 + "1" + "}" * 5000)
    with pytest.raises(ValueError, match="laughs.yaml is nested deeper than"):
        config.load(path)
    path.write_text("run_dir: x\nseed: 1\nrun_dir: y\n")
    with pytest.raises(ValueError, match="the key 'run_dir' twice, in line 1 and in line 3"):
        config.load(path)


# --- paths that a table names -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jpg", "d/a.jpg", "./a.jpg", "d/../a.jpg", "..a.jpg", "d/..a"])
def test_names_below_the_folder(tmp_path: Path, name: str) -> None:
    assert below(tmp_path, name, "t.csv") == tmp_path / name


@pytest.mark.parametrize(
    "name", ["", "/etc/hosts", "..", "../a.jpg", "d/../../a.jpg", "a\0b", "//a"]
)
def test_names_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="t.csv line 3 names .* no file below"):
        below(tmp_path, name, "t.csv line 3")


def test_links_are_followed_before_a_path_counts_as_below(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "inner-2"
    for folder in (inner, outer):
        folder.mkdir()
        (folder / "a").touch()
    (inner / "out").symlink_to(outer / "a")
    (inner / "same").symlink_to("a")
    (tmp_path / "link").symlink_to(inner)
    roots = Roots(inner)
    assert roots.real_path(inner / "a") == roots.real_path(inner / "same") == inner / "a"
    assert roots.real_path(tmp_path / "link" / "a") == inner / "a"
    assert Roots(tmp_path / "link").real_path(inner / "a") == inner / "a"
    assert roots.real_path(inner / "out") is None
    assert Roots(inner, outer).real_path(inner / "out") == outer / "a"
    assert roots.real_path(outer / "a") is None
    assert roots.real_path(inner / ".." / "x") is None
    assert Roots(Path("/")).real_path(outer / "a") == outer / "a"


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """The temporary name of a file can be guessed: a link of that name must not be followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    name = f".state.json.{os.uname().nodename}.{os.getpid()}.tmp"
    (tmp_path / name).symlink_to(victim)
    files.write_json(tmp_path / "state.json", 1)
    assert victim.read_text() == "precious" and not (tmp_path / "state.json").is_symlink()
    assert files.read_json(tmp_path / "state.json") == 1
