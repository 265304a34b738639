"""Standard output may be closed or its reader may end; other programs may call mclclip."""

import subprocess
import sys

import pytest

from tests import tiny
from tests.forks import python


def bash(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], env=tiny.environment() | {"PY": sys.executable},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "unbuffered"),
    [
        ('"$PY" -m mclclip recipes >&- 2>&- <&-; echo $?', "1"),
        ('"$PY" -m mclclip recipes | true; echo ${PIPESTATUS[0]}', "1"),
        ('"$PY" -m mclclip recipes 2>&1 | true; echo ${PIPESTATUS[0]}', ""),
    ],
)
def test_a_verb_ends_well_without_a_reader(line: str, unbuffered: str) -> None:
    done = bash(f"export PYTHONUNBUFFERED={unbuffered}; {line}")
    assert done.stdout.splitlines()[-1] == "0" and "Traceback" not in done.stderr, done.stderr


def test_a_mistake_keeps_its_code_without_a_reader() -> None:
    done = bash('"$PY" -m mclclip config --config nothing >&- 2>&-; echo $?')
    assert done.stdout == "2\n"


def test_what_is_printed_is_whole() -> None:
    """The text may have more bytes than a pipe takes at once."""
    code = (
        "from mclclip.ranks import streams; streams.outlive_readers()\n"
        "print('é' * 300_000); print('end')"
    )
    done = python(code, timeout=60, encoding="utf-8")
    assert done.stdout == "é" * 300_000 + "\nend\n"


def test_main_returns_its_code_and_leaves_signals_as_they_were() -> None:
    code = """
import signal
from mclclip.cli import entry
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
given = ("recipes", "recipes --no", "--help", "compare a b")
codes = [entry.main(words.split()) for words in given]
assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
signal.raise_signal(signal.SIGTERM)
print(codes, heard)
"""
    done = python(code, env=tiny.environment())
    assert done.stdout.splitlines()[-1:] == ["[0, 2, 0, 2] ['SIGTERM']"], done.stderr


@pytest.mark.slow
def test_a_program_goes_on_after_a_verb_that_was_asked_to_leave() -> None:
    """The timer that ends a process which does not leave must not end this one."""
    code = """
import os, signal, time
from mclclip.cli import entry
from mclclip.ranks import signals
from mclclip.util import shipped
def leave(copy):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
shipped.run, signals._AGAIN_S = leave, 0.5
code = entry.main(["recipes"])
time.sleep(1.5)
print(code)
"""
    done = python(code, env=tiny.environment())
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "85", done.stderr
