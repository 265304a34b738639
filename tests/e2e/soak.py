"""What the tests with kills share: how many, at which moments, what is struck, what is recorded.

``MCLCLIP_SOAK=1`` asks for all kills, ``MCLCLIP_SOAK_SEED`` for other moments.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mclclip.util import files
from tests import tiny
from tests.e2e.conftest import Started
from tests.matrix import SOAK

SEED = int(os.environ.get("MCLCLIP_SOAK_SEED", "0"))
TARGETS = ("launcher", "worker", "both")


def hit(run: Started, target: str, rng: random.Random) -> None:
    """Strikes the launcher, one of the workers, or both."""
    victims = [run.launcher.pid] if target in ("launcher", "both") else []
    if target in ("worker", "both"):
        victims.append(rng.choice(run.workers()))
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


class Record:
    """The kills of finished rounds: an interrupted soak goes on with the remaining ones.

    ``name``.json lies in ``.soak/`` of the checkout for a soak, else in ``temporary``; it counts
    for the same sources, seed and ``options`` only.
    """

    def __init__(self, name: str, temporary: Path, *options: Any) -> None:
        folder = tiny.ROOT / ".soak" if SOAK else temporary
        self.path = folder / f"{name}.json"
        code = tiny.digests(tiny.ROOT / "mclclip", "**/*.py")
        self.sources = files.digest_json([code, SEED, *options])

    def read(self) -> list[dict[str, Any]]:
        """The fields of every kill, in order."""
        saved = files.read_json(self.path) if self.path.exists() else {}
        kills: list[dict[str, Any]] = saved["kills"] if saved.get("sources") == self.sources else []
        return kills

    def write(self, kills: Iterable[Any]) -> None:
        """Notes all kills (dataclasses) of the finished rounds."""
        fields = [asdict(kill) for kill in kills]
        files.write_json(self.path, {"sources": self.sources, "kills": fields})

    def close(self) -> None:
        """All kills are done: the next soak begins anew."""
        self.path.rename(self.path.with_name(f"{self.path.stem}_done.json"))
