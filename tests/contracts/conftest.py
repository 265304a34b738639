"""Contracts run on the same real processes as the distributed tests."""

from tests.distributed.conftest import ranks

__all__ = ["ranks"]
