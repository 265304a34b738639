"""What GPUs are measured by: heads, k-means, training steps; see README.md for what decides what.

Variants of a comparison run in turn in one process, round after round; a figure is the median.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from mclclip.clustering.arithmetic import Arithmetic, sums_in_float32
from mclclip.data.arrays import cut_blocks
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.class_centers import ShardedClassCenters, normal_rows
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.mlcd import ClassCenterLoss, negative_draw
from mclclip.objectives.products import EXACT, Products
from mclclip.ranks.process_group import Context, pick_device
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.benchmarks import memory, synthetic
from tests.gpu import Skip
from tests.gpu.checks import Check, Where, Work, no_faiss
from tests.nearest_checks import fit
from tests.objective_loops import parts_of

PEAKS = {
    "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "A10": 125.0,
    "B200": 2250.0, "RTX 4090": 165.0,
}  # fmt: skip
"""Dense bf16 TFLOP/s by the makers' data sheets; the first name that fits counts."""
FIGURES: dict[str, Check] = {}


@dataclass(frozen=True)
class Row:
    """One line of the table: ``ratio`` is to the first variant of the figure, None without one."""

    variant: str
    value: float | None
    unit: str
    ratio: float | None = None
    note: str = ""


def figure(name: str, limit_s: float) -> Callable[[Work], Work]:
    """Makes a figure of a function of Where, which yields rows."""

    def register(function: Work) -> Work:
        FIGURES[name] = Check(function, limit_s)
        return function

    return register


def entries() -> dict[str, Check]:
    """Every figure by its name."""
    for module in ("kernels", "embedding"):
        import_module(f"tests.gpu.{module}")  # registers its own
    return FIGURES


def run(name: str, device: str, folder: Path) -> list[dict[str, Any]]:
    """Measures one figure on ``device`` (cuda or cpu)."""
    where = Where(pick_device(device), folder)
    rows = []
    for row in entries()[name].work(where):
        rows.append(vars(row))
        (folder / "partial.json").write_text(json.dumps(rows))  # if the next one fails
    return rows


# --- clocks ---


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, the device waited for."""
    _wait(device)
    begun = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begun


def _host_s(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Median seconds after which the host has queued the work; it hides behind the device's in a
    training whose other work takes longer."""
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
        _wait(device)
    return statistics.median(taken)


def in_turn(
    variants: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Median seconds of each variant after one call that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(-1, rounds):
        for name, work in variants.items():
            spent = seconds(work, device)
            if number >= 0:
                taken[name].append(spent)
    return {name: statistics.median(times) for name, times in taken.items()}


@contextmanager
def peak(device: torch.device) -> Iterator[list[float]]:
    """Fills in the GiB that the block has held on the GPU above what was held before (0: a CPU)."""
    found = [0.0]
    if device.type != "cuda":
        yield found
        return
    _wait(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield found
    _wait(device)
    found[0] = (torch.cuda.max_memory_allocated(device) - before) / 2**30


# --- the machine ---


def products_per_s(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """TFLOP/s of a square product."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    took = in_turn({"product": lambda: a @ b}, device, 5)["product"]
    return 2.0 * side**3 / took / 1e12


@figure("machine", limit_s=60.0)
def machine(where: Where) -> Iterator[Row]:
    """What products and copies reach here."""
    side = where.size(8192, 512)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        yield Row(
            f"product of {side} x {side}, {name}",
            products_per_s(where.device, dtype, side),
            "TFLOP/s",
        )
    source = torch.empty(where.size(2**30, 2**24), dtype=torch.uint8, device=where.device)
    took = in_turn({"copy": source.clone}, where.device, 5)["copy"]
    yield Row("copy on the device", 2 * len(source) / took / 1e9, "GB/s")
    if where.on_gpu:
        pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        took = in_turn({"up": lambda: pinned.to(where.device)}, where.device, 5)["up"]
        yield Row("copy from pinned memory", len(pinned) / took / 1e9, "GB/s")


# --- the head ---


@figure("head", limit_s=150.0)
def heads(where: Where) -> Iterator[Row]:
    """A step of MLCD: draw, forward, backward; with products in bf16 and in fp32."""
    sizes = [(100_000, 4096, 0.1), (1_000_000, 4096, 0.1), (1_000_000, 1024, 0.1)]
    for num_classes, batch, rate in sizes if where.on_gpu else [(3000, 64, 0.1)]:
        yield from _head(where, num_classes, batch, rate, where.size(512, 64))


def _head(where: Where, num_classes: int, batch: int, rate: float, dim: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (batch, 8), generator=generator)
    raw = torch.randn(batch, dim, generator=generator).to(where.device)
    features = functional.normalize(raw, dim=1).requires_grad_()
    centers = ShardedClassCenters(
        num_classes,
        dim,
        normal_rows(dim, 0),
        context=Context(device=where.device),
        draw=negative_draw(num_classes, rate, 0),
    )

    def step(products: Products) -> None:
        features.grad = None
        centers.zero_grad()
        centers.begin(0)
        loss = ClassCenterLoss(centers, "mlcd", products=products)
        parts_of(loss, image_features=features, classes=labels)["loss"].backward()

    steps = {
        "bf16": partial(step, Products(bf16=True, as_fp32=not where.on_gpu)),
        "fp32": partial(step, EXACT),
    }
    taken = in_turn(steps, where.device, 7 if where.on_gpu else 3)
    hosts = {name: _host_s(step, where.device) for name, step in steps.items()}
    flop = 8.0 * batch * round(rate * num_classes) * dim
    for name, took in taken.items():
        with peak(where.device) as held:
            steps[name]()
        yield Row(
            f"K = {num_classes:,}, B = {batch:,}, r = {rate}, D = {dim}: {name}",
            1000 * took,
            "ms",
            took / taken["bf16"],
            f"{flop / took / 1e12:.1f} TFLOP/s, {held[0]:.2f} GiB, "
            f"the host returns after {1000 * hosts[name]:.1f} ms",
        )
    for lazy in (True, False):
        centers.lazy = lazy
        took = in_turn({"AdamW": partial(centers.step, 1e-6)}, where.device, 5)["AdamW"]
        title = f"K = {num_classes:,}, B = {batch:,}: AdamW, {'lazy' if lazy else 'dense'}"
        yield Row(title, 1000 * took, "ms")


# --- k-means ---


@figure("k-means: products in fp32, in bf16, faiss-gpu", limit_s=240.0)
def clusters(where: Where) -> Iterator[Row]:
    """An iteration is an assignment of all rows and an update."""
    sizes = [(1_000_000, 10), (1_000_000, 1000), (400_000, 20_000), (131_072, 65_536)]
    for num_rows, num_clusters in sizes if where.on_gpu else [(4000, 64)]:
        yield from _kmeans(where, num_rows, num_clusters, where.size(512, 32))


def _kmeans(where: Where, num_rows: int, num_clusters: int, dim: int) -> Iterator[Row]:
    device = where.device
    rows = _rows(device, num_rows, dim)
    start = rows[np.random.default_rng(1).choice(num_rows, num_clusters, replace=False)]
    inertia: dict[str, float] = {}

    def ours(name: str, arithmetic: Arithmetic, updates: int) -> None:
        found = fit(
            cut_blocks([rows]),
            num_clusters,
            initial=torch.from_numpy(start),
            max_iterations=updates,
            tolerance=-1.0,
            context=Context(device=device),
            arithmetic=arithmetic,
        )
        inertia[name] = found.inertia

    def exact_sums(name: str, updates: int) -> None:
        with sums_in_float32():
            ours(name, Arithmetic(products="bfloat16"), updates)

    full, half, split = "fp32 products", "bf16 products, sums in fp32", "bf16 products"
    variants: dict[str, Callable[[int], None]] = {
        full: partial(ours, full, Arithmetic(products="float32")),
        half: partial(exact_sums, half),
        split: partial(ours, split, Arithmetic(products="bfloat16")),
    }
    if (why := no_faiss(where)) is None:
        variants["faiss-gpu"] = partial(_faiss, rows, start)
    each = _per_update(variants, device)
    for name, spent in each.items():
        title = f"K = {num_clusters:,}, {num_rows:,} x {dim}: {name}"
        note = f"inertia {inertia[name]:.7g}" if name in inertia else ""
        yield Row(title, 1000 * spent, "ms per iteration", spent / each[full], note)
    if why is not None:
        yield Row("faiss-gpu", None, "", note=why)


def _rows(device: torch.device, num_rows: int, dim: int) -> Any:
    """Unit rows around 300 centers, in main memory."""
    random = torch.Generator(device).manual_seed(0)
    centers = torch.randn(300, dim, device=device, generator=random)
    label = torch.randint(300, (num_rows,), device=device, generator=random)
    noise = torch.randn(num_rows, dim, device=device, generator=random)
    return functional.normalize(centers[label] + 1.5 * noise, dim=1).cpu().numpy()


def _per_update(
    variants: Mapping[str, Callable[[int], None]], device: torch.device, few: int = 1, more: int = 5
) -> dict[str, float]:
    """Seconds of one more update: reading the rows, and what happens once, is not counted."""
    both = {
        (name, updates): partial(work, updates)
        for name, work in variants.items()
        for updates in (few, more)
    }
    named = {f"{name} {updates}": work for (name, updates), work in both.items()}
    taken = in_turn(named, device, 2)
    return {
        name: max(taken[f"{name} {more}"] - taken[f"{name} {few}"], 1e-9) / (more - few)
        for name in variants
    }


def _faiss(rows: Any, start: Any, updates: int) -> None:
    import faiss

    found = faiss.Kmeans(
        rows.shape[1],
        len(start),
        niter=updates,
        spherical=True,
        gpu=1,
        max_points_per_centroid=len(rows),
        min_points_per_centroid=1,
    )
    found.train(rows, init_centroids=start)


# --- training steps ---


@dataclass(frozen=True)
class Step:
    """A training step of a model on synthetic pictures and captions."""

    model: Any = "ViT-L-14"
    batch: int = 256
    locked: bool = False
    compiled: bool = False
    deterministic: bool = False
    precision: str = "bf16"

    @property
    def title(self) -> str:
        parts = [
            "6 blocks, text cached" if self.locked else "all trained",
            "compiled" if self.compiled else "",
            "deterministic" if self.deterministic else "",
        ]
        return ", ".join(part for part in parts if part)

    def engine(self, device: torch.device) -> tuple[Engine, Any]:
        """The engine and its batch."""
        model = load_towers(self.model, seed=0)
        if self.locked:
            blocks = min(6, model.num_blocks)
            model.lock(blocks, True, True, text=False, logit_scale=True)
        model.to(device).train()
        if self.compiled:
            model.compile_blocks()
        batch = synthetic.batch(self.batch, model.image_size)
        assert batch.text is not None
        batch.text = batch.text[:, : model.clip.context_length]
        if self.locked:  # as a recipe with a frozen text tower trains: on its stored embeddings
            random = torch.Generator().manual_seed(1)
            batch.text = None
            batch.text_features = torch.randn(self.batch, model.embed_dim, generator=random)
        trainee = ModelWithObjective(model, InfoNCE(), self.precision)
        make = partial(build_optimizer, weight_decay=0.2)
        return Engine(trainee, make, Context(device=device)), batch.to(device)


def measure(step: Step, device: torch.device, rounds: int) -> tuple[float, float, float]:
    """(seconds, FLOP, GiB) of a step; FLOP are 0 where it is compiled, which hides them."""
    pick_device(device.type, deterministic=step.deterministic)
    if not step.deterministic:
        torch.use_deterministic_algorithms(False)
    engine, batch = step.engine(device)
    with peak(device) as held:
        for _ in range(3):
            engine.update(batch, lr=1e-6)
    taken = [seconds(partial(engine.update, batch, 1e-6), device) for _ in range(rounds)]
    if step.compiled:
        return statistics.median(taken), 0.0, held[0]
    with FlopCounterMode(display=False) as counter:
        engine.update(batch, lr=1e-6)
    return statistics.median(taken), float(counter.get_total_flops()), held[0]


@figure("MFU: ViT-L-14 unlocked", limit_s=200.0)
def unlocked(where: Where) -> Iterator[Row]:
    """Model FLOP of a step by its time, of what the maker promises and of what products reach."""
    yield from _mfu(where, Step(batch=where.size(256, 4)))


@figure("MFU: ViT-L-14 locked", limit_s=200.0)
def locked(where: Where) -> Iterator[Row]:
    """As ``cc12m_vitl14`` trains: the last six image blocks, stored text embeddings."""
    yield from _mfu(where, Step(batch=where.size(512, 4), locked=True))


def _mfu(where: Where, step: Step, variants: Sequence[Step] = ()) -> Iterator[Row]:
    variants = variants or [step, replace(step, deterministic=True)]
    if not where.on_gpu:
        variants = [replace(one, model=tiny.MODEL, precision="fp32") for one in variants]
    reached = products_per_s(where.device, torch.bfloat16, where.size(8192, 256))
    name = torch.cuda.get_device_name(where.device) if where.on_gpu else ""
    promised = next((peak for key, peak in PEAKS.items() if key in name), None)
    first_s, flop = 0.0, 0.0
    for variant in variants:
        step_s, counted, held = measure(variant, where.device, where.size(10, 2))
        first_s, flop = first_s or step_s, flop or counted
        per_s = flop / step_s / 1e12
        share = f"MFU {per_s / promised:.1%} of {promised:.0f}, " if promised else ""
        yield Row(
            f"{'' if where.on_gpu else 'tiny model, '}batch {variant.batch}, {variant.title}",
            variant.batch / step_s,
            "samples/s",
            step_s / first_s,
            f"{share}{per_s:.1f} TFLOP/s ({per_s / reached:.1%} of products), {held:.1f} GiB",
        )


def beside_open_clip(model: str, batch: int, where: Where) -> Iterator[Row]:
    """open_clip's own entry point on one picture in memory, and our step as it is by default
    (deterministic), with groups, and not deterministic; all in bf16, with the text tower locked.
    Ours is of the step alone, on a batch that lies on the GPU. See
    tests.benchmarks.bench_training."""
    from tests.benchmarks import bench_training as bench
    from tests.benchmarks import peers

    interpreter = peers.python(reads_shards=False)
    if interpreter is None:
        raise Skip(peers.MISSING)
    settings = [
        bench.Setting(model, batch, "all", True, "bf16", 10, 2),
        bench.Setting(model, batch, "all", False, "bf16", 10, 2),
        bench.Setting(model, batch, 6, True, "bf16", 10, 2),
        bench.Setting(model, batch, 6, False, "bf16", 10, 2),
    ]
    if not where.on_gpu:
        settings = [bench.Setting("ViT-S-32-alt", 2, 1, False, "fp32", 1, 1)]
    for setting in settings:
        variants: dict[str, Callable[[], bench.Measured]] = {
            "open_clip": partial(bench.theirs, setting, interpreter)
        }
        for name, groups, deterministic in (
            ("mclclip", 1, True), ("mclclip, 4 groups", 4, True),
            ("mclclip, not deterministic", 1, False),
        ):  # fmt: skip
            ours = replace(setting, groups=groups, deterministic=deterministic)
            variants[name] = partial(memory.in_fresh_process, bench.ours, ours)
        title = f"batch {setting.batch}, {setting.image_blocks} blocks"
        title += ", compiled" if setting.compiled else ""
        first_s = 0.0
        for name, measured in variants.items():
            found = measured()
            # A GPU computes while its loader is waited for: only a CPU's waiting is left out.
            step_s = found.step_s - (0 if where.on_gpu else found.data_s)
            first_s = first_s or step_s
            note = f"{found.peak_gib:.1f} GiB, waited {found.data_s:.3f} s of a step for data"
            yield Row(
                f"{title}: {name}", setting.batch / step_s, "samples/s", step_s / first_s, note
            )


for _model, _batch in (("ViT-L-14", 256), ("ViT-B-32", 1024)):
    _measure = partial(beside_open_clip, _model, _batch)
    figure(f"beside open_clip_train: {_model}", limit_s=500.0)(_measure)


@figure("compile=model: ViT-L-14 unlocked", limit_s=180.0)
def compiled(where: Where) -> Iterator[Row]:
    """Beside the same step as it is; compiling, a minute or two, is not counted."""
    if not where.on_gpu:
        raise Skip("compiles for minutes on a CPU")
    step = Step(batch=256)
    fused = replace(step, compiled=True)
    yield from _mfu(where, step, [step, fused, replace(fused, deterministic=True)])
