"""Tokenizers: fetched when the first text is tokenised, with the ids of words kept, or proven.

A tokenizer's files are data, but data that rules how a text is rewritten: a file of a kilobyte may
make a caption a billion times as long, or end the process from within the library. So the files of
a stranger's model are first read, and a text tokenised, in a process of bounded memory and time
(`prove`), where nothing but this proof can be lost. That process is this module run by itself,
which therefore imports no torch.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mclclip import files

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("mclclip")
_MOST_WORDS = 2**16  # about 15 MB of them in a process
PROBES = (
    "",
    "A photo of 2 dogs; \u201cna\u00efve\u201d caf\u00e9, \u4e24\u53ea\u72d7 \U0001f415 "
    + " ".join(map(chr, range(33, 127)))
    + " the quick brown fox jumps over the lazy dog" * 200,
)
"""Texts that are tokenised for proof: an empty one, and one that is longer than any context."""

_MEMORY_BYTES = 4 << 30
_CPU_S, _WALL_S = 60, 180
_MOST_GROWTH = 1000  # of a text by a normalizer; published ones stay below 10
_DATA = (".json", ".txt", ".model")
_proven: set[str] = set()


class LazyTokenizer:
    """A tokenizer that is made by `make` at its first use; encoding images does not need it.

    `make` raises an error of one line where the tokenizer cannot be fetched. Pickling, such as for
    a loader worker, makes the tokenizer first.
    """

    def __init__(self, make: Callable[[], Any], context_length: int) -> None:
        self._make, self._made = make, None
        self.context_length = context_length

    def fetch(self) -> Any:
        """The tokenizer itself; raises FileNotFoundError or ValueError where there is none."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> Tensor:
        """N strings -> int64 [N, context]."""
        tokens: Tensor = self.fetch()(texts, context_length)
        return tokens

    def save_pretrained(self, directory: str) -> None:
        """Writes the tokenizer's files into ``directory``; warns where it cannot be fetched."""
        try:
            own = self.fetch()
        except FileNotFoundError as error:
            log.warning("%s has no tokenizer: %s", directory, error)
            return  # a later user of the export fetches it by its name
        own.save_pretrained(directory)

    def __deepcopy__(self, memo: Any) -> LazyTokenizer:
        return self  # a tokenizer has no state that changes

    def __getstate__(self) -> dict[str, Any]:
        self.fetch()
        return {"_made": self._made, "_make": None, "context_length": self.context_length}


def fetched(tokenizer: Any) -> Any:
    """The tokenizer itself, fetched now if it was not, so that a failure shows at once.

    Raises FileNotFoundError or ValueError where it cannot be fetched.
    """
    return tokenizer.fetch() if isinstance(tokenizer, LazyTokenizer) else tokenizer


class WordEncoder:
    """`encode` of open_clip's SimpleTokenizer, which keeps the ids of words: the same ids in a
    sixth of the time. It takes the place of the ``tokenizer``'s own.

    ``clean`` is the tokenizer's cleaning. With "lower", printable ASCII without html's entities
    has nothing that ftfy mends: cleaning then only joins its words by single spaces and lowers
    them.
    """

    def __init__(self, tokenizer: Any, clean: str) -> None:
        self._tokenizer, self._lowers = tokenizer, clean == "lower"
        self._words: dict[str, list[int]] = {}
        tokenizer.encode = self

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without those of its start and its end."""
        if self._lowers and text.isascii() and text.isprintable() and "&" not in text:
            text = " ".join(text.split()).lower()
        else:
            text = self._tokenizer.clean_fn(text)
        words, ids = self._words, []
        for word in self._tokenizer.pat.findall(text):
            ids += words[word] if word in words else self._add(word)
        return ids

    def _add(self, word: str) -> list[int]:
        own = self._tokenizer
        letters = "".join(own.byte_encoder[byte] for byte in word.encode())
        ids = [own.encoder[part] for part in own.bpe(letters).split(" ")]
        if len(self._words) >= _MOST_WORDS:
            self._words.clear()
        self._words[word] = ids
        return ids


# --- tokenizers of strangers ----------------------------------------------------------------------


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
        f"the tokenizer in {directory} cannot be used ({files.clean(reason)[:300]}): save the "
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
            f"the tokenizer {where} fails on a text ({files.clean(reason)[:300]})"
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
    tokens = own([*PROBES], padding="max_length", truncation=True, max_length=context_length)
    if other := {len(ids) for ids in tokens["input_ids"]} - {context_length}:
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
        print(f"{type(error).__name__}: {files.message_of(error, 300)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
