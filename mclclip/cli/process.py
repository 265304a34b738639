"""One process of a run from start to end: signals, ranks, the lock, the recorded state, exit code.

Exit codes: 0 done; 1 an error of mclclip itself (with a traceback), or a lost rank or worker (one
line); 2 a mistake of the user, or files that do not fit together (one line); 85 asked to leave and
saved, by Ctrl-C in a training too; 130 interrupted by Ctrl-C elsewhere, or by a second one. Under
torchrun, which reports every code but 0 as a crash, a process that exits with 85 elsewhere ends
with 0, and the recorded state says that it was pre-empted.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mclclip.ranks import failures, signals, streams
from mclclip.ranks.signals import EXIT_PREEMPTED, Preempted

if TYPE_CHECKING:
    from mclclip.config import Config
    from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")


_RECORDED = "_mclclip_recorded"  # attribute of an error that is already in the recorded state
EXIT_OK, EXIT_INTERNAL, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, signals.EXIT_INTERRUPTED


def start() -> None:
    """Installs signal handlers, before torch is imported (which takes seconds)."""
    signals.install_handlers()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from mclclip.ranks.workers import die_with_parent

        die_with_parent()


def end(work: Callable[[], int], debug: bool) -> NoReturn:
    """Calls ``work`` as ``answer`` does, and ends the process with its exit code."""
    streams.outlive_readers()
    _leave(answer(work, debug))


def answer(work: Callable[[], int], debug: bool) -> int:
    """Calls ``work``, prints its error if it raises one, and returns the exit code."""
    try:
        start()
        code = work()
        signals.ignore()
    except SystemExit as left:  # of argparse, which has printed, or of code that a verb has called
        if left.code is None or isinstance(left.code, int):
            return left.code or EXIT_OK
        print(left.code, file=sys.stderr)
        return EXIT_INTERNAL
    except (Exception, KeyboardInterrupt, Preempted) as error:
        try:
            code = _failed(error, debug)
        except (KeyboardInterrupt, Preempted):  # a request that came before it could be ignored
            code = _failed(error, debug)
    return code


def _failed(error: BaseException, debug: bool) -> int:
    """Records and prints an error; returns its exit code."""
    signals.ignore()
    code = exit_code(error)
    if not hasattr(error, _RECORDED):
        record_early(error, code)
    if isinstance(error, Exception):
        if failures.number_of("RANK", 0) > 0:
            # The launcher may end this rank while it waits to print its error.
            signals.set_action(signal.SIG_DFL)
        bug = code == EXIT_INTERNAL and not isinstance(error, failures.Lost)
        failures.complain(error, debug or bug)
    elif not isinstance(error, Preempted) or os.environ.get("RANK", "0") == "0":
        print(f"mclclip: {signals.line_of(error)}", file=sys.stderr)
    return code


def exit_code(error: BaseException) -> int:
    """The exit code that stands for an error."""
    if not isinstance(error, Exception):
        return signals.code_of(error)
    for_user = failures.is_for_the_user(error) and not isinstance(error, failures.Lost)
    return EXIT_USER if for_user else EXIT_INTERNAL


def record_early(error: BaseException, code: int) -> None:
    """Records an error before a run began, such as a wrong configuration, for the launcher."""
    if os.environ.get("MCLCLIP_STATE_FILE"):
        from mclclip.run.lock import write_state

        again = code == EXIT_PREEMPTED
        interrupted = isinstance(error, KeyboardInterrupt)
        state = "interrupted" if interrupted else "preempted" if again else "failed"
        reason = failures.line_of(error)
        write_state(None, state, verb="", exit_code=code, requeue=again, reason=reason)


def run(
    config: Config,
    verb: str,
    work: Callable[[Context], object],
    check: Callable[[Context], None] | None = None,
) -> int:
    """Runs a verb on a run directory: joins the ranks, takes the lock, records how it ends.

    The first rank calls ``check`` before anything is written, and all ranks raise its error.
    """
    from mclclip.ranks import collectives, process_group
    from mclclip.run.artifacts import RunPaths
    from mclclip.run.lock import RunLock, write_state
    from mclclip.util import files

    def take_lock() -> None:
        try:
            lock.__enter__()
        except OSError as error:  # a full disk, not another writer: a former state would be wrong
            reason = failures.line_of(error)
            with suppress(OSError):  # the first error is what the user is told
                write_state(
                    layout.run_dir, "failed", verb=verb, exit_code=EXIT_USER, requeue=False,
                    reason=reason,
                )  # fmt: skip
            raise

    context = process_group.init(
        config.device, deterministic=config.deterministic, limit_s=config.peer_timeout_s
    )
    if check is not None:
        collectives.on_main(partial(check, context))
    layout = RunPaths.of(config)
    lock = RunLock(layout.run_dir) if context.is_main else nullcontext()
    with process_group.num_threads(config.num_threads):
        collectives.raise_on_every_rank(take_lock)
        try:
            if context.is_main:  # temporary files of killed writers; the lock excludes living ones
                files.remove_leftovers(layout.run_dir)
                files.remove_leftovers(layout.index)
            _recorded(config, verb, context, work)
        finally:
            lock.__exit__(None, None, None)
    return EXIT_OK


def _recorded(
    config: Config, verb: str, context: Context, work: Callable[[Context], object]
) -> None:
    from mclclip.run.lock import write_state

    def record(state: str, code: int, reason: str, **more: bool) -> None:
        # Any rank may record a failure; the other states are recorded by the first rank.
        where = Path(config.run_dir) if context.is_main or state == "failed" else None
        write_state(
            where, state, verb=verb, exit_code=code, reason=reason, **{"requeue": False} | more
        )

    def record_error(error: BaseException, code: int) -> None:
        try:
            if isinstance(error, KeyboardInterrupt):
                record("interrupted", code, signals.line_of(error))
            elif isinstance(error, Preempted):
                record("preempted", code, error.reason, requeue=error.requeue)
            else:
                lost = isinstance(error, failures.Lost)
                peer = lost and not isinstance(error, failures.LostWorker)
                record("failed", code, failures.line_of(error), requeue=lost, follows=peer)
        except OSError as full:  # the error itself is what the user is told
            log.warning("%s", failures.line_of(full))

    try:
        record("running", EXIT_OK, f"process {os.getpid()}")
        _naming_lost(work, context)
        signals.ignore()
        record("finished", EXIT_OK, "")
    except BaseException as error:
        try:
            signals.ignore()  # a request may still be raised here
        finally:
            signals.ignore()
            record_error(error, exit_code(error))
            setattr(error, _RECORDED, True)
        raise


def _naming_lost(work: Callable[[Context], object], context: Context) -> object:
    """Calls ``work``; where another rank is gone raises Lost, or the request to leave that this
    rank has received as well.

    Lost of a training stays: its ranks agree on a request before any of them leaves, and torchrun
    sends SIGTERM to those that are left when one is killed.
    """
    try:
        return work(context)
    except Exception as error:
        lost, request = failures.as_lost(error), signals.get_request()
        if lost is error:
            raise
        if request is not None and failures.is_lost_peer(error):
            raise signals.make_error(request) from error
        raise lost from error


def _leave(code: int) -> NoReturn:
    """Ends the process; without the interpreter's shutdown if torch was loaded."""
    finished = code == EXIT_OK
    if code == EXIT_PREEMPTED and "TORCHELASTIC_RUN_ID" in os.environ:
        code = EXIT_OK
    if "torch" in sys.modules:
        from mclclip.ranks import process_group

        process_group.leave(code, close_group=finished)
    logging.shutdown()
    sys.exit(code)
