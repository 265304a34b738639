"""The catalogue of checks: importing it registers all."""

from __future__ import annotations

from tests.gpu import checks, clusters, heads, runs, training

MODULES = (heads, clusters, training, runs)
ENTRIES = checks.CHECKS
