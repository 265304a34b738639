"""The scripts of launch/ and slurm/: what they start, how they pass on signals, how they end.

A stand-in for torchrun and for mclclip's ranks makes these fast; ``tests/slurm`` and
``tests/distributed`` have the real ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.forks import is_running
from tests.matrix import in_soak, kept

LAUNCH, SLURM = tiny.ROOT / "launch", tiny.ROOT / "slurm"

SCRIPTS = [*LAUNCH.glob("*.sh"), *SLURM.glob("*.sbatch")]
PAPERS = sorted(set(LAUNCH.glob("recipes/paper_on_8_gpus/*.sh")) -
                set(LAUNCH.glob("recipes/paper_on_8_gpus/common.sh")))  # fmt: skip
BATCH = ["mclclip.sbatch", "eval_array.sbatch"]
WAIT_S = 180.0  # for what takes moments, on a busy machine

TORCHRUN = """#!{python}
import json, os, signal, subprocess, sys
from pathlib import Path

if sys.argv[1] == "-c":
    if "device_count" in sys.argv[2]:
        print(3)
        sys.exit()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
folder = Path(os.environ["RECORDS"])
words = sys.argv[1:]
split = next(n for n in range(len(words)) if words[n - 1:n + 1] == ["-m", "mclclip"])
signals = [name for name in ("SIGUSR1", "SIGTERM", "SIGHUP")
           if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
(folder / "torchrun.json").write_text(json.dumps(dict(
    options=words[:split - 1], arguments=words[split + 1:], environment=dict(os.environ),
    pid=os.getpid(), ignored=signals)))
rank = subprocess.Popen([sys.executable, folder / "rank.py", *words[split + 1:]],
                        start_new_session=True)
if rank.wait():
    print("Traceback of torchrun", file=sys.stderr)
    sys.exit(1)
"""
RANK = """
import ctypes, json, os, signal, sys, time
from pathlib import Path

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
folder = Path(os.environ["RECORDS"])


def record(state, code):
    line = json.dumps(dict(state=state, exit_code=code, requeue=True, reason="a \\"reason\\""))
    Path(os.environ["MCLCLIP_STATE_FILE"]).write_text(line + "\\n")


def leave(number, frame):
    record("preempted", 85)
    os._exit(0)


verb, words = sys.argv[1], [int(word) for word in sys.argv[2:]]
if verb == "late":  # has no handlers yet
    (folder / "rank").write_text(str(os.getpid()))
    time.sleep(1)
if verb == "silent":
    sys.exit(*words)
record("running", 0)
if verb == "end":
    record({0: "finished", 85: "preempted"}.get(words[0], "failed"), words[0])
    sys.exit(words[1])
if verb == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGUSR1, leave)
if verb == "train":
    signal.signal(signal.SIGINT, leave)
if verb == "hang":
    signal.signal(signal.SIGINT, lambda *_: Path(folder / "asked").touch())
try:
    (folder / "rank").write_text(str(os.getpid()))
    time.sleep(600)
except KeyboardInterrupt:
    print("mclclip: interrupted", file=sys.stderr)
    sys.exit(130)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder of stand-ins for torchrun and ranks, which record how they are called."""
    (tmp_path / "python").write_text(TORCHRUN.replace("{python}", sys.executable))
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def start(folder: Path, *words: object, script: str = "local.sh", **variables: object) -> Any:
    """The script as a process of a session of its own, as under a terminal.

    Its signals are those of a terminal too, though the tests may run under nohup or in the
    background, where SIGHUP and SIGINT are ignored, and a shell cannot trap what it inherits so.
    """
    own = {"PYTHON": folder / "python", "RECORDS": folder, "TMPDIR": folder / "temporary"}
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS",)}
    return subprocess.Popen(
        [LAUNCH / script, *map(str, words)],
        env=inherited | {k: str(v) for k, v in {**own, **variables}.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
    )


def finish(process: Any) -> tuple[int, str]:
    """Returns the exit code and stderr."""
    _, stderr = process.communicate(timeout=WAIT_S)
    return process.returncode, stderr


def seen(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "torchrun.json").read_text())
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what is started ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "variables", "ranks", "threads"),
    [((), {}, "3", None), ((5,), {"OMP_NUM_THREADS": 7}, "5", "7"),
     ((2,), {"SLURM_CPUS_PER_TASK": 9}, "2", "4"), ((8,), {"SLURM_CPUS_PER_TASK": 4}, "8", "1")],
)  # fmt: skip
def test_ranks_of_one_machine_share_its_cores(
    folder: Path, words: tuple[int, ...], variables: dict[str, Any], ranks: str, threads: str | None
) -> None:
    assert finish(start(folder, *words, "silent", 0, **variables)) == (0, "")
    found = seen(folder)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    assert (found["options"], found["arguments"]) == (launcher, ["silent", "0"])
    assert found["ignored"] == ["SIGUSR1", "SIGTERM", "SIGHUP"]
    assert threads is None or found["environment"]["OMP_NUM_THREADS"] == threads


MEETING = {"HEAD_ADDRESS": "head:29500", "NUM_NODES": 2, "NODE_RANK": 1}


@pytest.mark.parametrize(("number", "is_host"), [(0, 1), (1, 0)])
def test_several_hosts(folder: Path, number: int, is_host: int) -> None:
    variables = {**MEETING, "NODE_RANK": number, "LOCAL_ADDRESS": "10.0.0.7", "NPROC_PER_NODE": 8}
    process = start(folder, "silent", script="multinode.sh", GLOO_SOCKET_IFNAME="ib0", **variables)
    assert finish(process) == (0, "")
    options = " ".join(seen(folder)["options"][2:])
    assert options == (
        "--nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:29500 "
        f"--rdzv-id mclclip --rdzv-conf is_host={is_host} --local-addr 10.0.0.7"
    )
    assert seen(folder)["environment"]["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("script", "words", "changes", "line"),
    [
        ("multinode.sh", ["silent"], {"NUM_NODES": None}, "NUM_NODES is not set: "),
        ("multinode.sh", ["silent"], {"HEAD_ADDRESS": "head"},
         "HEAD_ADDRESS is 'head': wanted host:port"),
        ("local.sh", [], {}, "no command"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    folder: Path, script: str, words: list[str], changes: dict[str, Any], line: str
) -> None:
    given = {k: v for k, v in (MEETING | changes).items() if v is not None}
    code, stderr = finish(start(folder, *words, script=script, **given))
    assert code == 2 and stderr.startswith(f"{script}: {line}") and stderr.count("\n") == 1


# --- how it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("end", 0, 1), 0),  # crashed after it had finished
        (("end", 85, 0), 85),
        (("end", 85, 1), 1),  # left because another rank had died
        (("end", 2, 1), 2),
        (("end", 130, 1), 130),
        (("killed",), 1),
        (("silent", 0), 0),  # a verb that records nothing
    ],
)
def test_codes(folder: Path, words: tuple[object, ...], code: int) -> None:
    assert finish(start(folder, 1, *words))[0] == code
    assert not list((folder / "temporary").iterdir())


def test_a_caller_that_reads_the_state_itself(folder: Path) -> None:
    state = folder / "state"
    process = start(folder, 1, "end", 85, 0, MCLCLIP_STATE_FILE=state, PREEMPTED_CODE=0)
    assert finish(process) == (0, "")
    assert json.loads(state.read_text())["state"] == "preempted"
    process = start(folder, 1, "silent", 3, MCLCLIP_STATE_FILE=state)
    assert finish(process)[0] == 1, "what an earlier start recorded does not count"


@pytest.mark.parametrize(
    ("script", "code", "last"),
    [("local.sh", 2, 'mclclip: a "reason"'), ("multinode.sh", 1, "Traceback of torchrun")],
)
def test_the_users_mistake_is_the_last_line(
    folder: Path, script: str, code: int, last: str
) -> None:
    """As decoded from the record; a crash ends with what it left."""
    variables = {**MEETING, "NPROC_PER_NODE": 1} if script == "multinode.sh" else {}
    ended, stderr = finish(start(folder, "end", code, 1, script=script, **variables))
    assert ended == code
    assert stderr.splitlines()[0] == "Traceback of torchrun" and stderr.splitlines()[-1] == last


@pytest.mark.slow
def test_a_real_mistake_under_torchrun(folder: Path) -> None:
    process = start(
        folder, 2, "config", f"--config={folder}/n\u00e9.yaml",
        PYTHON=sys.executable, PYTHONPATH=tiny.ROOT,
    )  # fmt: skip
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    lines = stderr.splitlines()
    assert "Traceback (most recent call last):" in lines, "torchrun is quiet: say it once"
    assert lines[-1].startswith("mclclip: ") and f"{folder}/n\u00e9.yaml" in lines[-1]
    assert lines[-1] in lines[:-1], "the same words as the rank's own"


@pytest.mark.parametrize(
    ("name", "verb"), [("SIGTERM", "wait"), ("SIGHUP", "wait"), ("SIGUSR1", "late")]
)
def test_asked_to_leave(folder: Path, name: str, verb: str) -> None:
    """Some clusters signal all processes of the script's group."""
    process = start(folder, 1, verb)
    until((folder / "rank").exists)
    os.killpg(process.pid, getattr(signal, name))
    assert finish(process) == (85, "")
    assert not list((folder / "temporary").iterdir())


@pytest.mark.parametrize(
    ("verb", "ends"),
    [("wait", (130, "mclclip: interrupted\n")), ("train", (85, "")), ("hang", (130, ""))],
)
def test_interrupted(folder: Path, verb: str, ends: tuple[int, str]) -> None:
    """A training saves first; a second Ctrl-C ends what does not end by the first."""
    process = start(folder, 1, verb)
    until(lambda: (folder / "rank").exists() and (folder / "rank").read_text() != "")
    os.killpg(process.pid, signal.SIGINT)
    if verb == "hang":
        until((folder / "asked").exists)
        os.killpg(process.pid, signal.SIGINT)
    assert finish(process) == ends
    pids = [seen(folder)["pid"], int((folder / "rank").read_text())]
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_nothing_outlives_a_killed_script(folder: Path) -> None:
    process = start(folder, 1, "wait")
    until(lambda: (folder / "rank").exists() and (folder / "rank").read_text() != "")
    process.kill()
    pids = [seen(folder)["pid"], int((folder / "rank").read_text())]
    until(lambda: not any(map(is_running, pids)))


@in_soak
def test_a_real_torchrun_says_nothing_when_asked_to_leave(folder: Path) -> None:
    package = folder / "mclclip"
    package.mkdir()
    (package / "__main__.py").write_text(RANK)
    process = start(folder, 2, "wait", PYTHON=sys.executable, PYTHONPATH=folder)
    until((folder / "rank").exists)
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process) == (85, "")


# --- the batch script ---------------------------------------------------------------------------

SRUN = """#!/bin/bash
echo "$@" >>"$RECORDS/steps"
[[ -z ${STATE:-} ]] || echo "$STATE" >"$MCLCLIP_STATE_FILE"
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
    "show node n1") echo "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=n1" ;;
    *) echo "$@" >>"$RECORDS/asked" ;;
esac
"""


def batch(
    folder: Path, code: int, state: dict[str, Any] | None, **variables: str
) -> tuple[int, str]:
    """Starts mclclip.sbatch with an srun that ends so; returns its exit code and what it asked of
    scontrol."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    if not (folder / "launch").exists():
        (folder / "launch").symlink_to(LAUNCH)
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORDS": str(folder),
        "CODE": str(code),
        "STATE": json.dumps(state) if state else "",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "mclclip",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    done = subprocess.run(
        ["bash", SLURM / "mclclip.sbatch", "run", "--config", "x"],
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert not done.stderr
    asked = folder / "asked"
    text = asked.read_text() if asked.exists() else ""
    asked.unlink(missing_ok=True)
    return done.returncode, text


PREEMPTED = {"state": "preempted", "exit_code": 85, "requeue": True}
AGAIN = "requeue Incomplete 7\n"


def ended(state: str, code: int) -> dict[str, Any]:
    return {"state": state, "exit_code": code, "requeue": False}


# What srun ends with and what it has recorded, and the code and the question that come of it.
STARTS: dict[str, list[tuple[int, dict[str, Any] | None, int, str]]] = {
    "a job that is saved starts again however often": [(0, PREEMPTED, 0, AGAIN)] * 3,
    "one that its user stopped stays so": [(0, PREEMPTED | {"requeue": False}, 85, "")],
    "a mistake is not repeated": [(1, ended("failed", 2), 2, "")],
    "progress begins the count anew": [(1, None, 0, AGAIN), (0, PREEMPTED, 0, AGAIN)] * 3,
    "a finished job leaves no files": [(137, None, 0, AGAIN), (0, ended("finished", 0), 0, "")],
    **{  # the last is what the others record when a task has died
        f"failures in a row are counted: {state}": [
            *[(137, state, 0, AGAIN)] * 2, (137, state, code, ""),
        ]
        for state, code in (
            (None, 137), (ended("failed", 1), 1), (PREEMPTED, 137),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", STARTS)
def test_whether_a_job_starts_again(folder: Path, case: str) -> None:
    for code, state, *wanted in STARTS[case]:
        assert [*batch(folder, code, state, MAX_RESTARTS="2")] == wanted
    assert "finished" not in case or not list(folder.glob("*.state*"))


def test_what_a_step_is(folder: Path) -> None:
    batch(folder, 1, None, CONTAINER_IMAGE="image.sqsh", CONTAINER_MOUNTS="/data:/data")
    step = (folder / "steps").read_text()
    assert "--kill-on-bad-exit=1" in step and "--container-image=image.sqsh" in step
    assert f"--container-mounts={folder}:{folder},/data:/data" in step
    assert step.endswith("run --config x\n")


# --- as text ------------------------------------------------------------------------------------


def test_syntax() -> None:
    for script in (*SCRIPTS, LAUNCH / "common.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        text = script.read_text()
        assert script.name == "common.sh" or "\nset -euo pipefail\n" in text
        assert not re.search(r"(?<![\w.])/(home|work|root|mnt|scratch)/", text), "a machine's path"
        assert os.access(script, os.X_OK) == (script.suffix == ".sh" and script.stem != "common")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck() -> None:
    subprocess.run(["shellcheck", "-x", *SCRIPTS, *PAPERS], check=True, cwd=tiny.ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("script", kept(PAPERS, 1), ids=lambda path: path.stem)
def test_a_table_of_a_paper_is_planned_with_its_gpu_hours(script: Path, tmp_path: Path) -> None:
    """A dry run plans every run, within a tenth of the hours that the script names, and writes
    nothing; the page has the table. MLCD's plans count the embeddings of each run that shares."""
    (said,) = re.findall(r"About ([\d,]+) GPU-hours", script.read_text().replace("\n# ", " "))
    environment = {**os.environ, "DRY_RUN": "1", "data": str(tmp_path / "data")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    before = sorted((tiny.ROOT / "runs").glob("*"))
    done = subprocess.run(
        ["bash", script], env=environment, check=True, capture_output=True, text=True
    )
    hours = [float(n) for n in re.findall(r"^in all +[\d.]+ +([\d.]+)$", done.stdout, re.MULTILINE)]
    again = 192 * (len(hours) - 1) if script.stem == "mlcd_labels" else 0
    assert sum(hours) - again == pytest.approx(float(said.replace(",", "")), rel=0.1)
    assert done.stderr.count("'launch/local.sh'") == len(hours) > 1
    page = (tiny.ROOT / "docs/pages/evidence/what-helps.md").read_text()
    (name,) = set(re.findall(r"what_helps.py' '(\w+)'", done.stderr))
    assert f"<!-- table {name} -->" in page and not (tmp_path / "data").exists()
    assert sorted((tiny.ROOT / "runs").glob("*")) == before


def test_slurm_signals_the_script_before_the_limit_and_starts_it_again() -> None:
    text = (SLURM / "mclclip.sbatch").read_text()
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@300"):
        assert re.search(rf"^#SBATCH .*{option}\b", text, re.MULTILINE), option
