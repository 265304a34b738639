"""One check or figure in this process: ``python -m tests.gpu.child CATALOGUE NAME DEVICE FOLDER
RESULT``; started by ``running``. CATALOGUE is a module with ``run(name, device, folder)``.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu import Skip


def main(catalogue: str, name: str, device: str, folder: str, result: str) -> None:
    """Writes {"verdict", "note", "found"} to ``result``, and leaves past the interpreter's end."""
    verdict, note, found = "ok", "", None
    try:
        found = import_module(catalogue).run(name, device, Path(folder).resolve())
    except Skip as reason:
        verdict, note = "skip", str(reason)
    except BaseException as error:
        traceback.print_exc()
        verdict = "FAIL"
        note = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
    outcome: dict[str, Any] = {"verdict": verdict, "note": note, "found": found}
    if isinstance(found, str):
        outcome |= {"note": found, "found": None}
    Path(result).write_text(json.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
