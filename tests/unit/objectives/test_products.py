"""Products in bf16 with sums in fp32, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import Margin, ShardedClassCenters
from mclclip.objectives.mlcd import ClassCenterLoss
from mclclip.objectives.products import EXACT, Products, choose_products
from tests.objective_loops import parts_of

BF16 = Products(bf16=True, as_fp32=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "float64"])
@pytest.mark.parametrize("option", ["auto", "fp32"])
def test_bf16_is_for_half_precision_on_a_gpu(option: str, precision: str, device: str) -> None:
    chosen = choose_products(option, precision, torch.device(device))  # type: ignore[arg-type]
    wanted = option == "auto" and device == "cuda" and precision in ("bf16", "fp16")
    assert chosen == (Products(bf16=True) if wanted else EXACT)


def test_products_of_rounded_numbers_are_added_in_fp32() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 300, generator=random) for n in (5, 7))
    got = BF16.multiply(BF16.factor(left), BF16.factor(right).T)
    exact = left.bfloat16().double() @ right.bfloat16().double().T
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def late_in_a_training(num_classes: int, dim: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features whose class centers have cosines of 0.5, and 50 others cosines of 0.3."""
    random = torch.Generator().manual_seed(num_classes)
    normal = torch.randn(num_classes, dim, generator=random, dtype=torch.float64)
    rows = functional.normalize(normal, dim=1)
    features = torch.randn(batch, dim, generator=random, dtype=torch.float64)
    features = functional.normalize(features, dim=1)
    labels = torch.randperm(num_classes, generator=random)[: batch * 8].reshape(batch, 8)
    near = torch.randint(num_classes, (batch, 50), generator=random)
    for row, feature in enumerate(features):
        for ids, cosine in ((near[row], 0.3), (labels[row], 0.5)):
            rows[ids] = functional.normalize(rows[ids] + feature * cosine * 1.2, dim=1)
    return features, labels, rows


def loss_and_gradients(
    features: Tensor, labels: Tensor, rows: Tensor, products: Products
) -> list[Tensor]:
    """The loss, and the gradients of features and class centers."""
    num, dim = rows.shape
    centers = ShardedClassCenters(num, dim, lambda a, b: rows[a:b], dtype=rows.dtype)
    centers.begin(0)
    objective = ClassCenterLoss(centers, margin=Margin("arc"), products=products)
    leaf = features.clone().requires_grad_()
    loss = parts_of(objective, image_features=leaf, classes=labels)["loss"]
    loss.backward()
    assert leaf.grad is not None and centers.grad is not None
    return [loss.detach(), leaf.grad, centers.grad]


@pytest.mark.parametrize("num_classes", [1_000, 50_000, 100_000])
def test_the_error_of_a_head_in_bf16_is_bounded(num_classes: int) -> None:
    """Against float64 the loss is within 0.1 %, and gradients within 2 % (1.03 % at most)."""
    features, labels, rows = late_in_a_training(num_classes, dim=64, batch=16)
    exact = loss_and_gradients(features, labels, rows, EXACT)
    rounded = loss_and_gradients(features.float(), labels, rows.float(), BF16)
    errors = [
        float((got.double() - wanted).norm() / wanted.norm())
        for got, wanted in zip(rounded, exact, strict=True)
    ]
    assert errors[0] < 1e-3 and max(errors[1:]) < 2e-2, errors
    assert min(errors) > 1e-6, "the numbers have not been rounded"
