"""Processes of tests, forked from one that has imported everything, which takes seconds."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

_PRELOADED = [
    "mclclip.cli.entry",
    "mclclip.config",
    "mclclip.method",
    "mclclip.ranks.process_group",
    "mclclip.run.lock",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",  # what the first optimizer imports
    "sklearn.metrics",
    "tests.contracts.test_evaluators",
    "tests.contracts.test_objectives",
    "tests.distributed.test_engines",
    "tests.e2e.conftest",
    "tests.made_before",
]


def is_running(pid: int) -> bool:
    """Whether a process can still do something (a zombie cannot)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def context() -> ForkServerContext:
    """The context of such processes; a test process has one server."""
    found = get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found
