"""CLIP's loss on held-out shards, against its definition and planted encoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.eval.features import Extractor
from mclclip.eval.protocols import BenchmarkConfig
from mclclip.eval.protocols.contrastive_loss import evaluate, row_losses
from mclclip.verbs.eval import check

NUM = 13


def shards(root: Path, *captions: str) -> Path:
    """Pictures that spell their number, as planted encoders read them, with it as their caption,
    and with other ``captions``; each picture lies beside the shards too."""
    samples = []
    root.mkdir(exist_ok=True)
    for number in range(NUM):
        path, texts = root / f"{number}.png", [f"number {number}", *captions]
        Image.new("RGB", (4, 4), (0, number, 0)).save(path)
        samples.append(PackedSample(f"{number:05d}", path.read_bytes(), "png", texts))
    write_shards(samples, root, 5)
    return root


def losses(encoder: Any, root: Path, **options: Any) -> dict[str, float]:
    figures = evaluate(Extractor(encoder, batch_size=4), root, **options)
    return {figure.metric: figure.value for figure in figures}


@pytest.mark.parametrize("chunk_bytes", [8 * NUM * 4, 1 << 20])
def test_it_is_the_loss_of_every_sample(
    tmp_path: Path, planted: Callable[..., Any], chunk_bytes: int
) -> None:
    """By the definition, written out slowly: -log(softmax) of the sample's own pair."""
    encoder = planted("random", NUM)
    encoder.logit_scale = 7.0
    images, texts = (t.double() for t in (encoder.image_table, encoder.text_table))
    extractor = Extractor(encoder, batch_size=4)
    figures = evaluate(extractor, shards(tmp_path), chunk_bytes=chunk_bytes)
    of = {figure.metric: figure for figure in figures}
    for number in range(NUM):
        own = 7.0 * float(images[number] @ texts[number])
        to_text = math.log(sum(math.exp(7.0 * float(images[number] @ t)) for t in texts)) - own
        to_image = math.log(sum(math.exp(7.0 * float(i @ texts[number])) for i in images)) - own
        wanted = {"loss": (to_text + to_image) / 2}
        wanted |= {"image_to_text": to_text, "text_to_image": to_image}
        for metric, value in wanted.items():
            found = of[metric].outcomes
            assert found is not None and found.items[number] == f"{number:05d}"
            assert found.values[number] == pytest.approx(value, abs=1e-5)
    for figure in figures:
        mean = float(np.mean(figure.outcomes.values))
        assert figure.value == pytest.approx(mean) and figure.ci_low < mean < figure.ci_high
    assert [of[m].protocol["level"] for m in of] == ["headline", "detail", "detail"]
    (few, *_) = evaluate(Extractor(planted("constant", NUM)), tmp_path, max_samples=6)
    assert few.value == pytest.approx(math.log(6)) and few.count == 6
    assert few.protocol["unit"] == "nats"


def test_captions_come_from_a_field_of_the_samples_or_a_file(
    tmp_path: Path, planted: Callable[..., Any]
) -> None:
    encoder, wanted = planted("random", NUM), losses(planted("random", NUM), shards(tmp_path))
    root = shards(tmp_path / "several", "another one 3")
    rows = [f"{n}.png,{text}" for n in range(NUM) for text in (f"number {n}", "another one 3")]
    (root / "captions.csv").write_text("\n".join(["filepath,title", *rows]))
    for captions in ("json:captions", "captions.csv"):
        options = {"captions": captions}
        check({"held_out": BenchmarkConfig("contrastive_loss", str(root), options)})
        assert losses(encoder, root, **options) == pytest.approx(wanted)


def test_large_logits_do_not_overflow() -> None:
    rows = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(row_losses(rows, rows, scale=1e6), np.zeros(4))
    np.testing.assert_allclose(row_losses(rows, rows[::-1].copy(), scale=1e6), np.full(4, 1e6))
