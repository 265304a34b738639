"""Signals ask processes to save and end; each test starts its own process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.forks import python

START = "import os, signal; from mclclip.ranks import signals; signals.install_handlers()\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_outside_of_training_it_is_raised_and_a_second_one_does_not_interrupt_the_leaving(
    name: str,
) -> None:
    done = python(
        START + "try:\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "except Exception:\n"
        "    print('taken for an error')\n"
        "except signals.Preempted as error:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(error.reason, error.requeue, signals.get_request())\n"
    )
    assert done.stdout.split() == [name, "True", name] and done.returncode == 0


def test_inside_it_waits_and_is_raised_at_the_end() -> None:
    done = python(
        START + "try:\n"
        "    with signals.defer_requests():\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        print('still here', signals.get_request())\n"
        "except signals.Preempted as error:\n"
        "    print('raised', error.reason)\n"
    )
    assert done.stdout.splitlines() == ["still here SIGUSR1", "raised SIGUSR1"]


def test_another_error_inside_is_not_hidden() -> None:
    done = python(
        START + "try:\n"
        "    with signals.defer_requests():\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        raise ValueError('the reason')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert done.stdout.strip() == "the reason"


def test_a_process_that_is_ending_is_left_in_peace() -> None:
    """By requests, by the death of a worker, and by a SIGHUP that nohup had ignored."""
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + START +
        "os.kill(os.getpid(), signal.SIGHUP); print('goes on', signals.get_request())\n"
        "def died(*_):\n    raise RuntimeError('a worker died')\n"
        "signal.signal(signal.SIGCHLD, died)\n"
        "signals.ignore()\n"
        "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGCHLD)\n"
        "print(signals.get_request())"
    )  # fmt: skip
    done = python(code)
    assert done.stdout.split() == ["goes", "on", "None", "None"] and done.returncode == 0


def test_children_ignore_what_their_parent_answers() -> None:
    done = python(
        START + "signals.set_action(signal.SIG_IGN)\n"
        "for name in ('SIGTERM', 'SIGUSR1', 'SIGINT'):\n"
        "    os.kill(os.getpid(), getattr(signal, name))\n"
        "print('alive', signals.get_request())\n"
    )
    assert done.stdout.strip() == "alive None"


def test_a_second_interrupt_ends_a_cleaning_up_that_hangs() -> None:
    done = python(
        START + "import time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "finally:\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
    )
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize(("name", "error"), [("SIGTERM", "Preempted"), ("SIGINT", "Keyboard")])
def test_what_is_lost_in_a_destructor_is_raised_again(name: str, error: str) -> None:
    done = python(
        START + "import time; signals._AGAIN_S = 0.3\n"
        "class Held:\n"
        f"    def __del__(self): os.kill(os.getpid(), signal.{name}); time.sleep(0.1)\n"
        "held = Held(); del held; print('lost', flush=True); time.sleep(60)\n"
    )
    assert done.returncode and done.stdout.split() == ["lost"] and error in done.stderr


def test_the_first_interrupt_of_a_training_waits_for_a_step_and_the_second_does_not() -> None:
    saved = python(
        START + "import time\ntry:\n"
        "    with signals.defer_requests():\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2); print('saved')\n"
        "except signals.Preempted as asked: print(asked.requeue, signals.code_of(asked))\n"
    )
    assert saved.stdout.split() == ["saved", "False", "85"] and saved.returncode == 0
    again = python(
        START + "import time\n"
        "with signals.defer_requests():\n"
        "    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    assert again.returncode == -signal.SIGINT


def test_a_program_that_is_interrupted_in_a_training_saves_before_it_ends() -> None:
    done = python(
        START + "import time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    with signals.save_on_interrupt():\n"
        "        with signals.defer_requests():\n"
        "            os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2); print('saved')\n"
        "except KeyboardInterrupt: print('raised')\n"
        "restored = signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "print(restored, signals.get_request())\n"
    )
    assert done.stdout.split() == ["saved", "raised", "True", "None"] and done.returncode == 0


def test_nothing_is_raised_out_of_an_import(tmp_path: Path) -> None:
    """An unexpected error may make the C++ code of a module abort the process."""
    (tmp_path / "half.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.5); print('imported')\n"
        "except BaseException:\n"
        "    print('raised')\n"
    )
    done = python(
        START + f"import sys, time; sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n    import half; time.sleep(60)\n"
        "except signals.Preempted: print('after')\n"
    )
    assert done.stdout.split() == ["imported", "after"]
