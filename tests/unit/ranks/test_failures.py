"""An error is printed on one line, which is printable and not too long to be read."""

from __future__ import annotations

import errno
import resource

import pytest

from mclclip.ranks import failures
from mclclip.ranks.failures import line_of
from mclclip.util.files import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 日本 ± 'x'", "plain é 日本 ± 'x'"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x1b]0;title\x07\x7f", r"\x1b]0;title\x07\x7f"),
        ("\x9b1m\u202e\u2066\u2028\ufeff", r"\x9b1m\u202e\u2066\u2028\ufeff"),
        ("\udcff", r"\udcff"),
        (r"\x1b", r"\x1b"),
    ],
)
def test_text_that_does_not_print_is_shown_as_repr_shows_it(text: str, expected: str) -> None:
    assert printable(text) == expected and printable(text).isprintable()


def test_lines_of_ours_stay() -> None:
    assert printable_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


def test_an_error_is_one_printable_line_of_bounded_length() -> None:
    assert line_of(ValueError("key \x1b[31m\nmclclip: forged")) == r"key \x1b[31m mclclip: forged"
    line = line_of(ValueError(f"begin {'x' * 1_000_000} what to do"))
    assert line.startswith("begin xx") and line.endswith("xx what to do")
    assert "characters]" in line and len(line) < failures.LONGEST_LINE + 100


@pytest.mark.parametrize("message", ["", "Unable to allocate 93.1 GiB for an array"])
def test_memory_that_ran_out_is_one_line_with_what_to_do(message: str) -> None:
    error = MemoryError(message)
    assert failures.is_for_the_user(error)
    line = failures.line_of(error)
    assert line.startswith("memory ran out (") and message in line
    assert "lower data.num_workers or the batch" in line and "\n" not in line


def test_full_shared_memory_is_named_with_the_remedy() -> None:
    text = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    caught = f"Caught RuntimeError in DataLoader worker process 0.\n...\nRuntimeError: {text}\n"
    for error in (RuntimeError(text), RuntimeError(caught)):
        lost = failures.as_lost(error, "at step 3")
        assert isinstance(lost, failures.LostWorker) and "\n" not in str(lost)
        assert "at step 3" in str(lost) and failures.MORE_SHARED_MEMORY in str(lost)


def test_what_is_complained_of_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("of\x1b[2J\nforged")
    except RuntimeError as error:
        failures.complain(error, with_traceback=True)
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("mclclip: of\\x1b[2J forged\n")
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "/data/0.tar"),
        OSError("Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent "
                "call last):\nOSError: [Errno 24] Too many open files: '/data/0.tar'\n"),
        RuntimeError("Too many open files. Communication with the workers is no longer possible."),
    ],
    ids=["process", "worker", "torch"],
)  # fmt: skip
def test_too_many_open_files_say_which_limit_to_raise(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures.is_for_the_user(error)
    for limits, remedy in (
        ((1024, 4096), "may open 1024 here): call 'ulimit -n 4096' before"),
        ((1024, resource.RLIM_INFINITY), "call 'ulimit -n 1048576' before"),
        ((512, 512), "may open 512 here): have its hard limit raised"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        line = line_of(error)
        assert remedy in line and "data.max_open_files" in line and "\n" not in line, line
    assert "too many files" not in line_of(OSError(errno.ENOENT, "No such file", "/data/0.tar"))


def test_what_may_not_be_read_is_a_line_without_a_number() -> None:
    line = failures.line_of(PermissionError(13, "Permission denied", "/data/out/0.tar"))
    assert "/data/out/0.tar" in line and "Errno" not in line and "permissions" in line
    assert failures.is_for_the_user(PermissionError(13, "Permission denied", "/data/out/0.tar"))
