"""A worker that was ended from outside is named, however slowly it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest

from mclclip.data import batches


def end_slowly() -> None:
    """Closes the files, and with them the sentinel, long before the process has ended."""
    os.closerange(3, 1024)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("error", [ConnectionResetError("reset by peer"), EOFError()], ids=repr)
def test_a_worker_whose_files_close_before_it_ends_is_waited_for(error: Exception) -> None:
    worker = multiprocessing.get_context("fork").Process(target=end_slowly)
    worker.start()
    lost = batches._lost_worker(SimpleNamespace(_workers=[worker]), error)
    assert str(lost).startswith(f"loader worker 0 (process {worker.pid}) was ended from outside")
    assert "SIGKILL" in str(lost)
