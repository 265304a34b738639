"""What an epoch plan costs at scale: grouping the samples, a plan, one batch, and their memory.

Labels lie in a memory-mapped file, and are grouped into files, as ``train`` does it once a stage.
A plan is made of group sizes and steps, never of samples, so an epoch of millions is begun in
milliseconds; the reference is numpy's shuffle of all sample ids, which a sampler with a
permutation needs at every epoch.
"""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mclclip.data.arrays import write_npy_parts
from mclclip.data.coverage import check_coverage
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from mclclip.data.options import Policy
from tests.benchmarks import memory, timing

Integers = npt.NDArray[np.int64]
RADICES = (10, 10, 10)
CHUNK = 1 << 22


def group_sizes(num_samples: int, seed: int = 0) -> Integers:
    """Unequal sizes int64 [1000] that add up: three stages of ten unequal clusters."""
    rng = np.random.default_rng(seed)
    share = np.ones(1)
    for radix in RADICES:
        share = (share[:, None] * rng.dirichlet(np.full(radix, 2.0), size=len(share))).ravel()
    sizes = np.floor(share * num_samples).astype(np.int64)
    sizes[0] += num_samples - sizes.sum()
    return sizes


def write_labels(path: Path, num_samples: int) -> None:
    """Pseudo labels int64 [N] in random order, in groups of unequal sizes."""
    random = np.random.default_rng(1)
    with write_npy_parts(path, (num_samples,), np.int64) as append:
        for first in range(0, num_samples, CHUNK):
            sizes = group_sizes(min(CHUNK, num_samples - first))
            append(random.permutation(np.repeat(np.arange(len(sizes)), sizes)))


def group(labels_path: Path, directory: Path) -> None:
    """Groups the labels on disk; prints what that took, in this process, which did nothing else."""
    labels = np.load(labels_path, mmap_mode="r")
    labels.max()  # maps all of them, so that they are not counted as memory of the grouping
    spent = []

    def work() -> None:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        blocks = LabelBlocks(labels, RADICES)
        sizes = blocks.sizes()
        check_coverage(sizes, 8192, "backoff")
        spent.append(time.perf_counter() - start_s)
        StageGroups(directory).write(blocks, sizes, np.zeros(0, np.int64))
        spent.extend([time.perf_counter() - start_s, time.process_time() - start_cpu_s])

    peak = memory.peak_mib(work)
    print(
        f"\ngrouped {len(labels):,} labels: {spent[1]:.2f} s wall ({spent[0]:.2f} s of it for the "
        f"sizes of groups), {spent[2]:.2f} s CPU; peak {peak:,.0f} MiB beside the labels' "
        f"{labels.nbytes / 2**20:,.0f} MiB; {timing.machine()}"
    )


def drop_cache(path: Path) -> None:
    """Asks the system to forget a file."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def plan_of(grouped: GroupedIndex, batch: int, policy: Policy, epoch: int = 0) -> EpochPlan:
    """A plan as training makes it."""
    return EpochPlan(grouped, batch, policy, "proportional", seed=0, stage=3, epoch=epoch)


def held_mib(make: Callable[[], object]) -> float:
    """Largest memory that numpy and Python held at once while it ran."""
    tracemalloc.start()
    try:
        made = make()
        assert made is not None
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def cold_first_batch(directory: Path, batch: int) -> float:
    """Milliseconds of the first batch of a plan from files that are not in the cache."""
    drop_cache(directory / "sample_ids.npy")
    plan = plan_of(GroupedIndex.open(directory), batch, "backoff")
    start_s = time.perf_counter()
    plan.batch(0)
    return 1000 * (time.perf_counter() - start_s)


def measure(directory: Path, batch: int, rounds: int, shuffle: bool) -> None:
    """The table of one grouped index."""
    grouped = GroupedIndex.open(directory)
    turns = EpochPlan(grouped, batch, "backoff", "round_robin", seed=0, stage=3, epoch=0)
    levels = {turns.levels[depth].prefix_length: step for step, depth in enumerate(turns.depth)}
    variants: dict[str, Callable[[], object]] = {
        "open the grouped index": lambda: GroupedIndex.open(directory)
    }
    for policy in ("backoff", "drop"):
        variants[f"plan, {policy}"] = lambda policy=policy: plan_of(grouped, batch, policy)  # type: ignore[misc]
        variants[f"its next epoch, {policy}"] = partial(plan_of(grouped, batch, policy).of_epoch, 1)
    for length in sorted(levels, reverse=True):
        step = levels[length]
        variants[f"batch at prefix {length}"] = lambda step=step: turns.batch(step)  # type: ignore[misc]
    if shuffle:
        rng = np.random.default_rng(0)
        variants["shuffle of all ids (numpy)"] = lambda: rng.permutation(grouped.num_samples)
    timings = timing.interleave(variants, rounds)
    rows = [
        [
            name,
            timing.number(1000 * timings.wall_s(name)),
            timing.number(1000 * timings.cpu_s(name)),
            timing.number(timings.ratio(name, "plan, backoff")),
            timing.number(held_mib(call)),
        ]
        for name, call in variants.items()
    ]
    title = (
        f"{grouped.num_samples:,} samples, {grouped.num_groups:,} groups, global batch {batch:,}"
    )
    timing.print_table(
        f"{title}, {turns.steps_per_epoch:,} steps per epoch, {turns.remainder:,} samples left out",
        ["work", "wall ms", "CPU ms", "ratio to the plan", "peak MiB"],
        rows,
    )
    cold = [cold_first_batch(directory, batch) for _ in range(rounds)]
    print(f"\nfirst batch from a dropped cache: {np.median(cold):,.1f} ms (median of {rounds})")


def main(arguments: Sequence[str] | None = None) -> None:
    """12, 50 and 400 million samples, as far as the disk has room."""
    parser = timing.parser(__doc__)
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[12_000_000, 50_000_000, 400_000_000]
    )
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--folder", help="where the files are written, and removed; default: /tmp")
    options = timing.parse(parser, arguments, samples=[200_000, 1_000_000], batch=256)
    torch.set_num_threads(1)
    for number, samples in enumerate(options.samples):
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            status = os.statvfs(temporary)
            free = status.f_bavail * status.f_frsize
            if free < 3 * 8 * samples:
                print(f"\n{samples:,} samples left out: {free / 2**30:.0f} GiB free on the disk")
                continue
            labels, directory = Path(temporary) / "labels.npy", Path(temporary) / "grouped"
            write_labels(labels, samples)
            memory.in_fresh_process(group, labels, directory)
            measure(directory, options.batch, options.rounds, shuffle=number == 0)


if __name__ == "__main__":
    main()
