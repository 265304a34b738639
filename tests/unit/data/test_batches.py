"""Batches of a stage: one global batch for any number of ranks and workers, and replacements."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from mclclip.data.batches import Batch, TrainingBatches
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, group_samples
from mclclip.data.labels import truncate
from mclclip.data.loader import LONGEST_TMPDIR, Loader
from mclclip.data.picture_transform import PictureTransform
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import PackedSample, write_shards
from tests import tiny
from tests.batches import training_batches
from tests.benchmarks import memory
from tests.matrix import kept
from tests.unit.data.test_groups import written
from tests.unit.data.test_samples import build_index

NUM_SAMPLES, RADICES = 240, (3, 2)
LABELS = np.sort(np.random.default_rng(5).integers(0, 6, NUM_SAMPLES))[
    np.random.default_rng(6).permutation(NUM_SAMPLES)
].astype(np.int64)


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(stream, "PNG")
    return stream.getvalue()


def make_index(directory: Path, bad: set[int], bare: Container[int] = ()) -> SampleIndex:
    """240 samples of one to four captions; ``bad`` ones are no images, ``bare`` have no caption."""
    samples = [
        PackedSample(
            f"{number:05d}",
            b"broken" if number in bad else png(number),
            "png",
            [f"{number} caption {k}" for k in range(1 + number % 4) if number not in bare],
        )
        for number in range(NUM_SAMPLES)
    ]
    paths = write_shards(samples, directory / "shards", 50)
    return build_index(directory / "index", paths, "json:captions")


def augment(image: Image.Image) -> torch.Tensor:
    """Pixels plus draws from all three global generators."""
    noise = torch.rand(()) + random.random() + float(np.random.random())
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float64) + noise


def plain(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def tokenize(texts: list[str]) -> torch.Tensor:
    return torch.tensor([list(text.encode()[:24].ljust(24)) for text in texts])


def text_of(row: torch.Tensor) -> str:
    return bytes(row.tolist()).decode().strip()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return make_index(tmp_path_factory.mktemp("good"), set())


BAD = set(np.random.default_rng(7).choice(NUM_SAMPLES, 60, replace=False).tolist())


@pytest.fixture(scope="module")
def bad_index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    """A quarter of all samples cannot be decoded."""
    return make_index(tmp_path_factory.mktemp("bad"), BAD)


def make(index: SampleIndex, **changes: Any) -> TrainingBatches:
    options: dict[str, Any] = dict(
        index=index,
        grouped=group_samples(LABELS, RADICES),
        transform=augment,
        tokenizer=tokenize,
        global_batch=16,
        policy="backoff",
        order="round_robin",
        seed=3,
        stage=1,
    )
    return training_batches(**(options | changes))


def assert_equal(left: Batch, right: Batch) -> None:
    for item in fields(Batch):
        a, b = getattr(left, item.name), getattr(right, item.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), item.name
        elif item.name == "views":
            assert all(map(torch.equal, a, b)) and len(a) == len(b), item.name
        else:
            assert a == b, item.name


def steps_of(batches: TrainingBatches, num_epochs: int = 2, every: int = 1) -> Iterator[int]:
    yield from range(0, num_epochs * batches.steps_per_epoch, every)


# --- what is sent and what is kept --------------------------------------------------------------


def growth(index: SampleIndex) -> int:
    """By how many bytes of its own (not mapped from files) this process grows in eight epochs."""
    batches, held = make(index, transform=plain), []
    for step in steps_of(batches, 10):
        batches[step]
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        held += [1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:")]
    return held[-1] - max(held[: 2 * batches.steps_per_epoch])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="there is no /proc")
def test_nothing_is_kept_from_epoch_to_epoch(index: SampleIndex) -> None:
    assert memory.in_fresh_process(growth, index) < 250_000


def test_few_bytes_are_sent_with_the_message_and_many_in_shared_memory() -> None:
    """By a worker; what arrives is the same and can be written to."""
    batch = Batch(
        views=[torch.rand(4, 3, 8, 8), torch.rand(4, 3, 8, 8)],
        group_ids=torch.arange(4)[:, None],
        sample_id=torch.arange(4) + 7,
        step=3,
        group_size=2,
        text=torch.arange(4 * 77).view(4, 77),
        text_features=torch.rand(300, 256),
        replaced={8: "broken"},
    )
    few = [batch.group_ids, batch.sample_id, batch.text]
    assert copy.copy(batch).sample_id is batch.sample_id  # only what is sent changes
    found = pickle.loads(ForkingPickler.dumps(batch))
    assert not any(tensor.is_shared() for tensor in few if tensor is not None)
    many = [*batch.views, batch.text_features]
    assert all(tensor.is_shared() for tensor in many if tensor is not None)
    assert_equal(found, batch)
    for tensor in found.tensors():
        tensor += 1


# --- randomness --------------------------------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


def test_batches_neither_read_nor_move_the_global_generators(index: SampleIndex) -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    wanted = draws()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = make(index)[4]
    assert draws() == wanted
    assert_equal(make(index)[4], first)


class FromTorchAlone(PictureTransform):
    """A transform that says from which generator it draws."""

    draws_from_torch_alone = True

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return plain(image) + torch.rand(())


class Masking:
    """A tokenizer that leaves out what Python's generator says."""

    reduction_fn = staticmethod(random.random)

    def __call__(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[self.reduction_fn()] for _ in texts])


def test_a_transform_that_draws_from_torch_alone_has_the_same_draws(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = FromTorchAlone()
    wanted = [make(index, transform=transform.__call__)[step] for step in range(3)]
    seeded: list[object] = []
    monkeypatch.setattr(np.random, "seed", seeded.append)
    batches = make(index, transform=transform)
    for step, batch in enumerate(wanted):
        assert_equal(batches[step], batch)
    assert not seeded


def test_a_tokenizer_that_draws_is_seeded_beside_such_a_transform(index: SampleIndex) -> None:
    batches = make(index, transform=FromTorchAlone(), tokenizer=Masking())
    found = []
    for seed in range(2):
        random.seed(seed)
        found.append(batches[1])
    assert_equal(*found)


def test_augmentation_depends_on_sample_epoch_stage_and_seed_alone(index: SampleIndex) -> None:
    def offsets(epoch: int = 0, steps: int = 0, **changes: Any) -> dict[int, float]:
        """What `augment` added to each sample, over a whole epoch or its first steps."""
        batches, found = make(index, **changes), {}
        first = batches.steps_per_epoch * epoch
        for step in range(first, first + (steps or batches.steps_per_epoch)):
            batch = batches[step]
            for sample_id, image in zip(batch.sample_id.tolist(), batch.views[0], strict=True):
                found[sample_id] = float(image[0, 0, 0]) - sample_id % 256
        return found

    base = offsets()
    assert len(set(base.values())) == len(base)
    # Another batch size and another plan: the same sample is augmented the same way.
    for changes in ({"global_batch": 24}, {"policy": "drop"}, {"order": "proportional"}):
        other = offsets(steps=4, **changes)
        assert all(other[i] == base[i] for i in other.keys() & base.keys())
    for changes in ({"seed": 4}, {"stage": 2}, {"epoch": 1}):
        other = offsets(steps=4, **changes)
        assert all(other[i] != base[i] for i in other.keys() & base.keys())


# --- what a batch holds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"), [("backoff", "round_robin"), ("mask", "proportional")]
)
def test_a_batch_is_what_the_plan_says(index: SampleIndex, policy: Any, order: Any) -> None:
    batches = make(index, policy=policy, order=order, transform=plain)
    for step in steps_of(batches, every=4):
        epoch, epoch_step = divmod(step, batches.steps_per_epoch)
        plan = EpochPlan(batches.grouped, 16, policy, order, 3, 1, epoch)
        batch = batches[step]
        planned = plan.batch(epoch_step)
        ids = planned.ids
        assert batch.sample_id.tolist() == ids.tolist() and batch.step == step and len(batch) == 16
        assert batch.sample_id.dtype == batch.group_ids.dtype == torch.int64
        wanted = truncate(LABELS[ids], RADICES, planned.prefix_length)
        assert batch.group_ids.tolist() == wanted[:, None].tolist()
        assert batch.group_size == planned.group_size
        assert batch.prefix_length == planned.prefix_length
        assert batch.views[0][:, 0, 0, 0].tolist() == ids.tolist()
        assert batch.text is not None and batch.text_features is None and batch.replaced == {}
        numbers = batches.caption_numbers(ids, epoch).tolist()
        for row, sample_id, number in zip(batch.text, ids.tolist(), numbers, strict=True):
            assert text_of(row) == f"{sample_id} caption {number}"


# --- ranks, workers, resuming ------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "world_size"), [("backoff", 16), ("mask", 4)])
def test_the_ranks_together_have_the_single_process_batch(
    policy: Any, world_size: int, bad_index: SampleIndex
) -> None:
    single = make(bad_index, policy=policy)
    ranks = [
        make(bad_index, policy=policy, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    size = 16 // world_size
    for step in steps_of(single, every=5):
        whole, replaced = single[step], dict[int, str]()
        for rank, batches in enumerate(ranks):
            part = batches[step]
            replaced |= part.replaced
            wanted = whole.slice(size * rank, size * (rank + 1))
            assert_equal(part, dataclasses.replace(wanted, replaced=part.replaced))
        assert replaced == whole.replaced


def test_loader_workers_and_a_later_start_change_nothing(
    bad_index: SampleIndex, tmp_path: Path
) -> None:
    written(tmp_path, group_samples(LABELS, RADICES))
    batches = make(bad_index, grouped=GroupedIndex.open(tmp_path))
    reference = make(bad_index)
    for start in (0, batches.steps_per_epoch - 2):
        steps = range(start, start + 5)
        loader = DataLoader(batches, batch_size=None, sampler=steps, num_workers=2)
        found = list(loader)
        assert [batch.step for batch in found] == list(steps)
        for batch in found:
            assert_equal(batch, reference[batch.step])


ENDS = [("fork", "raise", 1), ("spawn", "kill", -9), ("fork", "break", 0), ("spawn", "exit", 7)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "how", "code"), kept(ENDS, 0, 1))
def test_a_program_that_stops_reading_ends(
    index: SampleIndex, tmp_path: Path, method: str, how: str, code: int
) -> None:
    """And leaves nothing in a temporary folder whose name is as long as sockets allow."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with tempfile.TemporaryDirectory() as short:
        folder = Path(short) / ("x" * (LONGEST_TMPDIR - len(short) - 1))
        folder.mkdir()
        variables = {"PYTHONPATH": str(tiny.ROOT), "TMPDIR": str(folder)}
        done = subprocess.run(
            [sys.executable, tmp_path / "program.py", index.directory, index.digest, method, how],
            capture_output=True, text=True, timeout=600, env=os.environ | variables,
        )  # fmt: skip
        assert not [path for path in folder.rglob("*") if path.is_file()]
    said = done.stderr.strip()
    assert (done.returncode, done.stdout) == (code, "0\n"), said
    if how != "kill":  # its workers may complain
        assert said.endswith("KeyError: 'its own error'") if how == "raise" else not said, said


# Reads a batch and ends with its loader alive.
PROGRAM = """
import os
import sys
from pathlib import Path
from mclclip.data.loader import Loader
from mclclip.data.groups import group_samples
from mclclip.data.sample_index import SampleIndex
from tests.unit.data.test_batches import LABELS, RADICES, make
from tests.unit.data.test_groups import written

if __name__ == "__main__":
    directory, digest, method, how = sys.argv[1:]
    groups = written(Path(__file__).with_name("groups"), group_samples(LABELS, RADICES))
    loader = Loader(
        make(SampleIndex(directory, digest), grouped=groups),
        range(100),
        num_workers=2,
        timeout_s=300,
        describe=lambda step: (f"step {step}", ()),
        fresh=method == "spawn",
    )
    batches = iter(loader)
    print(next(batches).step, flush=True)
    if how == "raise":
        raise KeyError("its own error")
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), 9)
    for batch in batches:
        break
"""


def test_a_temporary_folder_that_sockets_do_not_fit_is_refused(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/".ljust(LONGEST_TMPDIR + 1, "x"))
    options: dict[str, Any] = {"timeout_s": 300, "describe": lambda step: (f"step {step}", ())}
    with pytest.raises(ValueError, match="TMPDIR=/xx"):
        Loader(make(index), range(2), num_workers=1, **options)
    Loader(make(index), range(2), num_workers=0, **options)


# --- replacement -------------------------------------------------------------------------------


def check_replacements(batches: TrainingBatches, num_epochs: int) -> tuple[int, int]:
    """The rule, written out slowly for one process; returns (replaced, of these in their leaf)."""
    size, order = batches.global_batch, batches.grouped.sample_ids.tolist()
    num_replaced = num_in_leaf = 0
    for step in steps_of(batches, num_epochs):
        epoch, epoch_step = divmod(step, batches.steps_per_epoch)
        plan, batch = batches.plan(epoch).batch(epoch_step), batches[step]
        planned, got = plan.ids.tolist(), batch.sample_id.tolist()
        assert len(set(got)) == size and not BAD & set(got)
        assert batch.replaced == {i: "unidentified" for i in planned if i in BAD}
        labels = truncate(LABELS[got], RADICES, plan.prefix_length)
        assert batch.group_ids[:, 0].tolist() == labels.tolist()
        assert batch.views[0][:, 0, 0, 0].tolist() == got
        for column, (before, after) in enumerate(zip(planned, got, strict=True)):
            if before not in BAD:
                assert after == before
                continue
            usable = set(order[column::size]) - BAD - set(planned)
            assert after in usable
            shared = max(common_prefix(LABELS[i], LABELS[before]) for i in usable)
            assert common_prefix(LABELS[after], LABELS[before]) == shared
            num_replaced += 1
            num_in_leaf += int(LABELS[after] == LABELS[before])
    return num_replaced, num_in_leaf


def common_prefix(left: int, right: int) -> int:
    """Of labels with the radices (3, 2)."""
    return 2 if left == right else int(left // 2 == right // 2)


@pytest.mark.parametrize(("policy", "global_batch"), [("drop", 4), ("backoff", 16), ("mask", 8)])
def test_replacements_follow_the_rule(
    bad_index: SampleIndex, policy: Any, global_batch: int
) -> None:
    batches = make(bad_index, policy=policy, global_batch=global_batch, transform=plain)
    num_replaced, num_in_leaf = check_replacements(batches, 2)
    assert num_replaced > 50
    assert num_in_leaf > (0.9 if global_batch == 4 else 0.3) * num_replaced


def test_replacements_are_spread_and_change_with_the_epoch(bad_index: SampleIndex) -> None:
    batches = make(bad_index, global_batch=4, transform=plain, tokenizer=None)
    some, by_sample = set(sorted(BAD)[:6]), dict[int, set[int]]()
    for step in steps_of(batches, 12):
        epoch, epoch_step = divmod(step, batches.steps_per_epoch)
        planned = batches.plan(epoch).batch(epoch_step).ids.tolist()
        if not some.intersection(planned):
            continue
        for before, after in zip(planned, batches[step].sample_id.tolist(), strict=True):
            if before in some:
                by_sample.setdefault(before, set()).add(after)
    assert np.mean([len(found) for found in by_sample.values()]) > 4


def test_replacements_are_deterministic_and_known_bad_ids_change_nothing(
    bad_index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignorant, knowing = make(bad_index), make(bad_index, bad_ids=np.array(sorted(BAD)))
    tried: list[int] = []
    read_many = knowing.dataset.read_many

    def recording(ids: Any) -> Any:
        if len(ids) == 1:
            tried.extend(int(i) for i in ids)
        return read_many(ids)

    monkeypatch.setattr(knowing.dataset, "read_many", recording)
    for step in steps_of(ignorant, every=3):
        assert_equal(knowing[step], ignorant[step])
    assert tried and not BAD & set(tried)


def test_a_batch_of_nearly_all_samples_takes_any_other_and_one_of_all_ends(tmp_path: Path) -> None:
    index = make_index(tmp_path, {11, 12})
    some: dict[str, Any] = {"global_batch": 200, "policy": "backoff", "transform": plain}
    single, knowing = make(index, **some), make(index, **some, bad_ids=np.array([11, 12]))
    ranks = [make(index, **some, rank=rank, world_size=2) for rank in range(2)]
    order, of_other_columns = single.grouped.sample_ids.tolist(), 0
    for step in range(8):
        planned = single.plan(step).batch(0).ids.tolist()
        taken = single[step].sample_id.tolist()
        assert_equal(knowing[step], single[step])
        assert [i for part in ranks for i in part[step].sample_id.tolist()] == taken
        for column, (before, after) in enumerate(zip(planned, taken, strict=True)):
            if before not in {11, 12}:
                assert after == before
                continue
            assert after not in {11, 12, *planned}
            of_other_columns += after not in order[column::200]
    assert of_other_columns
    with pytest.raises(RuntimeError, match="test/0001[12] .*(unidentified).*lower the global"):
        make(index, global_batch=240, policy="backoff", transform=plain)[0]
