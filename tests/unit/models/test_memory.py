"""Memory found without taking any is the memory that real tensors take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.models import memory
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.util.pair_products import pair_products
from tests import tiny

CONFIGS = Path(__file__).parents[2] / "configs"


def peak(work: Callable[[], object], existing: Iterable[Tensor]) -> int:
    with memory.StepMeter(existing) as meter:
        work()
    return meter.peak


def operations(work: Callable[[], object]) -> int:
    with memory.StepMeter() as meter:
        work()
    return meter.operations


def trained(model: Model, rows: int, precision: str) -> int:
    """Peak of a forward and backward, gradients being there already."""
    size = model.image_size
    images = torch.ones(rows, 3, size, size)  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            features = model.encode_image(images)
        torch.autograd.backward(features.float().sum())

    return peak(work, [*model.parameters(), *model.buffers(), *gradients, images])


@pytest.mark.parametrize(
    ("name", "change", "precision"),
    [
        ("tiny_vit", "locked", "bf16"),
        ("tiny_vit", "recomputed", "fp32"),
        ("tiny_resnet", "locked", "fp32"),
    ],
)
def test_fakes_take_what_real_tensors_take(name: str, change: str, precision: str) -> None:
    def prepared(model: Model) -> Model:
        if change == "locked":
            model.lock(1, image_norm=True, image_projection=True, text=False, logit_scale=True)
        model.set_grad_checkpointing(change == "recomputed")
        return model.train()

    model = prepared(memory.load_shapes(CONFIGS / f"{name}.json"))
    with memory.faked(model):
        estimate = trained(model, 8, precision)
    real = trained(prepared(load_towers(CONFIGS / f"{name}.json")), 8, precision)
    # Fakes keep the statistics of the CPU's bf16 layer norms in bf16, real tensors in fp32.
    assert estimate == pytest.approx(real, rel=0.005 if precision == "bf16" else 0)


def test_the_meter_counts_the_parts_of_sparse_matrices() -> None:
    rows, starts, ids = torch.ones(4, 2), torch.tensor([0, 3, 6, 8, 8]), torch.arange(8) % 4
    kept: list[Tensor] = []

    def work() -> None:
        kept.append(pair_products(rows, rows, starts, ids))

    # The values asked for and those found, 8 fp32 numbers each; torch copies the indices too.
    least = 2 * 8 * 4
    assert least <= peak(work, [rows, starts, ids]) <= least + 2 * 8 * (5 + 8)


def test_the_meter_counts_what_is_alive_at_once() -> None:
    kept: list[Tensor] = []
    given = torch.zeros(1000)

    def work() -> None:
        kept.append(given * 2)  # 4,000 bytes, kept
        kept[0].view(10, 100).add_(given.view(10, 100))  # a view and in place: nothing
        for _ in range(3):
            torch.ones(500)  # 2,000 bytes, one at a time

    assert peak(work, [given]) == 6000


def test_layer_norms_of_a_gpu_keep_fp32() -> None:
    peaks = []
    for options in ({}, {"gpu_autocast": True}):
        model = memory.load_shapes(tiny.ONE_BLOCK).train()
        with memory.faked(model, **options):
            peaks.append(trained(model, 8, "bf16"))
    assert peaks[1] > peaks[0]


def test_nothing_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("it was asked for")

    monkeypatch.setattr("mclclip.models.clip.download_pretrained_from_hf", fetch)
    with pytest.raises(ValueError, match="give local-dir:PATH"):
        memory.load_shapes("hf-hub:some/model")


# --- operations --------------------------------------------------------------------------------


def of_blocks(layers: int, width: int, tokens: int) -> int:
    """Blocks of a transformer: 12 width^2 weights and two products of the attention per token."""
    return layers * (2 * 12 * width**2 * tokens + 2 * 2 * tokens**2 * width)


def of_towers(image: Any, patch: int, text: Any, context: int, dim: int) -> tuple[int, int]:
    """An image and a text tower by hand, each given as its size, width and layers."""
    (size, width, layers), (text_width, text_layers) = image, text
    patches = (size // patch) ** 2
    embedding = 2 * patches * 3 * patch**2 * width
    return (
        embedding + of_blocks(layers, width, patches + 1) + 2 * width * dim,
        of_blocks(text_layers, text_width, context) + 2 * text_width * dim,
    )


def test_operations_are_those_that_are_published() -> None:
    """By hand, in a way that gives the GFLOP of ViT-B-32 in open_clip's model_profile.csv."""
    published = of_towers((224, 768, 12), 32, (512, 12), 77, 512)
    assert sum(published) / 1e9 == pytest.approx(14.8, rel=0.003)
    assert published[1] / 1e9 == pytest.approx(5.96, rel=0.003)
    model = memory.load_shapes(CONFIGS / "tiny_vit.json")
    with memory.faked(model.eval()), torch.no_grad():
        image = operations(lambda: model.encode_image(torch.empty(1, 3, 32, 32)))
        text = operations(lambda: model.encode_text(torch.zeros(1, 16, dtype=torch.int64)))
    assert (image, text) == of_towers((32, 64, 3), 8, (32, 2), 16, 32)


def test_operations_of_backward_passes() -> None:
    """Gradients of input and weight take a forward each, also of convolutions in groups."""
    linear = nn.Linear(5, 7)
    depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    rows, images = torch.ones(3, 5), torch.ones(2, 6, 4, 4)
    assert operations(lambda: linear(rows)) == 2 * 3 * 5 * 7
    assert operations(lambda: linear(rows).sum().backward()) == 2 * 2 * 3 * 5 * 7
    rows.requires_grad_()
    assert operations(lambda: linear(rows).sum().backward()) == 3 * 2 * 3 * 5 * 7
    forward = 2 * 2 * 6 * 16 * 9
    assert operations(lambda: depthwise(images)) == forward
    images.requires_grad_()
    assert operations(lambda: depthwise(images).sum().backward()) == 3 * forward


def test_counting_operations_leaves_torch_as_it_was() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ZeroDivisionError):
        operations(lambda: 1 // 0)
    assert torch.backends.mha.get_fastpath_enabled() == before
