"""Threads of torch and of its OpenMP inside processes whose user has not chosen a number."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mclclip.ranks.process_group import choose_num_threads
from tests import photos, tiny

CORES = len(os.sched_getaffinity(0))
COUNT = """
import json, os, sys
import torch
from threadpoolctl import threadpool_info

def count(*_):
    openmp = [i for i in threadpool_info() if i["user_api"] == "openmp"]
    of_torch = [i["num_threads"] for i in openmp if "torch" in i["filepath"]]
    return [torch.get_num_threads(), *of_torch]
"""


def counts(code: str, *words: str, **variables: str) -> Any:
    """Returns what a process prints last, as JSON; its OMP_NUM_THREADS is not set."""
    environment = {k: v for k, v in tiny.environment().items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT + code, *words], capture_output=True, text=True, timeout=600,
        env=environment | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_one_core_is_left() -> None:
    assert [choose_num_threads(cores) for cores in (1, 2, 8)] == [1, 1, 7]


def test_a_program_that_imports_mclclip_leaves_a_core() -> None:
    threads = counts("import mclclip; mclclip.load_model\nprint(json.dumps(count()))")
    assert len(threads) > 1 and {*threads} <= {*range(1, choose_num_threads(CORES) + 1)}


def test_the_users_number_is_not_changed() -> None:
    code = "import mclclip; mclclip.load_model\nprint(json.dumps(count()))"
    assert {*counts(code, OMP_NUM_THREADS=str(CORES))} == {CORES}


def test_a_worker_has_one_thread() -> None:
    code = """
from mclclip.ranks.process_group import start_loader_worker
from torch.utils.data import DataLoader
class Counts(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, number):
        return count()
torch.ones(1 << 20).add(1)
loader = DataLoader(Counts(), batch_size=None, num_workers=1, worker_init_fn=start_loader_worker)
print(json.dumps(next(iter(loader))))
"""
    threads = counts(code)
    assert len(threads) > 1 and {*threads} == {1}


@pytest.mark.parametrize(
    ("variables", "cores"),
    [({}, CORES), ({"LOCAL_WORLD_SIZE": "2"}, CORES // 2), ({"LOCAL_WORLD_SIZE": "0"}, CORES),
     ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "1"}, CORES), ({"LOCAL_WORLD_SIZE": "x"}, CORES)],
)  # fmt: skip
def test_the_cores_of_a_machine_are_dealt_among_its_own_ranks(
    variables: dict[str, str], cores: int
) -> None:
    code = "from mclclip.ranks import process_group\nprint(process_group.count_cores())"
    assert counts(code, **variables) == cores


@pytest.mark.parametrize(
    ("word", "variables", "most"),
    [
        ("", {}, choose_num_threads(CORES)),
        ("", {"OMP_NUM_THREADS": "1"}, 1),
        ("num_threads=3", {"OMP_NUM_THREADS": "1"}, 3),
    ],
)
def test_finetune_computes_with_the_users_number_of_threads(
    tmp_path: Path, word: str, variables: dict[str, str], most: int
) -> None:
    """As a verb and as a function: an option wins over the environment."""
    photos.write(tmp_path)
    base = f"{tiny.ROOT / 'mclclip/launch/recipes/tiny_clip.json'}@random"
    code = """
from mclclip import api, config
from mclclip.cli import entry
chosen, counted = [], []
def note(settled, *_, **__):
    chosen.append(settled.num_threads)
    counted.append(count())
api.method.run = note
api.opened.Run.open = classmethod(lambda *_: sys.exit(0))
images, captions, base, out, *options = sys.argv[1:]
words = ["finetune", images, "--captions", captions, "--base", base, "--out", out, *options]
assert entry.main(words) == 0
try:
    api.finetune(images, captions=captions, base=base, out=out, options=options)
except SystemExit:
    print(json.dumps([chosen, counted]))
"""
    images, captions = str(tmp_path), str(tmp_path / "captions.csv")
    given = [word] if word else []
    run = str(tmp_path / "run")
    chosen, counted = counts(code, images, captions, base, run, *given, **variables)
    assert chosen == [most if word else None] * 2
    for each in counted:
        assert len(each) > 1 and {*each} == {most}
