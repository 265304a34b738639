"""Counts how much of the data a plan uses, and reports it before training begins (MCL, Eq. 4)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mclclip.data.epoch_plan import (
    ALONE,
    EpochPlan,
    Level,
    build_levels,
    num_scheduled,
    require_steps,
)
from mclclip.data.groups import GroupSizes
from mclclip.data.labels import label_space, size_statistics
from mclclip.data.options import Policy
from mclclip.data.sample_index import SampleIndex
from mclclip.run.runlog import count_of

logger = logging.getLogger("mclclip")


@dataclass(frozen=True)
class Coverage:
    """How much of the data a plan uses. The numbers are equal for every epoch."""

    policy: Policy
    global_batch: int
    num_samples: int  # where samples have weights: the number of draws of an epoch
    distinct: int | None  # the number of samples that these draws are of; None without weights
    groups: dict[str, float]  # labels.size_statistics
    groups_below_batch: int
    share_below_batch: float  # of the samples
    label_space: int  # K^j, which Eq. 4 bounds by M / B: samples per global batch
    steps: int
    scheduled: int  # samples of an epoch, each counted once, or draws of weighted ones
    remainder: int  # how many of num_samples an epoch leaves out; each epoch leaves out others
    steps_by_prefix: dict[int, int]  # prefix length of the mask -> number of steps
    mixed_steps: int  # number of steps of policy "mask" whose rows are of several groups
    negatives: float  # number of samples that a row is compared with, mean over an epoch
    full_label_share: float  # share of the steps that compare full labels (Eq. 3)
    repeated: int  # rows of an epoch that repeat a sample (policy "wrap")
    bound: float  # Eq. 4: M / B, the most labels of which each can fill a batch
    within_bound: bool

    def text(self) -> str:
        """Returns the whole report, of several lines."""
        groups, percent = self.groups, 100 / max(self.num_samples, 1)
        prefixes = "".join(
            f", {100 * steps / max(self.steps, 1):.1f} % at prefix length {length}"
            for length, steps in sorted(self.steps_by_prefix.items(), reverse=True)[1:]
        )
        weights = []
        if self.distinct is not None:  # numbers of samples are of draws then
            each = self.num_samples / max(self.distinct, 1)
            weights.append(
                f"  weights    {self.distinct:,} samples, drawn {self.num_samples:,} times "
                f"({each:.2f} each on average), and counted so often below"
            )
        unused = "too small groups always, the others" if self.policy in ALONE else "others"
        return "\n".join(
            (
                f"coverage of one epoch, policy {self.policy}, global batch {self.global_batch:,}",
                *weights,
                f"  groups     {groups['num_groups']:,} of {self.num_samples:,} samples, effective "
                f"{groups['effective_groups']:.1f}, max share {100 * groups['max_share']:.1f} %",
                f"  sizes      smallest {groups['smallest']:,}, median {groups['median']:,.0f}, "
                f"largest {groups['largest']:,}",
                f"  too small  {self.groups_below_batch:,} groups below the global batch, with "
                f"{100 * self.share_below_batch:.1f} % of the samples",
                f"  Eq. 4      {self.label_space:,} possible labels, samples / global batch = "
                f"{self.bound:,.1f}: {'within' if self.within_bound else 'BEYOND'} the bound",
                f"  steps      {self.steps:,}: {100 * self.full_label_share:.1f} % at the full "
                f"label{prefixes}; {self.mixed_steps:,} of mixed groups",
                f"  negatives  {self.negatives:,.0f} of a row on average",
                f"  samples    {self.scheduled:,} scheduled, {self.remainder:,} left out "
                f"({self.remainder * percent:.1f} %, {unused} in turn), {self.repeated:,} repeated",
            )
        )


def coverage_report(grouped: GroupSizes, global_batch: int, policy: Policy) -> Coverage:
    """Counts how much of the data a plan uses."""
    levels = build_levels(grouped, global_batch, policy)
    sizes, scheduled = levels[0].sizes, num_scheduled(levels, global_batch, policy)
    small = sizes[sizes < global_batch]
    by_prefix = dict.fromkeys((level.prefix_length for level in levels), 0)
    for level in levels:
        by_prefix[level.prefix_length] += int(level.batches.sum())
    steps, space = sum(by_prefix.values()), label_space(grouped.radices)
    return Coverage(
        policy=policy,
        global_batch=global_batch,
        num_samples=grouped.num_draws,
        distinct=None if grouped.draws is None else grouped.num_samples,
        groups=size_statistics(sizes),
        groups_below_batch=int((small > 0).sum()),
        share_below_batch=float(small.sum() / max(sizes.sum(), 1)),
        label_space=space,
        steps=steps,
        scheduled=scheduled,
        remainder=grouped.num_draws - scheduled,
        steps_by_prefix=by_prefix,
        mixed_steps=int(levels[-1].batches.sum()) if policy == "mask" else 0,
        negatives=_negatives(levels, global_batch, policy),
        full_label_share=by_prefix[len(grouped.radices)] / max(steps, 1),
        repeated=steps * global_batch - scheduled,
        bound=grouped.num_draws / global_batch,
        within_bound=space * global_batch <= grouped.num_draws,
    )


def _line(report: Coverage) -> str:
    """Returns the report in one line."""
    text = f"an epoch has {count_of(report.steps, 'step')}"
    if (num_groups := report.groups["num_groups"]) > 1:
        text += f" over {num_groups:,.0f} groups, {100 * report.full_label_share:.0f} % of them "
        text += "within one group"
    if report.remainder:
        text += f"; it leaves out {report.remainder:,} of {count_of(report.num_samples, 'sample')}"
        text += ", and the next epoch leaves out others"
    return text


def _negatives(levels: list[Level], global_batch: int, policy: Policy) -> float:
    """Returns the mean number of other samples that a row of an epoch is compared with.

    These are all others in the batch, with two exceptions. In a mixed batch of "mask" only those of
    the row's group count; here groups are joined in the order of their labels, while an epoch
    shuffles them. If "wrap" fills a batch with a group smaller than it, samples repeat.
    """
    steps = sum(int(level.batches.sum()) for level in levels)
    if not steps:
        return 0.0
    compared = float(steps) * global_batch**2  # rows times what each is compared with
    if policy == "wrap":
        distinct = np.minimum(levels[0].sizes, global_batch)
        compared = global_batch * float(distinct @ levels[0].batches)
    if policy == "mask":
        mixed = int(levels[1].batches[0]) * global_batch
        ends = np.cumsum(levels[0].leftovers)
        cuts = np.unique(np.concatenate([[0], ends, np.arange(0, mixed + 1, global_batch)]))
        runs = np.diff(cuts[cuts <= mixed]).astype(np.float64)
        compared += float((runs**2).sum()) - mixed * global_batch
    return compared / (steps * global_batch) - 1.0


def check_coverage(grouped: GroupSizes, global_batch: int, policy: Policy) -> Coverage:
    """Logs the report before training, in one line or with --verbose whole, and returns it.

    MCL's Eq. 4 bounds the number of possible labels, K^j for K clusters and j stages, by the global
    batches of an epoch, M samples / batch B. Beyond it, the policies that never mix groups ("drop",
    "carry") raise ValueError, and others warn. Within it, the former warn of groups that are never
    used. Raises ValueError under any policy if an epoch has no step.
    """
    report = coverage_report(grouped, global_batch, policy)
    require_steps(report.steps, grouped.sizes, global_batch, policy)
    beyond = (
        f"{report.label_space:,} possible labels are beyond Eq. 4's bound of {report.bound:,.1f} "
        f"({report.num_samples:,} samples / global batch {global_batch:,})"
    )
    if policy in ALONE and not report.within_bound:
        raise ValueError(
            f"{beyond}, and policy {policy!r} would leave {report.remainder:,} samples out: use "
            "policy 'backoff', fewer clusters or a smaller global batch"
        )
    logger.info("%s (--verbose: more)", _line(report))
    for line in report.text().splitlines():  # a log line of its own: the log escapes line ends
        logger.debug("%s", line)
    if not report.within_bound:
        logger.warning("%s", beyond)
    elif policy in ALONE and report.groups_below_batch:
        logger.warning(
            "policy %r never uses %s smaller than the global batch of %s",
            policy, count_of(report.groups_below_batch, "group"), f"{global_batch:,}",
        )  # fmt: skip
    return report


# --- attributes ----------------------------------------------------------------------------------

_BATCHES, _MOST = 64, 1_000_000  # batches and samples that are counted
_EACH = 100  # samples of a group, if there are many groups


@dataclass(frozen=True)
class AttributeCoverage:
    """The part of a batch's loss that a model keeps if it reads nothing but one attribute.

    A row's loss is the log of the number of rows in its batch that the model cannot tell apart:
    those of its value. Where this is near 0, the attribute solves the batch, and nothing else is
    learned. In groups of few values it is near the log of the batch.

    nats             its mean over rows of batches of the plan
    nats_ungrouped   the same without groups
    larger           the same without groups, by batch size: of batches 4 and 16 times as large, as
                     far as an epoch has so many samples
    values           effective number of values, of up to a million samples: exp of the entropy
    values_in_group  the same within a group: exp of the mean entropy within a sample's group
    """

    nats: float
    nats_ungrouped: float
    larger: dict[int, float]
    values: float
    values_in_group: float


def attribute_coverage(codes: npt.NDArray[np.integer], plan: EpochPlan) -> AttributeCoverage:
    """Counts the values ``codes`` [N] of an attribute in batches and groups of a plan. Samples
    without a value (-1) are not told apart either."""
    ids, size, sums = plan.grouped.sample_ids, plan.global_batch, plan.grouped.weight_sums
    steps = np.unique(np.linspace(0, plan.steps_per_epoch - 1, _BATCHES).astype(np.int64))
    random, total = np.random.default_rng([plan.seed, plan.stage]), plan.grouped.num_draws

    def at_random(batch: int) -> float:
        losses = []
        for _ in range(max(4, min(_BATCHES, _MOST // batch))):
            rows = random.choice(total, batch, replace=batch > total)
            if sums is not None:  # a draw belongs to the sample in whose part of the sums it lies
                rows = np.searchsorted(sums, rows * (float(sums[-1]) / total), side="right")
            losses.append(_log_equal(codes[ids[rows]]))
        return float(np.mean(losses))

    places, groups = _spread_groups(np.asarray(plan.grouped.group_starts))
    counted = codes[ids[places]]
    pairs = groups * (int(counted.max()) + 2) + counted
    return AttributeCoverage(
        nats=float(np.mean([_log_equal(codes[plan.batch(int(step)).ids]) for step in steps])),
        nats_ungrouped=at_random(size),
        larger={batch: at_random(batch) for batch in (4 * size, 16 * size) if batch <= total},
        values=len(counted) / math.exp(_log_equal(counted)),
        values_in_group=math.exp(_log_equal(groups) - _log_equal(pairs)),
    )


def _spread_groups(starts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Returns at most about ``_MOST`` places in sample_ids, and the group of each: of some groups,
    spread evenly, and within each of these at even distances."""
    sizes = np.diff(starts)
    shown = np.flatnonzero(sizes)
    shown = shown[:: -(-len(shown) * _EACH // _MOST)]
    distance = -(-int(sizes[shown].sum()) // _MOST)
    parts = [np.arange(starts[group], starts[group + 1], distance) for group in shown]
    return np.concatenate(parts), np.repeat(shown, [len(part) for part in parts])


def _log_equal(codes: npt.NDArray[np.integer]) -> float:
    """Returns the mean over rows of the log of the number of rows with the same code."""
    _, counts = np.unique(codes, return_counts=True)
    return float((counts * np.log(counts)).sum() / len(codes))


def _of_batch(nats: float, batch: int) -> str:
    return f"{nats:.2f} of the {math.log(batch):.2f} nats of a batch of {batch:,}"


def report_attributes(index: SampleIndex, plan: EpochPlan) -> None:
    """Logs for each attribute of the index what it leaves to be learned."""
    size = plan.global_batch
    for name in index.attributes:
        shares = attribute_coverage(index.attribute(name)[0], plan)
        within, left = "", _of_batch(shares.nats, size)
        if len(plan.grouped.group_labels) > 1:
            within = f", {shares.values_in_group:.1f} in a group"
            left += f"; {shares.nats_ungrouped:.2f} without groups"
        left = ", ".join([left, *(_of_batch(nats, n) for n, nats in shares.larger.items())])
        logger.info(
            "coverage of the attribute %s: %.1f effective values%s; reading it alone leaves %s",
            name, shares.values, within, left,
        )  # fmt: skip
