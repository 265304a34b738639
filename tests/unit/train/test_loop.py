"""What the loop does around its steps."""

from __future__ import annotations

import gc
import weakref

import pytest

from mclclip.train.loop import hold_garbage_collector


class Ring:
    """Holds itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.ring = self


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_when_the_loop_asks_and_at_no_other_time(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), hold_garbage_collector():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            ring = weakref.ref(Ring())
            for _ in range(10_000):  # many times what starts a collection
                Ring()
            assert ring() is not None
            gc.collect()
            assert ring() is None
            raise KeyError
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_enabled else gc.disable)()
