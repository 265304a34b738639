"""Figures of others' code beside ours: open_clip's training, and PartialFC's head."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import Margin, ShardedClassCenters, normal_rows
from mclclip.objectives.mlcd import ClassCenterLoss, negative_draw
from mclclip.objectives.products import EXACT, Products
from mclclip.ranks.process_group import Context, choose_peak_tflops
from tests.benchmarks import bench_training as bench
from tests.benchmarks import memory, peers
from tests.gpu import Skip
from tests.gpu.checks import Where, close
from tests.gpu.figures import Row, figure, in_turn, peak
from tests.gpu.training import one_rank
from tests.objective_loops import parts_of

SCALE, MARGIN = 64.0, 0.4


# --- open_clip_train ---


def open_clip_in_memory(model: str, batch: int, where: Where) -> Iterator[Row]:
    """open_clip's own entry point on one picture in memory, and our step as it is by default
    (deterministic), alone on a batch that lies on the GPU; then with groups, and not deterministic.
    All in bf16."""
    settings = [
        bench.Setting(model, batch, blocks, compiled, "bf16", 10, 2)
        for compiled in (True, False)
        for blocks in ("all", 6)
    ]
    if not where.on_gpu:
        settings = [bench.Setting("ViT-S-32-alt", 2, 1, False, "fp32", 1, 1)]
    for setting in settings:
        others = {}
        if setting is settings[0]:
            others["mclclip, 4 groups"] = replace(setting, groups=min(4, setting.batch))
            others["mclclip, not deterministic"] = replace(setting, deterministic=False)
        yield from _beside_open_clip(where, setting, others)


def open_clip_from_shards(model: str, batch: int, where: Where) -> Iterator[Row]:
    """open_clip's own entry point and ``mclclip train`` with its defaults, in bf16, compiled. Both
    read the same JPEGs, which are made here, by a worker for each core but one."""
    workers = max(1, (os.cpu_count() or 2) - 1) if where.on_gpu else 1
    shards = bench.write_jpegs(where.folder / "shards", workers, where.size(batch, 4))
    settings = [
        bench.Setting(model, batch, blocks, True, "bf16", 10, 2, shards, workers)
        for blocks in ("all", 6)
    ]
    if not where.on_gpu:
        settings = [bench.Setting("ViT-S-32-alt", 4, 1, False, "fp32", 1, 1, shards)]
    for setting in settings:
        yield from _beside_open_clip(where, setting, {})


def _beside_open_clip(
    where: Where, setting: bench.Setting, others: dict[str, bench.Setting]
) -> Iterator[Row]:
    """open_clip, ours and other variants of ours at one setting; shares of the GPU's peak are by
    our count of operations."""
    if not peers.can_run(reads_shards=bool(setting.shards)):
        raise Skip(peers.MISSING)
    found = {"open_clip": bench.theirs(setting)}
    promised = choose_peak_tflops(where.device)

    def seconds(title: str) -> float:
        """A GPU computes while its loader is waited for: only a CPU's waiting is left out."""
        return found[title].step_s - (0 if where.on_gpu else found[title].data_s)

    for name, variant in ({"mclclip": setting} | others).items():
        found[name] = memory.in_fresh_process(bench.ours, variant)
        for title in ["open_clip", "mclclip"] if name == "mclclip" else [name]:
            step_s = seconds(title)
            per_s = setting.batch / step_s
            share = per_s * found[name].operations / 1e12 / promised if promised else 0.0
            note = f"MFU {share:.1%} of {promised:.0f}, " if promised else ""
            note += f"{found[title].peak_gib:.1f} GiB, "
            note += f"waited {found[title].data_s:.3f} s of a step for data"
            ratio = step_s / seconds("open_clip")
            yield Row(f"{setting.title}: {title}", per_s, "samples/s", ratio, note)


for _model, _batch in (("ViT-L-14", 256), ("ViT-B-32", 1024)):
    _measure = partial(open_clip_in_memory, _model, _batch)
    figure(f"beside open_clip_train, in memory: {_model}", limit_s=530.0)(_measure)
    _measure = partial(open_clip_from_shards, _model, _batch)
    figure(f"beside open_clip_train, from shards: {_model}", limit_s=530.0)(_measure)


# --- PartialFC ---


@figure("PartialFC_V2 beside ours", limit_s=300.0)
def partial_fc(where: Where) -> Iterator[Row]:
    """insightface's head in fp16 and fp32 beside ``single_label`` in bf16 and fp32: a step draws
    negatives, computes the loss (CosFace's margin) and goes back; then AdamW moves the centers.

    PARTIAL_FC names the folder of partial_fc_v2.py and losses.py (see README.md)."""
    folder = os.environ.get("PARTIAL_FC")
    if folder is None or not (Path(folder) / "partial_fc_v2.py").is_file():
        raise Skip("set PARTIAL_FC to the folder of partial_fc_v2.py: see tests/gpu/README.md")
    sys.path.insert(0, folder)
    if not where.on_gpu:  # their code says cuda() of what it makes
        torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment]
    with one_rank(where):
        _same_loss(where)
        sizes = [(100_000, 4096), (1_000_000, 4096), (1_000_000, 1024)]
        for num_classes, batch in sizes if where.on_gpu else [(3000, 64)]:
            yield from _heads(where, num_classes, batch, where.size(512, 64))


def _their_head(where: Where, num_classes: int, dim: int, rate: float, fp16: bool) -> Any:
    module: Any = import_module("partial_fc_v2")
    margin = import_module("losses").CosFace(s=SCALE, m=MARGIN)
    return module.PartialFC_V2(margin, dim, num_classes, rate, fp16).to(where.device)


def _our_head(
    where: Where, num_classes: int, dim: int, rate: float, products: Products
) -> ClassCenterLoss:
    centers = ShardedClassCenters(
        num_classes,
        dim,
        normal_rows(dim, 0),
        context=Context(device=where.device),
        draw=None if rate == 1.0 else negative_draw(num_classes, rate, 0),
        rule="partial_fc",
    )
    margin = Margin("cos", MARGIN)
    return ClassCenterLoss(centers, "single_label", scale=SCALE, margin=margin, products=products)


def _batch(where: Where, num_classes: int, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Unit features on the device, and labels [size, 1] in main memory."""
    random = torch.Generator().manual_seed(0)
    raw = torch.randn(size, dim, generator=random)
    labels = torch.randint(num_classes, (size, 1), generator=random)
    return functional.normalize(raw, dim=1).to(where.device).requires_grad_(), labels


def _same_loss(where: Where, num_classes: int = 200, dim: int = 512) -> None:
    """Without a draw both compute one loss, and one gradient of the features. (In few dimensions
    some cosines are large, and PartialFC takes no probability for smaller than 1e-30.)"""
    features, labels = _batch(where, num_classes, 32, dim)
    mine = _our_head(where, num_classes, dim, 1.0, EXACT)
    theirs = _their_head(where, num_classes, dim, 1.0, False)
    theirs.weight.data.copy_(mine.centers.rows)
    mine.centers.begin(0)
    unit = functional.normalize(features, dim=1)  # as theirs does, for the gradient
    ours = parts_of(mine, image_features=unit, classes=labels)["loss"]
    other = theirs(features, labels.to(where.device, copy=True))
    close("loss", ours, other, 1e-5)
    gradients = [torch.autograd.grad(loss, features)[0] for loss in (ours, other)]
    close("gradient of the features", gradients[0], gradients[1], 1e-4)


def _heads(where: Where, num_classes: int, size: int, dim: int, rate: float = 0.1) -> Iterator[Row]:
    features, labels = _batch(where, num_classes, size, dim)
    bf16 = Products(bf16=True, as_fp32=not where.on_gpu)
    first_s = dict[str, float]()
    for name, half in (("PartialFC_V2", True), ("mclclip", True), ("PartialFC_V2", False),
                       ("mclclip", False)):  # fmt: skip
        if name == "mclclip":
            step, move = _our_steps(
                _our_head(where, num_classes, dim, rate, bf16 if half else EXACT), features, labels
            )
            precision = "bf16" if half else "fp32"
        else:
            step, move = _their_steps(
                _their_head(where, num_classes, dim, rate, half), features, labels.to(where.device)
            )
            precision = "fp16" if half else "fp32"
        taken = in_turn({"step": step, "AdamW": move}, where.device, 7 if where.on_gpu else 3)
        with peak(where.device) as held:
            step()
        for what, took in taken.items():
            title = f"K = {num_classes:,}, B = {size:,}, r = {rate}, D = {dim}: {what}, {name}"
            ratio = took / first_s.setdefault(what, took)
            note = f"{held[0]:.2f} GiB" if what == "step" else ""
            yield Row(f"{title} {precision}", 1000 * took, "ms", ratio, note)
        del step, move


def _our_steps(
    head: ClassCenterLoss, features: Tensor, labels: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    def step() -> None:
        features.grad = None
        head.centers.zero_grad()
        head.centers.begin(0)
        parts_of(head, image_features=features, classes=labels)["loss"].backward()  # type: ignore[no-untyped-call]

    return step, partial(head.centers.step, 1e-6)


def _their_steps(
    head: Any, features: Tensor, labels: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    fused = features.is_cuda
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-6, weight_decay=0.0, fused=fused)

    def step() -> None:
        features.grad = None
        optimizer.zero_grad()
        head(features, labels.clone()).backward()  # it overwrites labels

    def move() -> None:
        optimizer.step()

    return step, move
