"""Recipes for tests of the plan."""

from __future__ import annotations

from mclclip import config
from mclclip.config import Config
from tests import tiny

CC12M = 10_968_539


def recipe(name: str, *overrides: str) -> Config:
    return config.load(tiny.ROOT / "launch" / "recipes" / f"{name}.yaml", overrides)
