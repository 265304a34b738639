"""The epoch plan against lists written out by hand, and its invariants."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mclclip.data import epoch_plan
from mclclip.data.coverage import coverage_report
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, group_samples
from mclclip.data.labels import truncate
from mclclip.util.randomness import mix, permute
from tests.matrix import SOAK, kept

pytestmark = [pytest.mark.slow] if SOAK else []  # with more examples
stable = settings(max_examples=35 if SOAK else 10, deadline=None, derandomize=True, database=None)
POLICIES = ("drop", "backoff", "mask", "wrap", "carry")
ORDERS = ("round_robin", "proportional")
SAMPLES, TURN = 1, 5  # words of the keys
STUCK = [  # group sizes that leave some groups without any batch of 8, unless one is lent
    ([8, 3], (2,)),
    ([16, 8, 3], (3,)),
    ([8, 3, 0, 1], (2, 2)),
    ([4, 4, 0, 3], (2, 2)),
    ([1, 1, 9, 9, 0, 0, 0, 2], (2, 2, 2)),
]


@dataclass
class Case:
    """Pseudo labels of a small data set and what a plan is made with."""

    labels: np.ndarray
    radices: tuple[int, ...]
    global_batch: int
    policy: str
    order: str
    key: tuple[int, int, int]
    block: int = 1

    @property
    def grouped(self) -> GroupedIndex:
        return group_samples(self.labels, self.radices)

    def plan(self, **changes) -> EpochPlan:
        seed, stage, epoch = self.key
        options = {"seed": seed, "stage": stage, "epoch": epoch, "order": self.order}
        options |= {"block": self.block, **changes}
        return EpochPlan(self.grouped, self.global_batch, self.policy, **options)

    @property
    def sizes(self) -> list[int]:
        return np.diff(self.grouped.group_starts).tolist()


@st.composite
def cases(draw: st.DrawFn, policies=POLICIES, batch=st.integers(1, 24)) -> Case:  # noqa: B008
    """Trees of depth 0 to 3, group sizes from nothing to most of the data, some samples outside."""
    radices = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    samples = draw(st.integers(1, 160))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = random.dirichlet(np.full(math.prod(radices), draw(st.sampled_from([0.2, 1.0, 10.0]))))
    labels = random.choice(math.prod(radices), size=samples, p=share)
    labels[random.random(samples) < draw(st.sampled_from([0, 0.1]))] = -1
    global_batch = draw(batch)
    policy, order = draw(st.sampled_from(policies)), draw(st.sampled_from(ORDERS))
    block, key = draw(st.sampled_from([1, 1, 2, 5, 30])), (draw(st.integers(0, 9)), 1, 2)
    case = Case(labels, radices, global_batch, policy, order, key, block)
    assume(coverage_report(case.grouped, global_batch, policy).steps > 0)
    return case


def batches_of(plan: EpochPlan) -> list[list[int]]:
    return [plan.batch(step).ids.tolist() for step in range(plan.steps_per_epoch)]


# --- the reference: every list in full ---------------------------------------------------------


@dataclass
class Node:
    """A node of the tree with its shuffled elements and the batches that it makes of them."""

    prefix_length: int
    label: int
    elements: list[int]
    num_batches: int

    def batches(self, size: int) -> list[list[int]]:
        return [self.elements[n * size : (n + 1) * size] for n in range(self.num_batches)]


def shuffled(case: Case, length: int, label: int, elements: list[int]) -> list[int]:
    key = mix(*case.key, SAMPLES, length, label)
    size = min(case.block, max(1, len(elements) // 8))
    if case.block > 1 and elements:  # turned, cut into blocks, and the whole ones shuffled
        turn = int(mix(key, TURN)) % len(elements)
        elements = elements[turn:] + elements[:turn]
    cuts = [elements[start : start + size] for start in range(0, len(elements), size)]
    short = [cuts.pop()] if cuts and len(cuts[-1]) < size else []
    order = permute(np.arange(len(cuts)), len(cuts), key).tolist() if cuts else []
    return [element for cut in [*(cuts[place] for place in order), *short] for element in cut]


def reference_leaves(case: Case) -> list[Node]:
    leaves = []
    for label in sorted(set(case.labels[case.labels >= 0].tolist())):
        members = np.flatnonzero(case.labels == label).tolist()
        elements = shuffled(case, len(case.radices), label, members)
        leaves.append(Node(len(case.radices), label, elements, len(elements) // case.global_batch))
    return leaves


def reference_pool(case: Case, children: list[Node], length: int, lend: set) -> list[Node]:
    """The nodes one level up, made of what their children leave over."""
    size, parents = case.global_batch, []
    for child in children:
        if (child.prefix_length, child.label) in lend:
            child.num_batches -= 1
    pooled = groupby(children, key=lambda child: child.label // case.radices[length])
    for label, members in pooled:
        left = [e for child in members for e in child.elements[child.num_batches * size :]]
        elements = shuffled(case, length, label, left)
        on_the_way = any(
            n > length > 0 and x // prod_between(case, n, length) == label for n, x in lend
        )
        batches = 0 if on_the_way else len(elements) // size
        parents.append(Node(length, label, elements, batches))
    return parents


def prod_between(case: Case, long: int, short: int) -> int:
    return math.prod(case.radices[short:long])


def reference_backoff(case: Case, lend: frozenset = frozenset()) -> list[Node]:
    """All nodes, leaves first, root last. A root that fills no batch while a group has no share in
    any batch borrows one from the nearest node that has one."""
    level = reference_leaves(case)
    nodes = list(level)
    for length in range(len(case.radices) - 1, -1, -1):
        level = reference_pool(case, level, length, set(lend))
        nodes += level
    served = [node for node in nodes if node.num_batches]
    stuck = [
        leaf
        for leaf in nodes
        if leaf.prefix_length == len(case.radices)
        and not any(
            leaf.label // prod_between(case, leaf.prefix_length, node.prefix_length) == node.label
            for node in served
        )
    ]
    if lend or not case.radices or nodes[-1].num_batches or not stuck or not served:
        return nodes
    nearest = min(node.prefix_length for node in served)
    candidates = [node for node in served if node.prefix_length == nearest]
    lender = max(candidates, key=lambda node: node.num_batches)
    return reference_backoff(case, frozenset({(lender.prefix_length, lender.label)}))


def reference_visits(case: Case, counts: list[int]) -> list[int]:
    """Algorithm 1: group j mod C next, exhausted groups skipped, until all are traversed."""
    left, visits, turn = list(counts), [], 0
    while any(left):
        unit = turn % len(left)
        if left[unit]:
            left[unit] -= 1
            visits.append(unit)
        turn += 1
    return visits


def check_against_lists(case: Case) -> None:
    nodes = reference_leaves(case) if case.policy == "drop" else reference_backoff(case)
    pending = [iter(node.batches(case.global_batch)) for node in nodes]
    visits = reference_visits(case, [node.num_batches for node in nodes])
    expected = [next(pending[unit]) for unit in visits]
    plan = case.plan(order="round_robin")
    assert batches_of(plan) == expected
    lengths = [plan.batch(step).prefix_length for step in range(plan.steps_per_epoch)]
    assert lengths == [nodes[unit].prefix_length for unit in visits]
    assert sorted(batches_of(case.plan(order="proportional"))) == sorted(expected)


@stable
@given(cases(policies=("drop", "backoff")))
def test_the_plan_equals_lists_written_out(case: Case) -> None:
    check_against_lists(case)


@pytest.mark.parametrize("sizes, radices", STUCK)
def test_a_lent_batch_equals_lists_written_out(sizes, radices) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    case = Case(labels, radices, 8, "backoff", "round_robin", (0, 1, 2))
    assert reference_backoff(case)[-1].num_batches == 1
    check_against_lists(case)


@stable
@given(cases(policies=("wrap",)))
def test_wrap_fills_the_last_batch_of_a_group_with_its_first_samples(case: Case) -> None:
    size, expected = case.global_batch, []
    for leaf in reference_leaves(case):
        cyclic = leaf.elements * (size // len(leaf.elements) + 2)
        for start in range(0, len(leaf.elements), size):
            expected.append(cyclic[start : start + size])
    plan = case.plan()
    assert sorted(batches_of(plan)) == sorted(expected)
    assert (plan.scheduled, plan.remainder) == (sum(case.sizes), 0)


@stable
@given(cases(policies=("mask",)))
def test_mask_makes_the_pure_batches_first_and_runs_of_groups_after(case: Case) -> None:
    plan, size = case.plan(), case.global_batch
    lengths = {plan.batch(step).prefix_length for step in range(plan.steps_per_epoch)}
    assert lengths == {len(case.radices)}
    rows = [plan.batch(step).group_ids.tolist() for step in range(plan.steps_per_epoch)]
    assert len(rows) == sum(case.sizes) // size
    # Each group is one run, so that its rows keep negatives.
    assert all(len(list(groupby(row))) == len(set(row)) for row in rows)
    if sum(n % size for n in case.sizes) >= size:  # otherwise one pure batch may be lent
        pure = Counter(row[0] for row in rows if len(set(row)) == 1)
        by_group = zip(case.grouped.group_labels.tolist(), case.sizes, strict=True)
        assert all(pure[label] >= n // size for label, n in by_group)


# --- invariants --------------------------------------------------------------------------------


@stable
@given(cases(policies=("drop", "backoff", "mask")))
def test_no_sample_comes_twice_in_an_epoch(case: Case) -> None:
    """What is scheduled and what remains is counted right, and less than a batch unless dropped."""
    plan = case.plan()
    seen = [sample for batch in batches_of(plan) for sample in batch]
    inside = np.flatnonzero(case.labels >= 0).tolist()
    assert len(seen) == len(set(seen)) == plan.scheduled == plan.steps_per_epoch * case.global_batch
    assert set(seen) <= set(inside)
    assert plan.remainder == len(inside) - plan.scheduled
    assert case.policy == "drop" or plan.remainder < case.global_batch
    if not plan.remainder:
        assert sorted(seen) == inside


@stable
@given(cases(policies=("carry",)))
def test_carry_goes_on_where_the_epoch_before_ended(case: Case) -> None:
    rounds = [case.plan(epoch=epoch) for epoch in range(4)]
    every = [ids for plan in rounds for ids in batches_of(plan)]
    counts = Counter(sample for ids in every for sample in ids)
    for label in set(case.labels[case.labels >= 0].tolist()):
        members = np.flatnonzero(case.labels == label).tolist()
        each = [counts[member] for member in members]
        used = 4 * (len(members) // case.global_batch) * case.global_batch
        assert sum(each) == used and max(each) - min(each) <= 1
    assert len({plan.steps_per_epoch for plan in rounds}) == 1


@stable
@given(cases())
def test_the_rows_of_a_step_share_the_label_it_is_masked_at(case: Case) -> None:
    """Pure at the step's prefix length in all but mixed batches; labels are the truth."""
    plan = case.plan()
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        group_ids = batch.group_ids
        assert batch.ids.dtype == np.int64 and batch.ids.shape == (case.global_batch,)
        assert np.array_equal(plan.grouped.sample_ids[batch.positions], batch.ids)
        truth = truncate(case.labels[batch.ids], case.radices, batch.prefix_length)
        assert group_ids.dtype == np.int64 and np.array_equal(group_ids, truth)
        counts = Counter(group_ids.tolist())
        assert case.policy == "mask" or len(counts) == 1
        compared = sum(n * n for n in counts.values()) / case.global_batch
        assert batch.group_size == round(compared)


@stable
@given(cases(), st.randoms(use_true_random=False))
def test_a_batch_is_a_pure_function_of_its_step(case: Case, random) -> None:
    """A plan made anew at any step, asked in any order, says the same."""
    expected = batches_of(case.plan())
    plan, steps = case.plan(), list(range(len(expected)))
    random.shuffle(steps)
    assert all(plan.batch(step).ids.tolist() == expected[step] for step in steps)
    assert all(case.plan().batch(step).ids.tolist() == expected[step] for step in steps[:5])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", kept([2, 7, 16], 1))
def test_neighbours_of_a_group_stay_together(policy, block) -> None:
    """So that a batch is read in few pieces; every sample has its turn at being a leftover."""
    labels = np.repeat([0, 1, 2], [200, 111, 64])
    grouped = group_samples(labels, (3,))
    rank = np.empty(len(labels), int)
    rank[grouped.sample_ids] = np.arange(len(labels))
    seen: Counter[int] = Counter()
    for epoch in range(20):
        plan = EpochPlan(grouped, 32, policy, "proportional", 5, 1, epoch, block)
        for step in range(plan.steps_per_epoch):
            batch = plan.batch(step)
            seen.update(batch.ids.tolist())
            if batch.prefix_length == 1 and batch.group_size == 32:
                pieces = 1 + np.count_nonzero(np.diff(rank[batch.ids]) != 1)
                # Whole blocks, a cut one at each end, a short one, and the seam of the turn.
                assert pieces <= 32 // block + 5
    assert set(seen) == {*range(len(labels))} or policy == "carry"


def test_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    """The file of sample ids is read at the rows of a batch only."""
    samples, groups, size = 3_000_000, 300, 4096
    ids = np.lib.format.open_memmap(
        tmp_path / "ids.npy", mode="w+", dtype=np.int64, shape=(samples,)
    )
    starts = np.linspace(0, samples, groups + 1).astype(np.int64)
    grouped = GroupedIndex(starts, np.arange(groups), (10, 30), ids)
    for policy in POLICIES:
        tracemalloc.start()
        plan = EpochPlan(grouped, size, policy, "proportional", 0, 1, 0)
        for step in (0, plan.steps_per_epoch - 1):
            plan.batch(step)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 200_000 and peak < 2_500_000 < 8 * samples / 9
        entries = [value.size for value in vars(plan).values() if isinstance(value, np.ndarray)]
        assert max(entries) <= max(plan.steps_per_epoch, groups)


@pytest.mark.parametrize("policy", POLICIES)
def test_epochs_share_what_none_of_them_changes(policy, monkeypatch) -> None:
    order = "proportional"
    grouped = group_samples(LABELS, (2, 2))
    new = [EpochPlan(grouped, 32, policy, order, 4, 1, epoch) for epoch in range(3)]
    built: list[int] = []
    build = epoch_plan.build_levels
    monkeypatch.setattr(epoch_plan, "build_levels", lambda *a: built.append(1) or build(*a))
    first = EpochPlan(grouped, 32, policy, order, 4, 1, 0)
    later = [first.of_epoch(epoch) for epoch in (0, 1, 2)]
    assert [batches_of(plan) for plan in later] == [batches_of(plan) for plan in new]
    assert batches_of(first) == batches_of(new[0])  # the plans of later epochs left it as it was
    assert [plan.epoch for plan in later] == [0, 1, 2] and len(built) == 1


# --- epochs, seeds, orders ---------------------------------------------------------------------


LABELS = np.repeat([0, 1, 2, 3], [500, 130, 61, 9])


@pytest.mark.parametrize(
    ("policy", "order"), [*((policy, ORDERS[0]) for policy in POLICIES), ("backoff", ORDERS[1])]
)
def test_epochs_stages_and_seeds_differ(policy: str, order: str) -> None:
    grouped = group_samples(LABELS, (2, 2))
    keys = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]
    plans = [EpochPlan(grouped, 32, policy, order, *key) for key in keys]
    assert len({str(batches_of(plan)) for plan in plans}) == 4
    assert len({(p.steps_per_epoch, p.scheduled, p.remainder) for p in plans}) == 1


@pytest.mark.parametrize("policy", ["backoff", "mask"])
@pytest.mark.parametrize(
    "sizes, radices",
    [*STUCK, ([3] * 9, (3, 3)), ([11], ())],
)
def test_no_sample_is_left_out_for_ever(policy: str, sizes, radices) -> None:
    """Small groups have their turn even where their pool fills no batch of its own."""
    grouped = group_samples(np.repeat(np.arange(len(sizes)), sizes), radices)
    seen: set[int] = set()
    plan = EpochPlan(grouped, 8, policy, "round_robin", 0, 1, 0)
    for epoch in range(60):
        plan = plan.of_epoch(epoch)
        batches = batches_of(plan)
        assert len({sample for batch in batches for sample in batch}) == sum(sizes) // 8 * 8
        seen.update(*batches)
    assert seen == set(range(sum(sizes)))


@stable
@given(cases(policies=("backoff", "mask")))
def test_what_remains_changes_wherever_something_remains(case: Case) -> None:
    inside = set(np.flatnonzero(case.labels >= 0).tolist())
    assume(case.plan().remainder)
    first = inside.difference(*batches_of(case.plan(epoch=0)))
    later = (inside.difference(*batches_of(case.plan(epoch=epoch))) for epoch in range(1, 60))
    assert any(left_out != first for left_out in later)


def test_proportional_spreads_a_large_group_over_the_epoch() -> None:
    labels = np.repeat([0, 1, 2], [800, 100, 100])
    plan = EpochPlan(group_samples(labels, (3,)), 5, "drop", "proportional", 3, 1, 0)
    visited = np.array([int(plan.batch(step).group_ids[0]) for step in range(plan.steps_per_epoch)])
    assert np.bincount(visited).tolist() == [160, 20, 20]
    halves = [(half == 0).mean() for half in np.split(visited, 2)]
    assert all(abs(share - 0.8) < 0.08 for share in halves)


def test_one_group_is_an_ordinary_epoch_shuffle() -> None:
    for radices in ((), (1,), (5, 5)):
        grouped = group_samples(np.zeros(103, dtype=np.int64), radices)
        plan = EpochPlan(grouped, 10, "backoff", "round_robin", 0, 1, 0)
        seen = np.concatenate([plan.batch(step).ids for step in range(10)])
        assert len(np.unique(seen)) == 100 and not np.array_equal(seen, np.sort(seen))
        first = [
            EpochPlan(grouped, 10, "drop", "round_robin", 0, 1, e).batch(0).ids for e in range(90)
        ]
        assert len(np.unique(first)) == 103  # any sample may come first


# --- errors, and what was said before ------------------------------------------------------------


@pytest.mark.parametrize(
    "labels, size, policy, order, message",
    [
        (np.zeros(5, int), 8, "backoff", "round_robin", "global_batch is 8, but 5 samples in 1"),
        (np.zeros(5, int), 8, "drop", "round_robin", "wanted at most 5"),
        (np.zeros(5, int), 8, "mask", "round_robin", "wanted at most 5"),
        (np.arange(5), 2, "drop", "round_robin", "wanted at most 1"),
        (np.full(5, -1), 2, "wrap", "round_robin", "no sample has a pseudo label"),
    ],
)
def test_what_makes_no_plan_is_refused(labels, size, policy, order, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochPlan(group_samples(labels, (5,)), size, policy, order, 0, 1, 0)


@stable
@given(cases())
def test_coverage_says_before_what_a_plan_does(case: Case) -> None:
    plan, report = case.plan(), coverage_report(case.grouped, case.global_batch, case.policy)
    lengths = Counter(plan.batch(step).prefix_length for step in range(plan.steps_per_epoch))
    assert {n: k for n, k in report.steps_by_prefix.items() if k} == dict(lengths)
    assert report.steps == plan.steps_per_epoch
    assert (report.scheduled, report.remainder) == (plan.scheduled, plan.remainder)
    small = [n for n in case.sizes if n < case.global_batch]
    assert report.groups_below_batch == len(small)
    assert report.share_below_batch == pytest.approx(sum(small) / sum(case.sizes))
    assert report.groups["num_groups"] == len(case.sizes)
    assert report.label_space == math.prod(case.radices)
    assert report.within_bound == (report.label_space <= sum(case.sizes) / case.global_batch)
    assert f"{report.steps:,}" in report.text() and f"{report.scheduled:,}" in report.text()
