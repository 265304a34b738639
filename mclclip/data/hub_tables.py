"""Reads a data set of the Hugging Face hub by its name, without a copy on disk (``datasets``).

A name is ``hf://datasets/ORG/NAME``, with ``@REVISION`` behind it where the branch main is not
meant, and then ``/SPLIT`` or ``/SUBSET/SPLIT`` where the data set has several. Its commit is looked
up once, so that every pass reads the same rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from mclclip.data.table_formats import Ask, Fields, Format, arrow_format, is_stored
from mclclip.util.files import message_of, needed

_NAME = re.compile(r"hf:/+datasets/([^/@?*{]+/[^/@?*{]+)(?:@([^/?*{]+))?((?:/[^/?*{]+){0,2})/?")
_BATCH_ROWS = 100


def open_split(source: Path, ask: Ask) -> tuple[str, str, Format]:
    """Opens the data set that ``source`` names; returns its complete name, and its commit.

    Raises ValueError if the name is none or the data set cannot be read, and the errors of ``ask``
    if it has several subsets or splits and the name does not choose one.
    """
    if (match := _NAME.fullmatch(str(source))) is None or source.suffix == ".tar":
        raise ValueError(
            f"hf://{str(source)[3:].lstrip('/')} names no data set: wanted "
            "hf://datasets/ORG/NAME, or with @REVISION, /SPLIT or /SUBSET/SPLIT behind it; shards "
            "(.tar) of the hub need no packing: data.sources.NAME.shards=hf://datasets/..."
        )
    name, revision, rest = match.groups()
    url = f"hf://datasets/{name}" + (f"@{revision}" if revision else "")
    from huggingface_hub import HfApi

    datasets = needed("datasets", url, "pip install 'mclclip[hub]'")
    datasets.disable_progress_bars()
    with _one_line(url):
        commit = str(HfApi().dataset_info(name, revision=revision).sha)
        subsets = datasets.get_dataset_config_names(name, revision=commit)
    words = [word for word in rest.split("/") if word]
    subset = _choose("subset", words, subsets, url, url, ask)
    with _one_line(url):
        splits = datasets.get_dataset_split_names(name, subset, revision=commit)
    below = f"{url}/{subset}" if len(subsets) > 1 else url
    split = _choose("split", words, splits, url, below, ask)
    if words:
        raise ValueError(
            f"{url} has no subset or split {words[0]!r}: it has the subsets {', '.join(subsets)}, "
            f"and {subset} the splits {', '.join(splits)}"
        )
    url = f"hf://datasets/{name}/{subset}/{split}"
    with _one_line(url):
        stream = datasets.load_dataset(name, subset, split=split, revision=commit, streaming=True)
    return url, commit, _format(stream, name, split, url)


def _choose(what: str, words: list[str], names: list[str], url: str, below: str, ask: Ask) -> str:
    """Takes the first of ``words`` if it is one of ``names``, or else the only name."""
    if words and words[0] in names:
        return words.pop(0)
    if len(names) == 1:
        return names[0]
    if words:
        raise ValueError(f"{url} has no {what} {words[0]!r}: it has {', '.join(names)}")
    likely = "train" if "train" in names else names[0]
    raise ask(f"{url} has the {what}s {', '.join(names)}, choose one", f"{below}/{likely}")


def _format(stream: Any, name: str, split: str, url: str) -> Format:
    """Makes a format of the rows of a streamed split of the data set ``name``."""
    with _one_line(url):
        # Otherwise pictures would be decoded, and their bytes lost.
        stream = stream.decode(False) if stream.features else stream
        first = list(itertools.islice(stream, _BATCH_ROWS))
        inferred = pa.RecordBatch.from_pylist(first).schema
        schema = stream.features.arrow_schema if stream.features else inferred
    splits = stream.info.splits or {}
    count = splits[split].num_examples if split in splits else None

    def batches() -> Iterator[pa.RecordBatch]:
        with _one_line(url):
            rows = iter(stream)
            while examples := list(itertools.islice(rows, _BATCH_ROWS)):
                yield pa.RecordBatch.from_pylist(examples, schema)

    fetch = partial(_fetch, name, url)
    return arrow_format(schema, count or None, lambda: [(split, batches())], fetch)


def _fetch(name: str, url: str, fields: Fields) -> Fields:
    """Reads the pictures that lie beside the table, in files of the same data set."""
    from datasets.utils.file_utils import xopen

    beside = re.compile(rf"(zip://[^:]*::)?hf://datasets/{re.escape(name)}@[^:]*")
    for column, value in fields.items():
        is_missing = is_stored(value) and isinstance(value, dict) and value["bytes"] is None
        if is_missing and beside.fullmatch(path := str(value["path"])):
            with _one_line(url), xopen(path, "rb") as file:
                data = file.read()
            fields[column] = {"bytes": data, "path": path.split("::")[0].rpartition("/")[2]}
    return fields


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Makes one ValueError of whatever ``datasets`` raises."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{url} cannot be read ({type(error).__name__}: {message_of(error)}): look after its "
            "name, the network, and HF_TOKEN where the data set is private or gated"
        ) from error
