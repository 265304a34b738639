"""One process without a process group: its device, its seeds, its exit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from mclclip.ranks import collectives, process_group
from mclclip.ranks.failures import Lost
from mclclip.ranks.process_group import SINGLE, Context
from tests import forks
from tests.matrix import kept

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


# --- where a process stands --------------------------------------------------------------------


def test_alone_there_is_one_rank_and_no_group() -> None:
    context = process_group.init("cpu")
    assert context == SINGLE == Context(0, 1, 0, torch.device("cpu")) and context.is_main
    assert collectives.world_size() == 1 and collectives.rank() == 0
    process_group.shutdown()  # of no group: nothing happens


def test_torchrun_is_known_by_all_of_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may set some of torchrun's variables for its own purposes."""
    assert not process_group.under_torchrun()
    for name, value in TORCHRUN.items():
        if name != "MASTER_PORT":
            assert not process_group.under_torchrun()
            monkeypatch.setenv(name, value)
    assert process_group.under_torchrun()


@pytest.mark.parametrize(
    ("name", "value"), [("MASTER_PORT", ""), ("RANK", "x"), ("RANK", "1"), ("WORLD_SIZE", "-1")]
)
def test_variables_that_name_no_place_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each, there in (TORCHRUN | {name: value}).items():
        monkeypatch.setenv(each, there)
    with pytest.raises(ValueError, match=name):
        process_group.init("cpu")


def test_ranks_that_never_come_are_waited_for_until_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (TORCHRUN | {"WORLD_SIZE": "2", "MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)

    def wait() -> None:
        with pytest.raises(Lost, match="within 0.5 s; .*WORLD_SIZE=2"):
            process_group.init("cpu", limit_s=0.5)
        (warning,) = (message for message in caplog.messages if "WORLD_SIZE=2" in message)
        assert "peer_timeout_s" in warning

    assert forks.exit_code(wait) == 0


def test_tasks_of_srun_and_ranks_without_an_address_do_not_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert process_group.init("cpu") == SINGLE
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(ValueError, match="8 tasks.* slurm/mclclip.sbatch"):
        process_group.init("cpu")
    monkeypatch.setenv("SLURM_PTY_PORT", "34889")  # a shell of srun --pty
    assert process_group.init("cpu") == SINGLE
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="MASTER_ADDR of the environment does not fit"):
        process_group.init("cpu")


def test_accelerate_without_ranks_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert process_group.init("cpu") == SINGLE
    assert "torchrun" in caplog.text


def test_a_group_is_joined_and_left(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    process_group.join(torch.device("cpu"), 0, 1, init_method=store)
    try:
        assert torch.distributed.is_initialized()
        assert torch.distributed.get_backend() == "gloo"
    finally:
        process_group.shutdown()
    assert not torch.distributed.is_initialized()


def test_a_group_of_another_library_is_joined_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the variables say."""
    for name, value in (TORCHRUN | {"RANK": "5"}).items():
        monkeypatch.setenv(name, value)

    def both() -> None:
        child = os.fork()
        rank = 0 if child else 1
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        (tmp_path / str(rank)).write_text(str(process_group.init("cpu")))
        torch.distributed.barrier()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    assert forks.exit_code(both) == 0
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == str(Context(rank, 2, 0, torch.device("cpu")))


# --- devices -----------------------------------------------------------------------------------


def test_auto_is_the_gpu_of_this_rank_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert process_group.pick_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert chosen == [1]
    with pytest.raises(ValueError, match="process 2 .* sees 2 GPU.*: start one process for each"):
        process_group.pick_device("auto", local_rank=2)
    assert chosen == [1]
    assert process_group.pick_device("cpu", local_rank=1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process_group.pick_device("auto", local_rank=1) == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees no GPU here: set device=cpu or auto"):
        process_group.pick_device("cuda")
    assert process_group.choose_memory(torch.device("cuda", 1)) == "pinned"
    assert process_group.choose_memory(torch.device("cpu")) == "pageable"


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_arithmetic_of_a_gpu(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """torch must not only warn of such operations: attention would still add in any order."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)

    def begin() -> None:
        process_group.init("cuda", deterministic=deterministic)
        assert not torch.backends.cudnn.allow_tf32
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        assert workspace == (":4096:8" if deterministic else None)

    assert forks.exit_code(begin) == 0


# --- copies -----------------------------------------------------------------------------------


# --- seeds and threads -------------------------------------------------------------------------


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.random()), random.random()


def test_seeds_fix_all_three_generators() -> None:
    draws = []
    for words in ((0, 1, 2), (0, 1, 2), (0, 2, 1), (-1, 2**40, 3)):
        process_group.seed_everything(*words)
        draws.append(drawn())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))
    assert len(set(draws)) == 3


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with process_group.num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), process_group.num_threads(before + 2):
        _ = 1 / 0
    assert torch.get_num_threads() == before
    with process_group.num_threads(None):
        assert torch.get_num_threads() == before


# --- the exit ----------------------------------------------------------------------------------

LEAVE = """
import atexit, logging, sys
from mclclip.ranks import process_group
logging.basicConfig(stream=sys.stderr, format="%(message)s")
atexit.register(print, "the interpreter's own shutdown ran")
process_group.join(process_group.pick_device("cpu"), 0, 1, init_method=f"file://{sys.argv[1]}/store")
sys.stdout.write("a line without an end")
logging.warning("a warning")
process_group.leave(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", kept([0, 2], 1))
def test_leaving_flushes_and_keeps_the_exit_code(tmp_path: Path, code: int) -> None:
    ended = forks.python(LEAVE, tmp_path, code)
    assert ended.returncode == code
    assert ended.stdout == "a line without an end"
    assert "a warning" in ended.stderr
