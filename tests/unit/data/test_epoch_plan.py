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

from mclclip.data.coverage import coverage_report
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, group_samples
from mclclip.data.labels import truncate
from mclclip.util.randomness import mix, permute
from tests.matrix import SOAK

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
@given(cases(), st.randoms(use_true_random=False))
def test_a_batch_is_a_pure_function_of_its_step(case: Case, random) -> None:
    """A plan made anew at any step, asked in any order, says the same."""
    plan = case.plan()
    steps = list(range(plan.steps_per_epoch))
    random.shuffle(steps)
    found = {step: plan.batch(step).ids.tolist() for step in steps}
    again = case.plan()
    assert all(again.batch(step).ids.tolist() == found[step] for step in sorted(steps))
    assert all(case.plan().batch(step).ids.tolist() == found[step] for step in steps[:2])


@pytest.mark.parametrize("policy", POLICIES)
def test_neighbours_of_a_group_stay_together(policy, block=7) -> None:
    """So that a batch is read in few pieces; every sample has its turn at being a leftover."""
    labels = np.repeat([0, 1, 2], [100, 71, 64])
    grouped = group_samples(labels, (3,))
    rank = np.empty(len(labels), int)
    rank[grouped.sample_ids] = np.arange(len(labels))
    seen: Counter[int] = Counter()
    for epoch in range(12):
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
    samples, groups, size = 3_000_000, 100, 4096
    ids = np.lib.format.open_memmap(
        tmp_path / "ids.npy", mode="w+", dtype=np.int64, shape=(samples,)
    )
    starts = np.linspace(0, samples, groups + 1).astype(np.int64)
    grouped = GroupedIndex(starts, np.arange(groups), (10, 10), ids)
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


@pytest.mark.parametrize("policy", ["backoff", "mask"])
def test_no_sample_is_left_out_for_ever(policy: str) -> None:
    """Small groups have their turn even where their pool fills no batch of its own."""
    for sizes, radices in (*STUCK, ([3] * 9, (3, 3)), ([11], ())):
        grouped = group_samples(np.repeat(np.arange(len(sizes)), sizes), radices)
        left, epoch = set(range(sum(sizes))), 0
        plan = EpochPlan(grouped, 8, policy, "round_robin", 0, 1, 0)
        while left and epoch < 60:
            batches = batches_of(plan.of_epoch(epoch))
            assert len({sample for batch in batches for sample in batch}) == sum(sizes) // 8 * 8
            left.difference_update(*batches)
            epoch += 1
        assert not left, sizes


def test_what_makes_no_plan_is_refused() -> None:
    for labels, size, policy, message in (
        (np.zeros(5, int), 8, "backoff", "global_batch is 8, but 5 samples in 1 .* at most 5"),
        (np.arange(5), 2, "drop", "wanted at most 1"),
        (np.full(5, -1), 2, "wrap", "no sample has a pseudo label"),
    ):
        with pytest.raises(ValueError, match=message):
            EpochPlan(group_samples(labels, (5,)), size, policy, "round_robin", 0, 1, 0)


@stable
@given(cases())
def test_an_epoch_is_what_coverage_said_pure_and_without_repetition(case: Case) -> None:
    """Rows share the label at the step's prefix length in all but mixed batches; labels are the
    truth. Less than a batch remains unless dropped."""
    plan, size = case.plan(), case.global_batch
    lengths, seen = Counter[int](), []
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        group_ids = batch.group_ids
        assert batch.ids.dtype == np.int64 and batch.ids.shape == (size,)
        assert np.array_equal(plan.grouped.sample_ids[batch.positions], batch.ids)
        truth = truncate(case.labels[batch.ids], case.radices, batch.prefix_length)
        assert group_ids.dtype == np.int64 and np.array_equal(group_ids, truth)
        counts = Counter(group_ids.tolist())
        assert case.policy == "mask" or len(counts) == 1
        assert batch.group_size == round(sum(n * n for n in counts.values()) / size)
        lengths[batch.prefix_length] += 1
        seen += batch.ids.tolist()
    inside = np.flatnonzero(case.labels >= 0).tolist()
    assert set(seen) <= set(inside)
    if case.policy not in ("wrap", "carry"):
        assert len(seen) == len(set(seen)) == plan.scheduled == plan.steps_per_epoch * size
        assert plan.remainder == len(inside) - plan.scheduled
        assert case.policy == "drop" or plan.remainder < size
        assert plan.remainder or sorted(seen) == inside
    report = coverage_report(case.grouped, size, case.policy)
    assert {n: k for n, k in report.steps_by_prefix.items() if k} == dict(lengths)
    assert report.steps == plan.steps_per_epoch
    assert (report.scheduled, report.remainder) == (plan.scheduled, plan.remainder)
    small = [n for n in case.sizes if n < size]
    assert report.groups_below_batch == len(small)
    assert report.share_below_batch == pytest.approx(sum(small) / sum(case.sizes))
    assert report.groups["num_groups"] == len(case.sizes)
    assert report.label_space == math.prod(case.radices)
    assert report.within_bound == (report.label_space <= sum(case.sizes) / size)
    assert f"{report.steps:,}" in report.text() and f"{report.scheduled:,}" in report.text()
