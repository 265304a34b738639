"""Memory of a step that the plan finds without a GPU, against what one GPU has held.

The GiB are those of tests/benchmarks/README.md, "One GPU": of ViT-L-14 in bf16 without the weights
themselves, which were there before, or beside open_clip with them; of the class centers what a step
holds beside their rows, moments and gradient.
"""

from __future__ import annotations

from typing import Any

import pytest

from mclclip import config
from mclclip.plan import memory
from mclclip.verbs.plan import Machine
from tests import tiny
from tests.matrix import kept
from tests.plans import recipe

GIB = 2**30
ALL = "{image_blocks: all, image_norm: true, image_projection: true, text: true, logit_scale: true}"
SMALL = ("trained_model.name=ViT-B-32", "train.engine.micro_batch=64")
LAION = tiny.ROOT / "launch/recipes/mlcd_laion_vitl14.yaml"


@pytest.mark.parametrize(
    ("batch", "lock", "gib", "counts_weights"),
    kept(
        [
            (256, ALL, 65.5, False),
            (512, "{image_blocks: 6, text: false, logit_scale: true}", 29.7, False),
            (256, "{image_blocks: 6, text: false, logit_scale: true}", 17.0, True),
            (256, "{image_blocks: all, text: false, logit_scale: true}", 60.2, True),
        ],
        2,
    ),
)
def test_a_step_takes_what_a_gpu_has_held(
    batch: int, lock: str, gib: float, counts_weights: bool
) -> None:
    given = ("device=cuda", "model={name: ViT-L-14}", f"train.global_batch={batch}")
    options = recipe("cc12m_vitl14", *given, f"train.lock={lock}")
    parts = memory.measure(options, "train", options.train, Machine())["parts"]
    left_out = {"cuda", "batch"} | (set() if counts_weights else {"parameters"})
    held = sum(size for part, size in parts.items() if part not in left_out)
    assert held / GIB == pytest.approx(gib, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "batch", "gib"),
    kept([(100_000, 4096, 0.18), (1_000_000, 4096, 0.19), (1_000_000, 1024, 0.09)], 0),
)
def test_a_head_takes_what_a_gpu_has_held(classes: int, batch: int, gib: float) -> None:
    given = (f"cluster.num_clusters={classes}", f"train.global_batch={batch}")
    options = config.load(LAION, [*given, "device=cuda", *SMALL])
    parts = memory.measure(options, "train", options.train, Machine())["parts"]
    untouched = classes * 0.9 * (1 - 1 / classes) ** (8 * batch)
    gradient = 4 * 512 * (classes - untouched)
    features = 4 * 512 * batch
    assert (parts["loss"] - gradient - features) / GIB == pytest.approx(gib, rel=0.15, abs=0.02)
    assert parts["objective"] == classes * (3 * 4 * 512 + 4)  # rows, moments and counts


def head(ranks: int, *overrides: str) -> dict[str, Any]:
    options = config.load(LAION, [*SMALL, *overrides])
    return memory.measure(options, "train", options.train, Machine(1, ranks))


@pytest.mark.slow
def test_ranks_share_class_centers_and_save_them_whole() -> None:
    """The paper's run: 12,500 classes on each of 80 GPUs, of which a step draws a tenth."""
    alone, shared = head(1), head(80)
    assert 80 * shared["parts"]["objective"] == alone["parts"]["objective"]
    assert shared["checkpoint"] == alone["checkpoint"] > 6.1e9
    products = 4 * 2 * 32_800 * 1_250 * 512
    assert shared["operations"]["loss"] == pytest.approx(products, rel=0.05)
    assert alone["operations"]["loss"] == pytest.approx(80 * products, rel=0.05)
