"""The head over class centers: MLCD and MLC beside the softmax over one label, and the floor.

A step is drawing the negatives, forward and backward, in fp32. ``MLC, separate sums`` is the
reference of ``reference_heads``: all logits at once, positives gathered label by label, P and N in
separate all-reduces. The floor counts the four matrix products of features and drawn classes (the
scores twice, two gradients) and three products per positive, and the bytes of features and touched
class centers (read twice, their gradient written), each at the speed that this machine shows in
the same rounds, one after the other. Shares and extrapolations go by CPU time, which other programs
hardly move (on a GPU by wall time). The optimizer of the class centers is timed beside it. Memory
is the peak of a step above parameters, their gradients and the optimizer's state.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import ShardedClassCenters, normal_rows
from mclclip.objectives.mlcd import ClassCenterLoss, Kind, negative_draw
from mclclip.objectives.products import EXACT, Products
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from tests.benchmarks import memory, timing
from tests.benchmarks.reference_heads import ReferenceHead
from tests.distributed.conftest import RankPool
from tests.objective_loops import parts_of

Head = Callable[[Tensor, Tensor], dict[str, Tensor]]
SINGLE, MLCD, SEPARATE = "single label", "MLCD", "MLC, separate sums"
WHOLE = "MLCD, whole logits"
FAR = (8_192, 16_384, 32_768)
SIDE, COPIED = 2048, 64 * 2**20  # of the products and the copies that show the machine's speed


@dataclass(frozen=True)
class Setting:
    """The size of a head and of its global batch."""

    num_classes: int
    batch: int
    dim: int = 512
    labels: int = 8
    rate: float = 0.1
    device: str = "cpu"

    def floor(self, num_labels: int) -> tuple[float, float]:
        """(FLOP, bytes) of a step of all ranks."""
        negatives, pairs = round(self.rate * self.num_classes), self.batch * num_labels
        flop = (8.0 * self.batch * negatives + 6.0 * pairs) * self.dim
        missed = (1 - 1 / self.num_classes) ** pairs * (1 - self.rate)
        touched = self.num_classes * (1 - missed)
        return flop, 3 * 4.0 * self.dim * (touched + self.batch)


def head_of(centers: ShardedClassCenters, kind: Kind, products: Products = EXACT) -> Head:
    """Returns our loss as a function of features and labels."""
    loss = ClassCenterLoss(centers, kind, products=products)
    return lambda features, labels: parts_of(loss, image_features=features, classes=labels)


class Steps:
    """One set of class centers and one batch on this rank, and the heads that are compared."""

    def __init__(self, setting: Setting, dtype: torch.dtype = torch.float32) -> None:
        ranks, rank = collectives.world_size(), collectives.rank()
        device = torch.device(setting.device)
        random = torch.Generator().manual_seed(0)
        size = (setting.batch, 1)
        first = torch.randint(setting.num_classes, size, generator=random)
        stride = torch.randint(1, setting.num_classes // setting.labels, size, generator=random)
        labels = (first + stride * torch.arange(setting.labels)) % setting.num_classes
        raw = torch.randn(setting.batch, setting.dim, generator=random, dtype=dtype)
        rows = slice(rank * setting.batch // ranks, (rank + 1) * setting.batch // ranks)
        self.labels = labels[rows].to(device)
        self.features = functional.normalize(raw[rows].to(device), dim=1).requires_grad_()
        self.centers = ShardedClassCenters(
            setting.num_classes,
            setting.dim,
            normal_rows(setting.dim, 0),
            context=Context(rank, ranks, device=device),
            draw=negative_draw(setting.num_classes, setting.rate, 0),
            dtype=dtype,
        )
        kinds: dict[str, Kind] = {SINGLE: "single_label", MLCD: "mlcd", "MLC": "mlc"}
        self.heads: dict[str, Head] = {
            **{name: head_of(self.centers, kind) for name, kind in kinds.items()},
            SEPARATE: ReferenceHead(self.centers, "mlc", per_label=True),
            WHOLE: ReferenceHead(self.centers, "mlcd"),
        }
        self._steps = {name: itertools.count() for name in self.heads}

    def step(self, name: str) -> list[Tensor]:
        """The loss, and what it gives features and class centers."""
        self.features.grad = None
        self.centers.zero_grad()
        self.centers.begin(next(self._steps[name]))
        loss = self.heads[name](self.features, self.labels)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        assert self.features.grad is not None and self.centers.grad is not None
        return [loss.detach(), self.features.grad, self.centers.grad]

    def optimize(self, lazy: bool) -> None:
        """A step of the class centers along the gradient they have, which leaves them in place."""
        self.centers.lazy = lazy
        self.centers.step(0.0)


def timed(work: Callable[[], object], device: str) -> timing.Spent:
    """With the device waited for."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return timing.Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def run(setting: Setting, names: Sequence[str], seconds: float, rounds: int) -> timing.Timings:
    """On this rank, for about so long: the heads, the optimizer, and the machine's speed."""
    torch.set_num_threads(1)
    steps = Steps(setting)
    one, other = (torch.ones(SIDE, SIDE, device=setting.device) for _ in range(2))
    source = torch.ones(COPIED, device=setting.device)
    target = torch.empty_like(source)
    work: dict[str, Callable[[], object]] = {name: partial(steps.step, name) for name in names}
    work |= {"lazy": partial(steps.optimize, True), "dense": partial(steps.optimize, False)}
    work |= {"product": lambda: torch.mm(one, other), "copy": lambda: target.copy_(source)}
    variants = {name: partial(timed, call, setting.device) for name, call in work.items()}
    for name in (names[0], "product", "copy"):  # memory is given out at first use
        work[name]()
    first = timing.interleave(variants, 1, warm_ups=0)
    took = sum(collectives.gather_objects(first.wall_s(name))[0] for name in work)
    if took > seconds / 2:
        return first
    return timing.interleave(variants, min(rounds, int(seconds / took)), warm_ups=0)


# --- exactness and memory ------------------------------------------------------------------------


def deviation() -> float:
    """Largest difference between ours and the references, float64, of the norm."""
    steps = Steps(Setting(num_classes=600, batch=96, dim=32), torch.float64)
    pairs = [(MLCD, WHOLE), ("MLC", SEPARATE)]
    found = [zip(steps.step(one), steps.step(other), strict=True) for one, other in pairs]
    return max(float((a - b).norm() / b.norm()) for pair in found for a, b in pair)


def peak(name: str, setting: Setting) -> float:
    """MiB of a step above parameters, gradients and optimizer state; in a fresh process."""
    torch.set_num_threads(1)
    steps = Steps(setting)
    few, many = slice(32), (steps.features, steps.labels)
    steps.features = steps.features.detach()[few].clone().requires_grad_()
    steps.labels = steps.labels[few]
    steps.step(name)  # libraries and their buffers are loaded at first use
    (steps.features, steps.labels), steps.features.grad = many, None
    steps.centers.zero_grad()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps.step(name)
        above = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        above = memory.peak_mib(lambda: steps.step(name))
    assert steps.centers.grad is not None
    return above - (steps.centers.grad.nbytes + steps.features.nbytes) / 2**20


def report_memory(setting: Setting) -> None:
    """Ours beside the version that materialises the logits."""
    found = {n: memory.in_fresh_process(peak, n, setting) for n in (SINGLE, MLCD, WHOLE)}
    timing.print_table(
        f"peak memory above parameters, gradients and optimizer state, {_size(setting)}",
        ["head", "MiB", "of whole logits"],
        [[n, timing.number(m), f"{m / found[WHOLE]:.3f}"] for n, m in found.items()],
    )


# --- the table -----------------------------------------------------------------------------------


def _size(setting: Setting) -> str:
    return (
        f"k = {setting.num_classes:,}, B = {setting.batch:,}, l = {setting.labels}, "
        f"r = {setting.rate}, D = {setting.dim}, {setting.device}"
    )


def report(setting: Setting, names: Sequence[str], timings: timing.Timings, ranks: int) -> None:
    """One size: heads with ratios and floors, and the optimizer."""
    taken_s = _clock(setting, timings)
    speed = 2.0 * SIDE**3 / taken_s("product")
    bandwidth = 2 * 4.0 * COPIED / taken_s("copy")
    rows = []
    for row in timings.rows(SINGLE, setting.batch, names):
        flop, size = setting.floor(1 if row[0] == SINGLE else setting.labels)
        floor_s = (flop / speed + size / bandwidth) / ranks
        cells = [timing.number(x) for x in (flop / 1e9, size / 2**20, 1000 * floor_s)]
        rows.append([*row, *cells, f"{floor_s / taken_s(row[0]):.2f}"])
    for name in ("lazy", "dense"):
        times = [timing.number(1000 * t) for t in (timings.wall_s(name), timings.cpu_s(name))]
        rows.append([f"AdamW of the class centers, {name}", *times, *[""] * 7])
    rounds = len(timings.spent["copy"])
    timing.print_table(
        f"a step of the head, {_size(setting)}, {ranks} rank(s), {rounds} round(s); products "
        f"{speed / 1e9:,.0f} GFLOP/s, copies {bandwidth / 1e9:,.0f} GB/s",
        [*timing.headers("head", "samples"), "GFLOP", "MiB", "floor ms", "floor / time"],
        rows,
    )


def _clock(setting: Setting, timings: timing.Timings) -> Callable[[str], float]:
    """Seconds of a variant that noise moves least."""
    return timings.wall_s if setting.device == "cuda" else timings.cpu_s


def extrapolate(found: Mapping[Setting, timing.Timings], names: Sequence[str]) -> None:
    """Larger batches than were measured, along the line through the largest two."""
    near, far = sorted(found, key=lambda setting: setting.batch)[-2:]
    one, other = _clock(near, found[near]), _clock(far, found[far])
    rows = []
    for batch in (size for size in FAR if size > far.batch):
        along = (batch - far.batch) / (far.batch - near.batch)
        at = {name: other(name) + (other(name) - one(name)) * along for name in names}
        for name in names:
            ratio = f"{at[name] / at[SINGLE]:.3f}"
            rows.append([f"{name}, B = {batch:,}, EXTRAPOLATED", timing.number(at[name]), ratio])
    if rows:
        title = f"k = {far.num_classes:,}: EXTRAPOLATED from B = {near.batch:,} and {far.batch:,}"
        timing.print_table(title, ["head", "s per step", "ratio"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """About ten minutes."""
    parser = timing.parser(__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1_024, 4_096])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--labels", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=60.0, help="per size, about")
    parser.add_argument("--ranks", type=int, default=1, help="processes on gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--skip", nargs="+", default=[], metavar="HEAD", help=f'"{SEPARATE}"')
    parser.add_argument("--memory", type=int, nargs=2, default=[1_000_000, 4_096])
    small = {"classes": [10_000], "batches": [256], "seconds": 2.0, "memory": [10_000, 256]}
    options = timing.parse(parser, arguments, **small)
    names = [n for n in (SINGLE, MLCD, "MLC", SEPARATE) if n not in options.skip]
    torch.set_num_threads(1)
    sizes = (options.dim, options.labels, options.rate, options.device)
    print(f"deviation from the references, float64: {deviation():.1e} of the norm")
    pool = RankPool()
    try:
        for num_classes in options.classes:
            found = {}
            for batch in options.batches:
                setting = Setting(num_classes, batch, *sizes)
                how = (setting, names, options.seconds, options.rounds)
                if options.ranks == 1:
                    found[setting] = run(*how)
                else:
                    found[setting] = pool(options.ranks, run, *how, timeout_s=3600.0)[0]
                report(setting, names, found[setting], options.ranks)
            if len(found) > 1:
                extrapolate(found, names)
    finally:
        pool.kill()
    if options.memory[0]:
        num_classes, batch = options.memory
        report_memory(Setting(num_classes, batch, *sizes))


if __name__ == "__main__":
    main()
