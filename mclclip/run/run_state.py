"""The state of a run for scripts that restart it: one line of JSON, written by rename.

torchrun turns every exit code into 1 or 0, so the script that started it reads this file instead::

    {"state": "preempted", "exit_code": 85, "requeue": true, "reason": "SIGUSR1", ...}

``state`` is ``running``, ``preempted``, ``finished`` or ``failed``; a run that still says
``running`` when its processes are gone was killed. The line is in the run directory as
``run_state.json``, and in the file that the environment variable MCLCLIP_STATE_FILE names, which
the first rank of each node writes. Any rank may write a failure there. The line is padded to a
fixed size: where the disk is full it is written over the one before, and so is true there too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from mclclip import files

RUN_STATE = "run_state.json"
VARIABLE = "MCLCLIP_STATE_FILE"
_BYTES, _REASON = 2048, 1000  # of the file; characters of a reason


def write(
    run_dir: Path | None, state: str, *, verb: str, exit_code: int, requeue: bool, reason: str
) -> None:
    """Writes the state to ``run_dir`` (None: not there) and to the file that the variable names.

    A recorded failure that a restart would not mend is only overwritten by ``running``: what other
    ranks report after it is a consequence of it.
    """
    record = {
        "state": state,
        "exit_code": exit_code,
        "requeue": requeue,
        "reason": reason[:_REASON],
        "verb": verb,
        "time": files.now(),
    }
    line = json.dumps(record).encode().ljust(_BYTES - 1) + b"\n"
    paths = [] if run_dir is None else [Path(run_dir) / RUN_STATE]
    writes = state == "failed" or os.environ.get("LOCAL_RANK", "0") == "0"
    if (named := os.environ.get(VARIABLE)) and writes:
        paths.append(Path(named))
    for path in paths:
        if state == "running" or not _is_final(path):
            _write(path, line)


def _write(path: Path, line: bytes) -> None:
    """Replaces the file, or its content where there is no room for a second file."""
    try:
        files.write_bytes(path, line)
    except OSError:
        try:
            file = os.open(path, os.O_WRONLY)
        except OSError:
            file = None
        if file is None:
            raise
        try:
            with files.naming(path):
                os.pwrite(file, line, 0)
        finally:
            os.close(file)


def _is_final(path: Path) -> bool:
    """Whether ``path`` holds a failure that starting again would not mend."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # none yet, or not ours
        return False
    if not isinstance(record, dict):
        return False
    return record.get("state") == "failed" and not record.get("requeue")
