"""How a run stands, for scripts that start it again: one line of JSON, written by rename.

torchrun turns every exit code into 1 or 0, so whoever started it reads this instead::

    {"state": "preempted", "exit_code": 85, "requeue": true, "reason": "SIGUSR1", ...}

``state`` is ``running``, ``preempted``, ``finished`` or ``failed``; one that still says ``running``
when its processes are gone was killed. It lies in the run directory as ``run_state.json``, written
by the first rank, and in the file that the variable MCLCLIP_STATE_FILE names, written by the first
rank of each node. A failure is written by whichever rank meets it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from mclclip import files

RUN_STATE = "run_state.json"
VARIABLE = "MCLCLIP_STATE_FILE"


def write(
    run_dir: Path | None, state: str, *, verb: str, exit_code: int, requeue: bool, reason: str
) -> None:
    """Records the state in ``run_dir`` (None: only where the variable says).

    The first failure that starting again would not mend stays: what other ranks report after it,
    being ended, follows from it.
    """
    record = {
        "state": state,
        "exit_code": exit_code,
        "requeue": requeue,
        "reason": reason,
        "verb": verb,
        "time": files.now(),
    }
    line = (json.dumps(record) + "\n").encode()
    paths = [] if run_dir is None else [Path(run_dir) / RUN_STATE]
    speaks = state == "failed" or os.environ.get("LOCAL_RANK", "0") == "0"
    if (named := os.environ.get(VARIABLE)) and speaks:
        paths.append(Path(named))
    for path in paths:
        if state == "running" or not _is_final(path):
            files.write_bytes(path, line)


def _is_final(path: Path) -> bool:
    """Whether ``path`` holds a failure that starting again would not mend."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or not ours
        return False
    return bool(record.get("state") == "failed" and not record.get("requeue"))
