"""How many steps an epoch has, from counts alone: before there is an index, or labels."""

from __future__ import annotations

from mclclip.data.group_tree import Policy


def total_steps(steps: int | None, epochs: float, steps_per_epoch: int) -> int:
    """Steps of a training: as given, or of ``epochs`` whole plans."""
    return steps or max(1, round(epochs * steps_per_epoch))


def check_ranks(name: str, global_batch: int, num_ranks: int) -> None:
    """Raises ValueError, with the numbers that would do, where ranks cannot share a batch.

    ``name`` is the training's option, ``base`` or ``train``.
    """
    if global_batch % num_ranks:
        near = range(1, max(2 * num_ranks, 128) + 1)
        fits = [number for number in near if global_batch % number == 0]
        raise ValueError(
            f"{name}.global_batch={global_batch} cannot be cut over {num_ranks} ranks: use one of "
            f"{fits} ranks, or a multiple of {num_ranks} as {name}.global_batch"
        )


def check_samples(
    name: str, global_batch: int, policy: Policy, num_clusters: int, num_samples: int
) -> None:
    """Raises ValueError where a batch, or the clusters, need more samples than there are."""
    if policy != "wrap" and global_batch > num_samples:
        raise ValueError(
            f"{name}.global_batch={global_batch:,} is more than the index's {num_samples:,} "
            f"samples: lower it, or set {name}.plan.policy=wrap"
        )
    if num_clusters > num_samples:
        raise ValueError(
            f"cluster.num_clusters={num_clusters:,} is more than the index's {num_samples:,} "
            "samples: lower it"
        )


def steps_per_epoch(
    num_samples: int, global_batch: int, policy: Policy, max_groups: int = 1
) -> tuple[int, int]:
    """Fewest and most steps of an epoch over ``num_samples`` in 1 to ``max_groups`` groups.

    Under ``backoff`` and ``mask`` leftovers are pooled until fewer than a batch are left, so that
    both are equal (see ``group_tree``).
    """
    whole = num_samples // global_batch
    groups = min(max_groups, num_samples)
    lost = groups * (global_batch - 1)  # at most so many do not fill a batch of their groups
    if policy == "drop":
        return max(0, -(-(num_samples - lost) // global_batch)), whole
    if policy == "wrap":
        return -(-num_samples // global_batch), (num_samples + lost) // global_batch
    return whole, whole
