"""The tokenizer of a stranger's model proves itself in a process of bounded memory and time.

A tokenizer's files are data, but data that rules how a text is rewritten: a file of a kilobyte may
make a caption a billion times as long, or end the process from within the library. So the files are
first read, and a text tokenised, where nothing but this proof can be lost.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mclclip import files

PROBES = (
    "",
    "A photo of 2 dogs; \u201cna\u00efve\u201d caf\u00e9, \u4e24\u53ea\u72d7 \U0001f415 "
    + " ".join(map(chr, range(33, 127)))
    + " the quick brown fox jumps over the lazy dog" * 200,
)
"""What is tokenised for proof: nothing, and more than fits into any context."""

_MEMORY_BYTES = 4 << 30
_CPU_S, _WALL_S = 60, 180
_MOST_GROWTH = 1000  # of a text by a normalizer; published ones stay below 10
_DATA = (".json", ".txt", ".model")
_proven: set[str] = set()


def prove(directory: Path, context_length: int, kind: str = "AutoTokenizer") -> None:
    """Loads the tokenizer in ``directory`` by transformers' class ``kind`` in a process of its own,
    and tokenises ``PROBES`` there; once for the same files.

    Raises ValueError, one line, where that fails, crashes, or takes more than 4 GiB or a minute.
    """
    paths = [path for path in sorted(Path(directory).iterdir()) if path.suffix in _DATA]
    if odd := next((path.name for path in paths if not path.is_file()), None):
        raise _refusal(directory, f"{odd} is no file")
    contents = [(path.name, files.digest_file(path)) for path in paths]
    key = files.digest_json([contents, context_length, kind])
    if key in _proven:
        return
    # The same modules as here, and no network: everything needed lies in the folder.
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(directory), str(context_length), kind],
            env={**os.environ, "PYTHONPATH": modules, **offline},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(directory, f"it took more than {_WALL_S} s") from None
    if ended.returncode:
        lines = ended.stdout.decode(errors="replace").splitlines()
        limits = f"it may take {_MEMORY_BYTES >> 30} GiB and {_CPU_S} s"
        raise _refusal(directory, lines[-1] if lines else f"{_end(ended.returncode)}; {limits}")
    _proven.add(key)


def _refusal(directory: Path, reason: str) -> ValueError:
    return ValueError(
        f"the tokenizer in {directory} cannot be used ({files.shown(reason)[:300]}): save the "
        "model's own tokenizer there again (save_pretrained)"
    )


def _end(code: int) -> str:
    with suppress(ValueError):
        return f"a process that tried it was ended by {signal.Signals(-code).name}"
    return f"a process that tried it ended with code {code}"


def tokens_of(
    tokenize: Callable[[], Any], num_texts: int, context_length: int, vocabulary: int, where: str
) -> Any:
    """The tokens [num_texts, context_length] that ``tokenize`` makes by a stranger's tokenizer.

    Raises ValueError, one line, where it fails, or its tokens have another shape or ids outside of
    the ``vocabulary`` of the text tower, which would end in an index error.
    """
    try:
        tokens = tokenize()
    except BaseException as error:
        # A panic of the library, which is written in Rust, is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"the tokenizer {where} fails on a text ({files.shown(reason)[:300]})"
        ) from error
    if tuple(tokens.shape) != (num_texts, context_length):
        raise ValueError(
            f"the tokenizer {where} makes tokens of shape {list(tokens.shape)}, wanted "
            f"{[num_texts, context_length]}: it is of another model"
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ValueError(
            f"the tokenizer {where} makes ids from {int(tokens.min()):,} to "
            f"{int(tokens.max()):,}, the text tower knows those below {vocabulary:,}: it is of "
            "another model"
        )
    return tokens


# --- in the process of its own -----------------------------------------------------------------


def growth(normalizer: Any) -> float:
    """How many times as long a normalizer of tokenizer.json may make a text, at most."""
    if isinstance(normalizer, list):
        return math.prod(map(growth, normalizer))
    if not isinstance(normalizer, dict):
        return 1.0
    own = 1.0 + len(str(normalizer.get("prepend", "")))
    if normalizer.get("type") == "Replace":
        pattern = normalizer.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        new = len(str(normalizer.get("content", "")))
        # A regular expression may match the empty text between any two letters.
        own = max(1.0, new / len(text)) if isinstance(text, str) and text else 1.0 + new
    return own * growth(normalizer.get("normalizers"))


def _try(directory: Path, context_length: int, kind: str) -> None:
    path = directory / "tokenizer.json"
    whole = files.read_json(path) if path.is_file() else {}
    normalizer = whole.get("normalizer") if isinstance(whole, dict) else None
    if (times := growth(normalizer)) > _MOST_GROWTH:
        raise ValueError(f"its normalizer may make a text {times:.3g} times as long")
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do without, in a second
    import transformers

    options: dict[str, Any] = {}
    if kind == "AutoTokenizer":
        options = {"config": transformers.PretrainedConfig(), "trust_remote_code": False}
    own = getattr(transformers, kind).from_pretrained(str(directory), **options)
    found = own([*PROBES], padding="max_length", truncation=True, max_length=context_length)
    if other := {len(ids) for ids in found["input_ids"]} - {context_length}:
        raise ValueError(f"it makes {max(other):,} ids of a text, wanted {context_length}")


def main(argv: Sequence[str]) -> int:
    """Limits this process and tries a tokenizer; prints why it cannot be used."""
    for limit, wanted in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, _CPU_S),
        (resource.RLIMIT_DATA, _MEMORY_BYTES),
    ):
        most = resource.getrlimit(limit)[1]
        number = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(limit, (number, number))
    try:
        _try(Path(argv[0]), int(argv[1]), argv[2])
    except BaseException as error:  # a panic of the library is no Exception
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
