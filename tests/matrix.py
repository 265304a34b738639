"""Matrices of engines, ranks and options: `make test` runs one cell, `make soak` all of them.

Beside those two, `make slow` has a mark of its own (`slow` alone): one short instance of each check
that takes minutes, for the continuous integration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

SOAK = os.environ.get("MCLCLIP_SOAK") == "1"
IN_SOAK = (pytest.mark.slow, pytest.mark.skipif(not SOAK, reason="in 'make soak'"))

Test = TypeVar("Test", bound=Callable[..., Any])


def in_soak(test: Test) -> Test:
    """Leaves a test to the soak; a quicker one shows the same in `make test`."""
    for mark in IN_SOAK:
        test = mark(test)
    return test


def fuller_in_soak(test: Test) -> Test:
    """Lets a test of ``make test`` run in the soak too, which runs slow tests only, and do more."""
    return pytest.mark.slow(test) if SOAK else test


def kept(cases: Sequence[Any], *indices: int) -> list[Any]:
    """The cases of a ``parametrize``, of which all but those at ``indices`` are left to the soak.

    A case is one value, or a tuple of one value per argument.
    """
    return [
        case
        if number in indices
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=IN_SOAK)
        for number, case in enumerate(cases)
    ]
