"""One process of a run from start to end: signals, ranks, the lock, the recorded state, exit code.

Exit codes:
    0    done
    1    an error of mclclip itself (with a traceback), or a lost rank or worker (one line)
    2    a mistake of the user, or files that do not fit together (one line)
    85   asked to leave, and saved; in a training by Ctrl-C too
    130  interrupted by Ctrl-C outside of a training, or by a second Ctrl-C

torchrun reports every code but 0 as a crash. So under torchrun the code is 0 instead of 85, and the
recorded state says that the run was pre-empted.
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
from typing import TYPE_CHECKING, Any, NoReturn

from mclclip.ranks import failures, signals, streams
from mclclip.ranks.signals import EXIT_PREEMPTED, Preempted

if TYPE_CHECKING:
    from mclclip.config import Config
    from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")


_RECORDED = "_mclclip_recorded"  # attribute of errors that the recorded state already tells
EXIT_OK, EXIT_INTERNAL, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, signals.EXIT_INTERRUPTED


def start() -> None:
    """Installs signal handlers. It is called before the import of torch, which takes seconds."""
    signals.install_handlers()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from mclclip.ranks.workers import die_with_parent

        die_with_parent()


def end(work: Callable[[], int], debug: bool) -> NoReturn:
    """Calls ``work``, prints its error if there is one, and ends the process with an exit code."""
    streams.outlive_readers()
    _leave(answer(work, debug))


def answer(work: Callable[[], int], debug: bool) -> int:
    """Calls ``work``, prints its error if it raises one, and returns the exit code."""
    try:
        start()
        code = work()
        signals.ignore()
    except SystemExit as left:  # by argparse, which has printed its error, or by a library
        if left.code is None or isinstance(left.code, int):
            return left.code or EXIT_OK
        print(left.code, file=sys.stderr)
        return EXIT_INTERNAL
    except (Exception, KeyboardInterrupt, Preempted) as error:
        try:
            code = _failed(error, debug)
        except (KeyboardInterrupt, Preempted):  # it came before _failed could ignore signals
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
            # This rank waits before it prints; let SIGTERM of the launcher end it meanwhile.
            signals.set_action(signal.SIG_DFL)
        bug = code == EXIT_INTERNAL and not isinstance(error, failures.Lost)
        failures.complain(error, debug or bug)
    elif not isinstance(error, Preempted) or os.environ.get("RANK", "0") == "0":
        print(f"mclclip: {signals.line_of(error)}", file=sys.stderr)
    return code


def exit_code(error: BaseException) -> int:
    """Returns the exit code of an error."""
    if not isinstance(error, Exception):
        return signals.code_of(error)
    for_user = failures.is_for_the_user(error) and not isinstance(error, failures.Lost)
    return EXIT_USER if for_user else EXIT_INTERNAL


def record_early(error: BaseException, code: int) -> None:
    """Records for the launcher an error that came before a run, such as a wrong configuration."""
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
    """Runs the verb ``work`` on a run directory: joins the ranks, takes the lock, records the end.

    The first rank calls ``check`` before anything is written; all ranks raise its error.
    """
    from mclclip.ranks import collectives, process_group
    from mclclip.run.artifacts import RunPaths
    from mclclip.run.lock import RunLock, write_state
    from mclclip.util import files

    def take_lock() -> None:
        try:
            lock.__enter__()
        except OSError as error:  # a full disk: the state that an earlier process left is wrong
            reason = failures.line_of(error)
            with suppress(OSError):  # the user is told the first error
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
            if context.is_main:  # with the lock, all temporary files are of killed processes
                files.remove_leftovers(layout.run_dir)
                if not layout.index.is_symlink():  # then another run has it
                    files.remove_leftovers(layout.index)
            _call_and_record(config, verb, context, work)
        finally:
            lock.__exit__(None, None, None)
    return EXIT_OK


def _call_and_record(
    config: Config, verb: str, context: Context, work: Callable[[Context], object]
) -> None:
    """Calls ``work``; records that it runs, and how it ends."""
    from mclclip.run.lock import write_state

    def record(state: str, code: int, reason: str, **more: bool) -> None:
        # Any rank may record a failure; only the first rank records the other states.
        where = Path(config.run_dir) if context.is_main or state == "failed" else None
        write_state(
            where, state, verb=verb, exit_code=code, reason=reason, **{"requeue": False} | more
        )

    try:
        record("running", EXIT_OK, f"process {os.getpid()}")
        _call_or_lose(work, context)
        signals.ignore()
        record("finished", EXIT_OK, "")
    except BaseException as error:
        try:
            signals.ignore()  # a request may still be raised here
        finally:
            signals.ignore()
            try:
                record(**_state_of(error))
            except OSError as full:  # the user is told the error itself
                log.warning("%s", failures.line_of(full))
            setattr(error, _RECORDED, True)
        raise


def _state_of(error: BaseException) -> dict[str, Any]:
    """Returns the fields of the recorded state for an error, as ``write_state`` takes them."""
    code = exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted", "code": code, "reason": signals.line_of(error)}
    if isinstance(error, Preempted):
        fields = {"state": "preempted", "code": code, "reason": error.reason}
        return fields | {"requeue": error.requeue}
    is_lost = isinstance(error, failures.Lost)
    fields = {"state": "failed", "code": code, "reason": failures.line_of(error)}
    follows = is_lost and not isinstance(error, failures.LostWorker)
    return fields | {"requeue": is_lost, "follows": follows}


def _call_or_lose(work: Callable[[Context], object], context: Context) -> object:
    """Calls ``work``. If another rank is gone, raises Lost, or the request to leave if this rank
    has received one too.

    A Lost that a training raises stays: torchrun sends SIGTERM to the other ranks if one is killed,
    and the ranks of a training agree on a request to leave before any of them does.
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
    """Ends the process; if torch was loaded, without the interpreter's shutdown."""
    finished = code == EXIT_OK
    if code == EXIT_PREEMPTED and "TORCHELASTIC_RUN_ID" in os.environ:
        code = EXIT_OK
    if "torch" in sys.modules:
        from mclclip.ranks import process_group

        process_group.leave(code, close_group=finished)
    logging.shutdown()
    sys.exit(code)
