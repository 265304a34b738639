"""How many steps an epoch has, from counts alone: before there is an index, or labels."""

from __future__ import annotations

from mclclip.data.epoch_plan import Policy


def steps_per_epoch(
    num_samples: int, global_batch: int, policy: Policy, max_groups: int = 1
) -> tuple[int, int]:
    """Fewest and most steps of an epoch over ``num_samples`` in 1 to ``max_groups`` groups.

    Under ``backoff`` and ``mask`` leftovers are pooled until fewer than a batch are left, so that
    both are equal (see ``epoch_plan``).
    """
    whole = num_samples // global_batch
    groups = min(max_groups, num_samples)
    lost = groups * (global_batch - 1)  # at most so many do not fill a batch of their groups
    if policy == "drop":
        return max(0, -(-(num_samples - lost) // global_batch)), whole
    if policy == "wrap":
        return -(-num_samples // global_batch), (num_samples + lost) // global_batch
    return whole, whole
