"""torch and OpenMP get the right number of threads if the user has not chosen one."""

import json
import os
from pathlib import Path

import pytest

from mclclip.ranks.process_group import choose_num_threads, count_cores
from tests import photos, tiny
from tests.forks import python
from tests.matrix import kept

CORES = len(os.sched_getaffinity(0))
# Prints the threads of a program that has imported mclclip, of a loader's worker, and of trainings,
# as verbs and as functions, with and without an option; beside the number that each has settled.
COUNT = """
import json, os, sys
import torch
from threadpoolctl import threadpool_info

def count(*_):
    openmp = [i for i in threadpool_info() if i["user_api"] == "openmp"]
    of_torch = [i["num_threads"] for i in openmp if "torch" in i["filepath"]]
    return [torch.get_num_threads(), *of_torch]

import mclclip
mclclip.load_model
counted = {"program": [(None, count())]}

from mclclip.ranks.process_group import start_loader_worker
from torch.utils.data import DataLoader
class Counts(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, number):
        return count()
torch.ones(1 << 20).add(1)
loader = DataLoader(Counts(), batch_size=None, num_workers=1, worker_init_fn=start_loader_worker)
counted["worker"] = [(None, each) for each in loader]

from mclclip import api
from mclclip.cli import entry
def note(settled, *_, **__):
    counted[name].append((settled.num_threads, count()))
api.method.run = note
def stop(*_):
    raise SystemExit
api.opened.Run.open = stop
images, captions, base, out = sys.argv[1:]
words = ["finetune", images, "--captions", captions, "--base", base, "--out", out]
for name, options in (("training", []), ("option", ["num_threads=3"])):
    counted[name] = []
    assert entry.main([*words, *options]) == 0
    try:
        api.finetune(images, captions=captions, base=base, out=out, options=options)
    except SystemExit:
        pass
print(json.dumps(counted))
"""


def test_one_core_is_left() -> None:
    assert [choose_num_threads(cores) for cores in (1, 2, 8)] == [1, 1, 7]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", kept([None, CORES], 0))
def test_a_process_has_the_users_number_of_threads_or_leaves_a_core(
    tmp_path: Path, chosen: int | None
) -> None:
    """An option wins over the environment, and a worker has one thread."""
    photos.write(tmp_path)
    base = f"{tiny.ROOT / 'mclclip/launch/recipes/tiny_clip.json'}@random"
    environment = {k: v for k, v in tiny.environment().items() if k != "OMP_NUM_THREADS"}
    environment |= {} if chosen is None else {"OMP_NUM_THREADS": str(chosen)}
    words = tmp_path, tmp_path / "captions.csv", base, tmp_path / "run"
    done = python(COUNT, *words, env=environment)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    most = chosen or choose_num_threads(CORES)
    for name, settled, threads in (
        ("program", None, most), ("worker", None, 1), ("training", None, most), ("option", 3, 3)
    ):  # fmt: skip
        for option, each in counted[name]:
            assert option == settled and len(each) > 1, (name, counted)
            assert {*each} == {threads}, (name, counted)
    assert [len(counted[name]) for name in ("training", "option")] == [2, 2]


@pytest.mark.parametrize(
    ("variables", "cores"),
    [({}, CORES), ({"LOCAL_WORLD_SIZE": "2"}, CORES // 2), ({"LOCAL_WORLD_SIZE": "0"}, CORES),
     ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "1"}, CORES), ({"LOCAL_WORLD_SIZE": "x"}, CORES)],
)  # fmt: skip
def test_the_cores_of_a_machine_are_dealt_among_its_own_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cores: int
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert count_cores() == cores
