"""Processes of tests, forked from one that has imported everything, which takes seconds."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "mclclip.cli",
    "mclclip.config",
    "mclclip.pipeline",
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


def context() -> ForkServerContext:
    """The context of such processes; a test process has one server."""
    found = get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    return found
