"""Processes that end with the process that started them (needs no torch)."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from mclclip.parallel import signals

log = logging.getLogger("mclclip")
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, however the parent dies.

    torchrun's workers outlive a torchrun that was killed with -9 by seconds, and pool workers may
    outlive their owner; a restart would then write beside survivors. A worker whose torchrun died
    while the worker was still importing ends here. Elsewhere than on Linux this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG) failed: a worker may outlive a killed launcher")
    # The parent may have died between the two calls, or long before them.
    if os.getppid() != parent or _launcher_is_gone(parent):
        log.error("the launcher of process %d has died: the process ends", os.getpid())
        os._exit(1)


def start_pool_worker() -> None:
    """``initializer`` of every pool and loader process: it ends with its process, not by signals.

    A signal to the whole job must not end a loader before its trainer has saved.
    """
    die_with_parent()
    signals.ignore_in_child()


def _launcher_is_gone(parent: int) -> bool:
    """True where torchrun, a Python program, started this process but is no ancestor any more."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    while parent > 0:
        try:
            command = Path(f"/proc/{parent}/cmdline").read_bytes()
            stat = Path(f"/proc/{parent}/stat").read_text()
        except OSError:  # cannot be known here: no reason to end
            return False
        # Process 1 adopts orphans and may be any Python program in a container.
        launcher = b"torchrun" in command or b"torch.distributed" in command
        if launcher or (b"python" in command and parent != 1):
            return False
        parent = int(stat.rsplit(")", 1)[1].split()[1])
    return True
