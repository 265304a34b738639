"""One check or figure in this process: ``python -m tests.gpu.child CATALOGUE NAME DEVICE FOLDER
RESULT``; started by ``running``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.running import one_line

CATALOGUES = {"checks": "tests.gpu.all_checks", "figures": "tests.gpu.figures"}


def main(catalogue: str, name: str, device: str, folder: str, result: str) -> None:
    """Writes {"verdict", "note", "found"} to ``result``, and leaves past the interpreter's end."""
    verdict, note, found = "ok", "", None
    if device == "cpu":  # read when Triton is first imported
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from mclclip.parallel.process_group import pick_device
        from tests.gpu.checks import Skip, Where

        entries: dict[str, Any] = import_module(CATALOGUES[catalogue]).ENTRIES
        try:
            found = entries[name].work(Where(pick_device(device), Path(folder).resolve()))
        except Skip as reason:
            verdict, note = "skip", str(reason)
    except BaseException as error:
        traceback.print_exc()
        verdict, note = "FAIL", one_line(f"{type(error).__name__}: {error}")
    if isinstance(found, str):
        note, found = found, None
    Path(result).write_text(json.dumps({"verdict": verdict, "note": note, "found": found}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
