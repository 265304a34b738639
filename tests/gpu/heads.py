"""Products of pairs, sums over classes and the contrastive loss, by device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import (
    Margin,
    Rule,
    ShardedClassCenters,
    normal_rows,
)
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.mlcd import ClassCenterLoss, Kind, negative_draw
from mclclip.objectives.products import EXACT, Products
from mclclip.ranks.process_group import Context
from mclclip.util.pair_products import pair_products, starts_of, weighted_sums
from tests.gpu.checks import Where, check, close, random, same_bits, unit
from tests.objective_loops import parts_of

CPU = torch.device("cpu")


# --- products and sums of chosen rows ---


def _pairs(num_rows: int, num_others: int, most: int) -> tuple[Tensor, Tensor]:
    """Starts [num_rows + 1] and ids of 0 to ``most`` others per row: unsorted, some twice."""
    generator = torch.Generator().manual_seed(num_rows)
    counts = torch.randint(most + 1, (num_rows,), generator=generator)
    ids = torch.randint(num_others, (int(counts.sum()),), generator=generator)
    return starts_of(counts), ids


@check("products of chosen pairs (cuSPARSE)")
def chosen_pairs(where: Where) -> str:
    """Value in fp32 and fp64, empty rows, no pair at all, more classes than 2^16, odd widths."""
    worst = 0.0
    sizes = [
        (64, 100, 32, 5),
        (300, 70_000, 33, 8),
        (1, 3, 1, 2),
        (where.size(4096, 64), 999, 768, 9),
    ]
    for num_rows, num_others, dim, most in sizes:
        starts, ids = _pairs(num_rows, num_others, most)
        left, right = random(num_rows, dim), random(num_others, dim, seed=1)
        row = torch.repeat_interleave(torch.arange(num_rows), starts.diff())
        wanted = (left.double()[row] * right.double()[ids]).sum(dim=1)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
            on_device = [x.to(where.device, dtype) for x in (left, right)]
            indices = [x.to(where.device) for x in (starts, ids)]
            got = pair_products(*on_device, *indices)
            worst = max(worst, close(f"{dtype}, {left.shape}", got, wanted, tolerance))
            same_bits("a second time", pair_products(*on_device, *indices), got)
    left, nothing = random(5, 8).to(where.device), torch.zeros(0, dtype=torch.int64)
    starts = torch.zeros(6, dtype=torch.int64, device=where.device)
    got = pair_products(left, left, starts, nothing.to(where.device))
    assert got.shape == (0,), "no pair at all"
    return f"off by {worst:.1g}"


@check("weighted sums (embedding_bag)")
def bags(where: Where) -> str:
    """Value in fp32 and fp64, empty bags, no bag entry at all, one column, the same bits again."""
    worst = 0.0
    for num_bags, num_rows, dim, most in [(50, 70, 1, 4), (200, 500, 33, 9), (7, 5, 512, 60)]:
        starts, ids = _pairs(num_bags, num_rows, most)
        table, weights = random(num_rows, dim), random(len(ids), seed=2)
        row = torch.repeat_interleave(torch.arange(num_bags), starts.diff())
        terms = weights.double()[:, None] * table.double()[ids]
        wanted = torch.zeros(num_bags, dim, dtype=torch.float64).index_add_(0, row, terms)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
            inputs = (
                table.to(where.device, dtype),
                ids.to(where.device),
                starts.to(where.device),
                weights.to(where.device, dtype),
            )
            got = weighted_sums(*inputs)
            worst = max(worst, close(f"{dtype}, {num_bags} bags", got, wanted, tolerance))
            same_bits("a second time", weighted_sums(*inputs), got)
    none = torch.zeros(0, dtype=torch.int64, device=where.device)
    starts = torch.zeros(4, dtype=torch.int64, device=where.device)
    table = random(6, 8).to(where.device)
    got = weighted_sums(table, none, starts, table.new_zeros(0))
    assert got.shape == (3, 8) and not got.any(), "bags without an entry"
    return f"off by {worst:.1g}"


# --- the loss over class centers ---


class Head:
    """Class centers, a batch and an objective: what one step gives, by device and precision."""

    def __init__(self, kind: Kind = "mlcd", rule: Rule = "two_path", **sizes: Any) -> None:
        self.kind, self.rule = kind, rule
        self.num_classes = sizes.get("num_classes", 300)
        self.batch, self.dim, self.labels = sizes.get("batch", 70), sizes.get("dim", 48), 4
        self.tile, self.rate = sizes.get("tile", 32), sizes.get("rate", 0.4)
        self.margin = Margin("arc", 0.3)
        generator = torch.Generator().manual_seed(1)
        self.positives = torch.stack(
            [torch.randperm(self.num_classes, generator=generator)[:4] for _ in range(self.batch)]
        )
        self.positives[3, 2:], self.positives[5] = -1, -1  # one row has few, one has none
        self.features = unit(self.batch, self.dim)

    def step(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        products: Products = EXACT,
    ) -> dict[str, Tensor]:
        """Loss, the gradients of the features and of all class centers, and the figures."""
        draw = negative_draw(self.num_classes, self.rate, 3)
        centers = ShardedClassCenters(
            self.num_classes,
            self.dim,
            normal_rows(self.dim, 1),
            context=Context(device=device),
            draw=draw,
            rule=self.rule,
            dtype=dtype,
        )
        centers.begin(0)
        objective = ClassCenterLoss(
            centers,
            self.kind,
            scale=32.0,
            margin=self.margin,
            tile=self.tile,
            products=products,
        )
        features = self.features.to(device, dtype, copy=True).requires_grad_()
        output = parts_of(objective, image_features=features, classes=self.positives)
        output["loss"].backward()  # type: ignore[no-untyped-call]
        assert features.grad is not None and centers.grad is not None
        assert centers.touched is not None
        whole = torch.zeros_like(centers.rows)
        whole[centers.touched] = centers.grad
        return output | {"of features": features.grad, "of class centers": whole}


def _compare(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> float:
    assert got.keys() == wanted.keys()
    return max(close(name, got[name], wanted[name], tolerance) for name in wanted)


@check("class centers: loss and gradients")
def plain_head(where: Where) -> str:
    """Every kind and rule against float64 on the CPU, in tiles and whole."""
    worst = 0.0
    for kind in ("mlcd", "mlc", "single_label"):
        for rule in ("two_path", "exclude_positives", "partial_fc"):
            head = Head(kind, rule)  # type: ignore[arg-type]
            wanted = head.step(CPU, torch.float64)
            _compare(head.step(where.device, torch.float64), wanted, 1e-11)
            for tile in (32, 8192):
                head.tile = tile
                worst = max(worst, _compare(head.step(where.device), wanted, 2e-5))
    none = Head(rate=0.01, num_classes=120)  # one negative
    _compare(none.step(where.device), none.step(CPU, torch.float64), 2e-5)
    big = Head(num_classes=where.size(100_000, 2000), batch=where.size(512, 32), dim=512, rate=0.1)
    got = big.step(where.device)
    worst = max(worst, _compare(got, big.step(CPU, torch.float64), 2e-5))
    for name, value in big.step(where.device).items():
        same_bits(f"{name}, a second time", value, got[name])
    return f"fp32 off by {worst:.1g}"


@check("class centers: products in bf16")
def head_in_bf16(where: Where) -> str:
    """The same as bf16 on the CPU, near float64, and the same bits a second time."""
    sizes = where.size(100_000, 2000), where.size(512, 32)
    head = Head(num_classes=sizes[0], batch=sizes[1], dim=512, rate=0.1)
    bf16 = Products(bf16=True, as_fp32=not where.on_gpu)
    got = head.step(where.device, products=bf16)
    _compare(got, head.step(CPU, products=Products(bf16=True, as_fp32=True)), 2e-3)
    error = _compare(got, head.step(CPU, torch.float64), 1e-2)
    for name, value in head.step(where.device, products=bf16).items():
        same_bits(f"{name}, a second time", value, got[name])
    return f"off by {error:.1g}"


@check("class centers: AdamW")
def head_optimizer(where: Where) -> str:
    """Lazy and dense, beyond one pass over the rows, against float64 on the CPU."""
    worst = 0.0
    num_classes = where.size(40_000, 2500)
    for lazy in (True, False):
        moved = []
        for device, dtype in ((CPU, torch.float64), (where.device, torch.float32)):
            centers = ShardedClassCenters(
                num_classes,
                16,
                normal_rows(16, 1, deviation=1.0),
                context=Context(device=device),
                weight_decay=0.1,
                lazy=lazy,
                dtype=dtype,
            )
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                touched = torch.randperm(num_classes, generator=generator)[: num_classes // 3]
                grad = random(len(touched), 16, seed=step).to(device, dtype)
                centers.zero_grad()
                centers.add_gradient(touched.sort().values, grad)
                centers.add_gradient(torch.arange(4), grad[:4])
                centers.step(0.1, torch.tensor(0.5, device=device))
            moved.append(centers.rows)
        worst = max(worst, close(f"lazy={lazy}", moved[1], moved[0], 1e-5))
    return f"off by {worst:.1g}"


# --- the contrastive loss ---


@check("contrastive loss: value and gradient")
def info_nce(where: Where) -> str:
    """Groups and repeated samples, in tiles and whole, against float64 on the CPU."""
    size, dim = where.size(3000, 100), where.size(512, 32)
    image, text = unit(size, dim), unit(size, dim, seed=1)
    labels = torch.arange(size)[:, None] % 7
    sample_id = torch.arange(size) // 2

    def step(device: torch.device, dtype: torch.dtype, tile: int) -> list[Tensor]:
        inputs = [x.to(device, dtype, copy=True).requires_grad_() for x in (image, text)]
        scale = torch.tensor(30.0, device=device, dtype=dtype, requires_grad=True)
        parts = parts_of(
            InfoNCE(tile=tile),
            image_features=inputs[0],
            text_features=inputs[1],
            logit_scale=scale,
            group_ids=labels.to(device),
            sample_id=sample_id.to(device),
        )
        parts["loss"].backward()
        found = [parts["loss"], *(x.grad for x in inputs), scale.grad]
        return [x for x in found if x is not None]

    wanted, worst = step(CPU, torch.float64, 2048), 0.0
    for tile in (where.size(700, 30), 4096):
        for name, got, want in zip(
            ("loss", "of images", "of texts", "of the scale"),
            step(where.device, torch.float32, tile),
            wanted,
            strict=True,
        ):
            worst = max(worst, close(f"tile {tile}: {name}", got, want, 2e-5))
    return f"off by {worst:.1g}"


@check("features: logits by cuBLAS are fp32")
def not_tf32(where: Where) -> str:
    """Products of fp32 keep its digits: TF32 would be off by 3e-4."""
    left, right = unit(512, 768), unit(512, 768, seed=1)
    got = left.to(where.device) @ right.to(where.device).T
    images, kernel = random(8, 3, 64, 64), random(32, 3, 16, 16, seed=1)
    error = close("product", got, left.double() @ right.double().T, 5e-6)
    wanted = functional.conv2d(images.double(), kernel.double(), stride=16)
    got = functional.conv2d(images.to(where.device), kernel.to(where.device), stride=16)
    return f"off by {max(error, close('convolution', got, wanted, 5e-6)):.1g}"
