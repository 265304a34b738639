"""What an epoch plan costs at scale: building it, one batch of it, and its memory.

A plan is made of group sizes and steps, never of samples, so an epoch of millions is begun in
milliseconds; the reference is numpy's shuffle of all sample ids, which a sampler with a
permutation needs at every epoch. The larger grouped index is written as memory-mapped files
directly (its content does not matter here); building one takes the labels and their sort in
memory, and is measured at the smaller size.
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

from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, Policy
from mclclip.files import write_json
from tests.benchmarks import timing

Integers = npt.NDArray[np.int64]
RADICES = (10, 10, 10)
CHUNK = 1 << 24


def group_sizes(num_samples: int, seed: int = 0) -> Integers:
    """Unequal sizes int64 [1000] that add up: three stages of ten unequal clusters."""
    rng = np.random.default_rng(seed)
    share = np.ones(1)
    for radix in RADICES:
        share = (share[:, None] * rng.dirichlet(np.full(radix, 2.0), size=len(share))).ravel()
    sizes = np.floor(share * num_samples).astype(np.int64)
    sizes[0] += num_samples - sizes.sum()
    return sizes


def labels_of(sizes: Integers) -> Integers:
    """Pseudo labels int64 [N] in random order, with these group sizes."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(1).shuffle(labels)
    return labels


def write_grouped(directory: Path, sizes: Integers) -> None:
    """A grouped index as files, whose sample ids simply count up."""
    directory.mkdir(parents=True)
    total = int(sizes.sum())
    ids = np.lib.format.open_memmap(
        directory / "sample_ids.npy", mode="w+", dtype=np.int64, shape=(total,)
    )
    for first in range(0, total, CHUNK):
        ids[first : first + CHUNK] = np.arange(first, min(first + CHUNK, total))
    ids.flush()
    np.save(directory / "group_starts.npy", np.append(0, np.cumsum(sizes)))
    np.save(directory / "group_labels.npy", np.arange(len(sizes)))
    counts = {"num_samples": total, "num_groups": len(sizes)}
    header = {"radices": list(RADICES), "digest": "synthetic"}
    write_json(directory / "grouped_index.json", header | counts)


def drop_cache(path: Path) -> None:
    """Asks the system to forget a file."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def plan_of(grouped: GroupedIndex, batch: int, policy: Policy, epoch: int = 0) -> EpochPlan:
    """A plan as training makes it."""
    return EpochPlan(grouped, batch, policy, "proportional", seed=0, stage=3, epoch=epoch)


def peak_mib(make: Callable[[], object]) -> float:
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
    tree = turns._tree
    levels = {tree.levels[depth].prefix_length: step for step, depth in enumerate(tree.level)}
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
            timing.number(peak_mib(call)),
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


def build(sizes: Integers, directory: Path) -> None:
    """Building and writing the grouped index from labels, once."""
    labels = labels_of(sizes)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    grouped = GroupedIndex.build(labels, RADICES)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    start_s = time.perf_counter()
    grouped.save(directory)
    saved_s = time.perf_counter() - start_s
    peak = peak_mib(lambda: GroupedIndex.build(labels, RADICES))
    print(
        f"\ngrouped index of {len(labels):,} labels: build {wall_s:.2f} s wall, {cpu_s:.2f} s CPU, "
        f"peak {peak:,.0f} MiB beside the labels; save (digest, fsync) {saved_s:.2f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """12 million samples, then 400 million from memory-mapped files where the disk has room."""
    parser = timing.parser(__doc__)
    parser.add_argument("--samples", type=int, default=12_000_000)
    parser.add_argument("--mapped", type=int, default=400_000_000, help="0: leave it out")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--mapped-batch", type=int, default=32_768)
    options = timing.parse(
        parser, arguments, samples=200_000, mapped=1_000_000, batch=256, mapped_batch=1024
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        small, large = Path(temporary) / "small", Path(temporary) / "large"
        build(group_sizes(options.samples), small)
        measure(small, options.batch, options.rounds, shuffle=True)
        status = os.statvfs(temporary)
        free = status.f_bavail * status.f_frsize
        if options.mapped and free > 3 * 8 * options.mapped:
            write_grouped(large, group_sizes(options.mapped))
            measure(large, options.mapped_batch, options.rounds, shuffle=False)
        elif options.mapped:
            print(f"\n{options.mapped:,} samples left out: {free / 2**30:.0f} GiB free on the disk")


if __name__ == "__main__":
    main()
