"""YAML that others wrote: bounded, in one line, and otherwise what PyYAML reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from mclclip import config
from mclclip.config import plain_yaml
from mclclip.config.plain_yaml import parse_yaml, read_yaml
from mclclip.util import shipped
from mclclip.util.files import MAX_DEPTH

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 300))

BAD_YAML = {
    "billion_laughs": (LAUGHS, "stands for more than 100,000 values"),
    "deep_list": ("[" * 5000 + "]" * 5000, "nested deeper than 64 levels"),
    "deep_by_aliases": (CHAIN, "nested deeper than 64 levels"),
    "contains_itself": ("a: 1\nb: &b [1, *b]\n", "contains itself, which begins in line 2"),
    "key_of_itself": ("&a {*a : 1}", "contains itself"),
    "key_twice": ("lr: 1\nseed: 2\nlr: 3\n", "the key 'lr' twice, in line 1 and in line 3: keep"),
    "number_of_a_hundred_thousand_digits": ("a: " + "9" * 100_000, "a number of 100000 digits"),
    "number_to_the_base_60": ("a: 1" + ":59" * 30_000, "a number of 90001 digits"),
    "tag_of_python": ("!!python/object/apply:os.system [ls]", "is not valid YAML"),
    "set": ("!!set {a, b}", "is not valid YAML"),
    "bytes": (b"\xff\xfe\xff", "is not valid YAML"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_is_refused_in_one_line(case: str) -> None:
    text, message = BAD_YAML[case]
    start = time.monotonic()
    with pytest.raises(ValueError, match="^other.yaml ") as caught:
        parse_yaml(text, "other.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert time.monotonic() - start < 60  # what is written out would never end


def test_yaml_at_its_limits_is_read() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_yaml(deep, "x")) == deep
    assert len(parse_yaml(f"[{'a,' * 10_000}]", "x")) == 10_000
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "x")["b"] == {"x": 1, "y": 3}
    assert parse_yaml("day: 2024-01-02", "x") == {"day": "2024-01-02"}


def test_yaml_is_otherwise_what_safe_load_reads() -> None:
    for recipe in shipped.RECIPES.glob("*.yaml"):
        assert read_yaml(recipe) == yaml.safe_load(recipe.read_text()), recipe


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_yaml, "MAX_YAML_BYTES", 1000)
    path = tmp_path / "large.yaml"
    path.write_text("[" + " " * 998 + "]")
    assert read_yaml(path) == []
    path.write_text("[" + " " * 999 + "]")
    with pytest.raises(ValueError, match="large.yaml has more than 1,000 bytes"):
        read_yaml(path)


def test_no_option_takes_a_billion_values(tmp_path: Path) -> None:
    lines = LAUGHS.splitlines()
    flow = "{" + ", ".join(lines) + "}"
    with pytest.raises(ValueError, match="stands for more than"):
        config.load(None, ["run_dir=x", f"eval.suite.x.options={flow}"])
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
