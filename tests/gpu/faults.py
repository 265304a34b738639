"""A catalogue whose entries fail in every way, for the tests of the runner; needs no torch."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.gpu import Skip


def run(name: str, device: str, folder: Path) -> Any:
    """Ends as its name says."""
    if name == "fails":
        raise ValueError("two lines\nin one")
    if name == "crashes":
        (folder / "partial.json").write_text(json.dumps([_row("the first")]))
        os.abort()
    if name == "leaves":
        os._exit(7)
    if name == "hangs":
        time.sleep(60.0)
    if name == "skips":
        raise Skip("not here")
    if name == "figure":
        return [_row("plain", 1234.0), _row("other", 617.0, 0.5)]
    return f"off by {'nothing' if device == 'cpu' else device}"


def _row(variant: str, value: float | None = None, ratio: float | None = None) -> dict[str, Any]:
    return {"variant": variant, "value": value, "unit": "ms", "ratio": ratio, "note": ""}
