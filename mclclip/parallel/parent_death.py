"""Processes that end with the process that started them (needs no torch)."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

log = logging.getLogger("mclclip")
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, however the parent dies.

    torchrun's workers outlive a torchrun that was killed with -9 by seconds, and pool workers may
    outlive their owner; a restart would then write beside survivors. Elsewhere than on Linux
    this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG) failed: a worker may outlive a killed launcher")
    if os.getppid() != parent:  # the parent died between the two calls
        os._exit(1)
