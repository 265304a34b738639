"""Plans and batches are those that were recorded before batches had views and plans a shared tree.

``batches.json`` holds 16 digits per plan (of several epochs) and per data set read. ``python -m
tests.golden.test_batches`` prints it anew, which is right only where the order of samples, their
captions or their augmentation are meant to change.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mclclip.data.batches import TrainingBatches
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, group_samples
from tests.unit.data.test_batches import LABELS, RADICES, augment, make, make_index, plain

RECORDED = Path(__file__).with_name("batches.json")
POLICIES, ORDERS = ("drop", "backoff", "mask", "wrap"), ("round_robin", "proportional")
KEYS = ((7, 0), (2**40, 3))  # (seed, stage)
EPOCHS = (0, 17)
BAD = set(range(3, 240, 5))


def _groups() -> dict[str, tuple[GroupedIndex, int]]:
    """Grouped index and global batch by name: one group, a deep tree, groups that lend a batch."""
    random = np.random.default_rng(11)
    deep = random.choice(12, size=400, p=random.dirichlet(np.full(12, 0.6)))
    deep[random.random(400) < 0.05] = -1
    stuck = np.repeat([0, 1, 3], [16, 3, 2])
    return {
        "one": (group_samples(np.zeros(103, int), ()), 10),
        "deep": (group_samples(deep, (3, 2, 2)), 16),
        "stuck": (group_samples(stuck, (2, 2)), 8),
    }


def plan_digests() -> Iterator[tuple[str, str]]:
    """(name, digest) of the plans of ``EPOCHS``: ids, labels, prefix length, group size by step."""
    how = zip(ORDERS, KEYS, strict=True)
    combinations = itertools.product(_groups().items(), POLICIES, how)
    for (name, (grouped, size)), policy, (order, (seed, stage)) in combinations:
        found = hashlib.sha256()
        plan = EpochPlan(grouped, size, policy, order, seed, stage, epoch=5)
        for epoch in EPOCHS:
            plan = plan.of_epoch(epoch)
            for step in range(plan.steps_per_epoch):
                batch = plan.batch(step)
                found.update(batch.ids.astype("<i8").tobytes())
                found.update(batch.group_ids.astype("<i8").tobytes())
                found.update(f"{batch.prefix_length} {batch.group_size};".encode())
        yield f"{name} {policy} {order} {seed} {stage}", found.hexdigest()[:16]


def batch_digests(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of the batches of one epoch and a bit, some samples undecodable."""
    index = make_index(directory, BAD)
    for policy, transform in (("backoff", augment), ("wrap", plain)):
        batches = make(index, policy=policy, transform=transform, order="proportional")
        yield f"batches {policy}", _of_batches(batches)
    grouped = group_samples(LABELS // 2, RADICES[:1])
    batches = make(index, grouped=grouped, tokenizer=None, rank=1, world_size=2, seed=2**35)
    yield "batches without captions", _of_batches(batches)


def _of_batches(batches: TrainingBatches) -> str:
    found = hashlib.sha256()
    for step in range(batches.steps_per_epoch + 3):
        batch = batches[step]
        for tensor in (*batch.views, batch.group_ids, batch.sample_id, batch.text):
            if tensor is not None:
                found.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
                found.update(tensor.numpy().tobytes())
        found.update(f"{batch.step} {batch.group_size} {sorted(batch.replaced.items())}".encode())
    return found.hexdigest()[:16]


def test_plans_are_those_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert dict(plan_digests()) == {k: v for k, v in recorded.items() if "batches" not in k}


def test_batches_are_those_recorded(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert dict(batch_digests(tmp_path)) == {k: v for k, v in recorded.items() if "batches" in k}


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(json.dumps(dict([*plan_digests(), *batch_digests(Path(folder))]), indent=0))
