"""What all tests share: a quiet offline environment, one thread, and the optional real data."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings

from mclclip.util import advice

# Under nohup and in the background of a shell these are ignored, which processes would inherit. A
# handler is not inherited.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# Random examples are the same in every run, and none fails for the time that it takes.
settings.register_profile(
    "certain",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("certain")


def pytest_collection() -> None:
    """Nothing of what is collected is garbage, and looking for it took a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_typed_command() -> Iterator[None]:
    """What a test has typed is not offered by the messages of the next one."""
    yield
    advice.remember("", ())


@pytest.fixture(scope="session")
def prepared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory up to the labels of stage 1 (`damage.prepare`); read only."""
    from tests import damage

    return damage.prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of rendered samples, and minimal pairs; read only."""
    from tests import tiny

    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=96)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of small real data sets beside the checkout (or at MCLCLIP_SHARED_DATA)."""
    folder = Path(os.environ.get("MCLCLIP_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set MCLCLIP_SHARED_DATA to run this test")
    return folder
