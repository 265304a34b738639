"""Signals as requests, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = "import os, signal; from mclclip.ranks import signals; signals.install_handlers()\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_outside_of_training_it_is_raised(name: str) -> None:
    done = run(
        "try:\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "except Exception:\n"
        "    print('taken for an error')\n"
        "except signals.Preempted as error:\n"
        "    print(error.reason, error.requeue, signals.received())\n"
    )
    assert done.stdout.split() == [name, "True", name]


def test_inside_it_waits_and_is_raised_at_the_end() -> None:
    done = run(
        "try:\n"
        "    with signals.deferred():\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        print('still here', signals.received())\n"
        "except signals.Preempted as error:\n"
        "    print('raised', error.reason)\n"
    )
    assert done.stdout.splitlines() == ["still here SIGUSR1", "raised SIGUSR1"]


def test_another_error_inside_is_not_hidden() -> None:
    done = run(
        "try:\n"
        "    with signals.deferred():\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        raise ValueError('the reason')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert done.stdout.strip() == "the reason"


def test_a_second_signal_does_not_interrupt_the_leaving() -> None:
    done = run(
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except signals.Preempted:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('left in peace')\n"
    )
    assert done.stdout.strip() == "left in peace" and done.returncode == 0


def test_a_process_that_is_ending_is_left_in_peace() -> None:
    done = run("signals.ignore(); os.kill(os.getpid(), signal.SIGTERM); print(signals.received())")
    assert done.stdout.strip() == "None" and done.returncode == 0


def test_children_ignore_what_their_parent_answers() -> None:
    done = run(
        "signals.ignore_in_child()\n"
        "for name in ('SIGTERM', 'SIGUSR1', 'SIGINT'):\n"
        "    os.kill(os.getpid(), getattr(signal, name))\n"
        "print('alive', signals.received())\n"
    )
    assert done.stdout.strip() == "alive None"
