"""The shipped scripts on a real SLURM of two nodes: the demo recipe, disturbed and undisturbed.

A run that was asked to leave, or that lost a process to ``kill -9``, starts again by itself and
ends with the weights of the undisturbed one, bit for bit. The scripts are submitted as they are:
what a user edits in them is given as options of sbatch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mclclip.checkpoint import step_files
from mclclip.util import shipped
from tests import tiny
from tests.e2e.conftest import rows_of, training_in
from tests.matrix import in_soak
from tests.slurm.conftest import Cluster, wait_until

pytestmark = pytest.mark.slow

STEPS = 100
# One stage of the recipe, with enough steps to be struck in the middle.
CUT_DOWN = (
    "num_stages=1",
    "controls=[]",
    "base.steps=20",
    f"train.steps={STEPS}",
    "train.log_every=5",
    "train.checkpoint.every=40",
    "cluster.num_clusters=4",
    "cluster.restarts=1",
    "data.index_workers=1",
)
START_S, RUN_S = 120.0, 240.0


@dataclass
class Job:
    """A submitted job, its log, and the run directory it works on."""

    cluster: Cluster
    job_id: str
    folder: Path
    run_dir: Path

    @property
    def log(self) -> str:
        paths = sorted(self.folder.glob(f"*-{self.job_id}*.out"))
        return "\n".join(path.read_text() for path in paths)

    def report(self) -> str:
        return f"{self.cluster.job(self.job_id)}\n--- log\n{self.log}\n{self.cluster.logs()}"

    def wait_for_step(self, step: int) -> None:
        """Until a training of stage 1 has come to ``step`` in a start that goes on."""
        wait_until(lambda: self.steps_done() >= step, RUN_S, self.report)
        assert self.steps_done() < STEPS, f"too late to disturb it\n{self.report()}"

    def steps_done(self) -> int:
        rows = rows_of(self.run_dir / "stage_1" / "train")
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_state(self, state: str, limit_s: float = RUN_S) -> None:
        """Until SLURM shows the job in this state; a job that has ended in another one fails."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

        def reached() -> bool:
            now = self.cluster.job(self.job_id)["JobState"]
            assert now == state or now not in ended, self.report()
            return now == state

        wait_until(reached, limit_s, self.report)

    def restarts(self) -> int:
        return int(self.cluster.job(self.job_id)["Restarts"])

    def wait_for_restart(self, number: int) -> None:
        """Until the job has been started again ``number`` times in all, and runs."""
        wait_until(lambda: self.restarts() == number, RUN_S, self.report)
        self.wait_for_state("RUNNING", START_S)

    def kill(self, rank: int) -> None:
        """Kills the process of a rank, in whichever node's launcher."""
        wanted = {f"SLURM_JOB_ID={self.job_id}", f"RANK={rank}", "LOCAL_RANK=0"}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted <= set(path.read_bytes().decode().split("\0")):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    return
        pytest.fail(f"rank {rank} does not run\n{self.report()}")

    def recorded(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.run_dir / "run_state.json").read_text())
        return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"))


def submit(cluster: Cluster, folder: Path, script: str, *words: object, **options: object) -> Job:
    """Submits a script from ``folder``; ``options`` are sbatch's."""
    environment = tiny.environment()
    job_id = cluster(
        *("sbatch", "--parsable", "--partition=gpu", "--gpus-per-node=0"),
        *("--cpus-per-task=1", "--time=30", *(f"--{k}={v}" for k, v in options.items())),
        *map(str, (tiny.ROOT / "slurm" / script, *words)),
        cwd=folder,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        PYTHONPATH=environment["PYTHONPATH"],
        HF_HUB_OFFLINE="1",
    ).strip()
    return Job(cluster, job_id.split(";")[0], folder, folder / "run")


def submit_run(cluster: Cluster, folder: Path, data: Path) -> Job:
    """A run of the demo recipe on two nodes, from a folder that has what a checkout has."""
    for name in ("launch", "slurm"):
        (folder / name).symlink_to(tiny.ROOT / name)
    paths = (
        f"run_dir={folder / 'run'}",
        f"data.sources.patterns.shards={data}/shards/*.tar",
        f"eval.suite.pairs.path={data}/pairs",
    )
    recipe = ("run", "--config", shipped.RECIPES / "demo.yaml", *paths, *CUT_DOWN)
    return submit(cluster, folder, "mclclip.sbatch", *recipe, nodes=2)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nothing happens to."""
    job = submit_run(cluster, tmp_path_factory.mktemp("undisturbed"), data)
    started = time.monotonic()
    job.wait_for_state("COMPLETED")
    print(f"undisturbed: {time.monotonic() - started:.0f} s")
    return job


def check_same_end(job: Job, undisturbed: Job) -> None:
    """The same weights: of every export, and in the last checkpoint of every training."""
    exports = tiny.digests(undisturbed.run_dir)
    assert len(exports) >= 4 and tiny.digests(job.run_dir) == exports
    for stage in ("stage_0/train", "stage_1/train"):
        assert training_in(job.run_dir / stage) == training_in(undisturbed.run_dir / stage)
    assert job.recorded()["state"] == "finished"


def test_an_undisturbed_run_finishes_quietly(undisturbed: Job) -> None:
    assert undisturbed.restarts() == 0
    assert undisturbed.recorded()["state"] == "finished"
    assert "Traceback" not in undisturbed.log, undisturbed.log
    assert not list(undisturbed.folder.glob("*.state*"))


def test_asked_to_leave_it_saves_and_starts_again(
    cluster: Cluster, undisturbed: Job, data: Path, tmp_path: Path
) -> None:
    """By USR1, as --signal=B:USR1@300 does before the time limit; then by a more urgent job."""
    job = submit_run(cluster, tmp_path, data)
    job.wait_for_step(15)
    cluster("scancel", "--signal=USR1", "--batch", job.job_id)
    first = saved_when_left(job, 15)
    job.wait_for_restart(1)
    job.wait_for_step(60)
    cluster(
        *("sbatch", "--partition=urgent", "--nodes=2", f"--output={tmp_path}/urgent"),
        *("--wrap", "sleep 1"),
    )
    second = saved_when_left(job, 60)
    job.wait_for_restart(2)
    job.wait_for_state("COMPLETED")
    check_same_end(job, undisturbed)
    for step in (first, second):
        assert f"step_{step:08d}" in job.log, "it went on from what was saved"
    for noise in ("Traceback", "ChildFailedError", "Exited with exit code", "SignalException"):
        assert noise not in job.log, job.log
    assert not list(job.folder.glob("*.state*"))


def saved_when_left(job: Job, least: int) -> int:
    """The step that was saved because the run was asked to leave."""
    wait_until(lambda: job.recorded()["state"] == "preempted", START_S, job.report)
    assert job.recorded()["exit_code"] == 85
    saved = step_files.steps(job.run_dir / "stage_1/train/checkpoints")[-1]
    assert least <= saved < STEPS and saved % 40, job.report()
    return saved


@in_soak
def test_killed_processes_end_the_start_and_not_the_job(
    cluster: Cluster, undisturbed: Job, data: Path, tmp_path: Path
) -> None:
    """-9 to a rank of one node, then, in the next start, to that of the other."""
    job = submit_run(cluster, tmp_path, data)
    for number, (step, rank) in enumerate(((50, 1), (65, 0)), start=1):
        job.wait_for_step(step)
        job.kill(rank)
        job.wait_for_restart(number)
    job.wait_for_state("COMPLETED")
    check_same_end(job, undisturbed)
    assert "(1 in a row)" in job.log and "(2 in a row)" in job.log
    assert not list(job.folder.glob("*.state*"))


def test_an_array_evaluates_every_export(
    cluster: Cluster, undisturbed: Job, tmp_path: Path
) -> None:
    """Three tasks share five exports, and find what the run itself found."""
    job = submit(cluster, tmp_path, "eval_array.sbatch", undisturbed.run_dir, array="0-2", nodes=1)
    wait_until(lambda: not cluster("squeue", "-h", "-j", job.job_id), RUN_S, job.report)
    paths = [*(undisturbed.run_dir / "eval").glob("*/results.jsonl")]
    found, own = (
        {
            (row["model"], row["benchmark"], row["metric"]): row["value"]
            for path in files
            for row in tiny.rows(path)
        }
        for files in (paths, [undisturbed.run_dir / "results.jsonl"])
    )
    assert found == own and own
