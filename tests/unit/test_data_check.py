"""doctor --data: what is wrong with the data of a configuration is found in a sample of them."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip import config
from mclclip.config import Config
from mclclip.verbs import data_check
from mclclip.verbs.doctor import Finding
from tests import tiny
from tests.tars import write_tar


def picture(seed: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    blocks = np.random.default_rng(seed).integers(0, 255, (5, 6, 3)).astype(np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


def encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def shard(path: Path, samples: list[tuple[bytes, str]], first: int = 0) -> None:
    members = []
    for number, (image, caption) in enumerate(samples, start=first):
        members += [(f"{number:05d}.jpg", image), (f"{number:05d}.txt", caption.encode())]
    write_tar(path, members)


def settings(folder: Path, *overrides: str) -> Config:
    (folder / "model.json").write_text(json.dumps(tiny.MODEL))
    return config.from_tree(
        {
            "run_dir": str(folder / "run"),
            "data": {"sources": {"a": {"shards": str(folder / "*.tar")}}},
            "model": {"name": str(folder / "model.json")},
            "num_stages": 2,
            "cluster": {"num_clusters": 2},
            "train": {"global_batch": 16},
            "base": {"global_batch": 16},
        },
        overrides,
    )


def found(options: Config, folder: Path) -> dict[str, Finding]:
    """The findings by what they are of; the last one of each."""
    (folder / "temporary").mkdir()
    return {each.what: each for each in data_check.findings(options, folder / "temporary")}


def test_good_data_have_no_finding_and_nothing_is_written(tmp_path: Path) -> None:
    samples = [(encoded(picture(n)), f"{n} big red wooden things on the left") for n in range(100)]
    shard(tmp_path / "0.tar", samples)
    before = {*tmp_path.rglob("*")} | {tmp_path / "model.json", tmp_path / "temporary"}
    options = settings(tmp_path)
    lines = found(options, tmp_path)
    assert {each.state for each in lines.values()} == {"ok"}, lines
    assert lines["samples"].text == "100 in 1 shard; looked at: 100 in 1"
    assert "48 x 40 pixels in the median" in lines["sizes"].text
    assert {*tmp_path.glob("*")} <= before


def test_what_is_wrong_is_told_with_the_remedy(tmp_path: Path) -> None:
    wide = [(encoded(picture(n, (90, 30))), "the same caption") for n in range(20)]
    long = [(encoded(picture(n)), f"word {n} " * 50) for n in range(20, 30)]
    again = [(encoded(picture(n)), f"again {n}") for n in range(20, 30)]
    near = [(encoded(picture(n), quality=60), f"once more {n}") for n in range(20, 25)]
    broken = [(encoded(picture(99))[:200], "broken")]
    shard(tmp_path / "0.tar", [*wide, *long, *again, *near, *broken])
    lines = found(settings(tmp_path, "train.global_batch=32"), tmp_path)
    bad = lines["decoding"]
    assert bad.state == "FAIL" and "1 of 46 cannot be used (1 truncated)" in bad.text
    few = settings(tmp_path, "train.global_batch=32", "data.max_bad_fraction=0.1")
    (tmp_path / "again").mkdir()
    assert found(few, tmp_path / "again")["decoding"].state == "warn"
    warned = {name for name, each in lines.items() if each.state == "warn"}
    assert {"copies", "caption length", "equal captions"} <= warned
    assert "44% are enlarged to the model's 32" in lines["sizes"].text
    assert "20 of 45 have a copy among these, byte for byte" in lines["copies"].text
    assert "21.7% are longer than the model's" in lines["caption length"].text
    assert "the commonest: 'the same caption'" in lines["equal captions"].text


def test_of_many_shards_some_are_looked_at(tmp_path: Path) -> None:
    for number in range(9):
        samples = [(encoded(picture(10 * number + n)), f"{n} in {number}") for n in range(10)]
        shard(tmp_path / f"{number}.tar", samples, first=10 * number)
    lines = found(settings(tmp_path), tmp_path)
    assert lines["samples"].text == "about 90 in 9 shards; looked at: 30 in 3"


@pytest.mark.parametrize(
    ("counts", "batch"), [([1, 1, 1, 1], 3), ([2, 1, 3], 3), ([4, 2], 2), ([5], 9), ([3, 2, 1], 6)]
)
def test_equal_captions_of_a_batch_are_those_of_all_batches(counts: list[int], batch: int) -> None:
    captions = [number for number, count in enumerate(counts) for _ in range(count)]
    every = list(itertools.combinations(captions, min(batch, len(captions))))
    share = np.mean([[drawn.count(one) > 1 for one in drawn] for drawn in every])
    assert data_check.equal_in_batch(counts, batch) == pytest.approx(share)
