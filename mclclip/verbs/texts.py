"""Verb ``texts``: text embeddings that the user brings -> rows by text or key (``text_rows``).

The rows stand in the place of a text tower (``model.text_rows``). Which texts a run reads, and so
needs rows for, ``--missing`` lists: captions of the index, prompts and captions of benchmarks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mclclip.config import Config
from mclclip.data.bytes import Bytes
from mclclip.data.sample_index import SampleIndex
from mclclip.data.text_rows import (
    EVAL_ROWS,
    FILES,
    KIND,
    ROWS,
    TextRows,
    digest_of,
    report_missing,
    width_of,
    write_text_rows,
)
from mclclip.data.training_images import Readable
from mclclip.eval.features import Extractor, Features
from mclclip.eval.protocols import evaluator, reading_texts
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact, RunPaths, is_finished
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import files
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
_AT_ONCE = 4096  # samples whose captions are read together


def run(
    config: Config,
    context: Context,
    *,
    missing: Path | None = None,
    force: Remake = Remake.NOTHING,
) -> Path:
    """Copies the rows of ``model.text_rows`` and ``eval.text_rows`` into the run directory; returns
    the folder of the former.

    With ``missing`` it writes the texts that have no row into this file: the captions of the index,
    if there is one, and the texts of the benchmarks of ``eval.suite``. Without ``model.text_rows``
    these are all. Raises ValueError for rows that cannot be used, for texts without a row if they
    are not to be listed, and where neither ``missing`` nor ``model.text_rows`` is given.
    """
    layout, patterns = RunPaths.of(config), config.text_rows
    if not patterns and missing is None:
        raise ValueError(
            "model.text_rows names no file: set it, or give --missing FILE, which lists the texts "
            "to embed"
        )
    if patterns:
        make_artifact(UserRows(), layout.text_rows, patterns, force)
    if config.eval.text_rows:
        make_artifact(UserRows(), _eval_rows(layout), config.eval.text_rows, force)
    texts = _texts_of_benchmarks(config, context)  # collectives, so on all ranks
    if missing is not None:
        collectives.on_main(lambda: _write_missing(config, layout, texts, missing))
    else:
        collectives.on_main(lambda: _check_texts(config, layout, texts))
    return layout.text_rows


@dataclass(frozen=True)
class UserRows(Step[Sequence[str]]):
    """The rows of text embeddings that the user brought."""

    kind = KIND

    def reads(self, how: Sequence[str]) -> dict[str, str]:
        """Returns the digest of the user's files."""
        return {"files": digest_of(how)}

    def make(self, out: Artifact, how: Sequence[str]) -> Made:
        """Copies the rows, and refuses those that cannot be used."""
        width_of(how)  # before anything is written
        counts = write_text_rows(how, out.begin())
        log.info(
            "texts: %s rows of width %s, %s of them by key", f"{counts['rows']:,}",
            f"{counts['width']:,}", f"{counts['by_key']:,}",
        )  # fmt: skip
        if repeated := counts["repeated_texts"]:
            log.info("texts: %s rows repeat a text, of which the first row counts", f"{repeated:,}")
        records = files.records_of(out.directory, *FILES)
        return Made(counts, records, dtype=str(np.load(out.directory / ROWS, "r").dtype))


# --- the texts that a run reads ------------------------------------------------------------------


def _check_texts(config: Config, layout: RunPaths, of_benchmarks: Sequence[str]) -> None:
    """Raises ValueError if too many captions, or any text of a benchmark, have no row."""
    width = width_of(config.text_rows)
    if config.reads_captions and is_finished(layout.index):
        rows = TextRows([layout.text_rows], width)
        report_missing(rows, SampleIndex.open(layout.index), config.data)
    _open_rows(config, layout).find(of_benchmarks)


def _eval_rows(layout: RunPaths) -> Path:
    return layout.text_rows.with_name(EVAL_ROWS)


def _open_rows(config: Config, layout: RunPaths) -> TextRows:
    further = [_eval_rows(layout)] if config.eval.text_rows else []
    return TextRows([layout.text_rows, *further], width_of(config.text_rows))


def _write_missing(
    config: Config, layout: RunPaths, of_benchmarks: Sequence[str], path: Path
) -> None:
    """Writes a line {"text": ...} for every different text without a row."""
    rows = _open_rows(config, layout) if config.text_rows else None
    texts = dict.fromkeys(_captions_without_row(config, layout, rows))
    num_captions = len(texts)
    for text in of_benchmarks:
        if rows is None or not rows.has(text):
            texts[text] = None
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    files.write_bytes(path, lines.encode(errors="replace"))
    log.info(
        "texts: %s lists what has no row: %s different captions, %s other texts of benchmarks",
        path, f"{num_captions:,}", f"{len(texts) - num_captions:,}",
    )  # fmt: skip


def _captions_without_row(config: Config, layout: RunPaths, rows: TextRows | None) -> Iterator[str]:
    if not is_finished(layout.index):
        log.info("texts: captions are not listed, there is no index: run 'mclclip index' first")
        return
    index = SampleIndex.open(layout.index)
    read, ids = Bytes(index, config.data), np.flatnonzero(index.num_captions)
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        for key, captions in zip(index.keys(some), read.captions_of(some.tolist()), strict=True):
            for number, caption in enumerate(captions):
                if rows is None or rows.find_caption(key, number, caption) is None:
                    yield caption


def _texts_of_benchmarks(config: Config, context: Context) -> list[str]:
    """Returns the texts that the benchmarks of ``eval.suite`` ask an encoder for, in order."""
    listener = _Listener(SimpleNamespace(tokenizer=None, logit_scale=1.0, embed_dim=2), context)  # type: ignore[arg-type]
    for name in reading_texts(config.eval.suite):
        benchmark = config.eval.suite[name]
        if not Path(benchmark.path).is_dir():
            log.warning("texts: those of %s are left out, there is no %s", name, benchmark.path)
            continue
        evaluator(benchmark.kind).evaluate(
            listener, Path(benchmark.path), **benchmark.typed_options
        )
    return [*listener.heard]


@dataclass(frozen=True)
class _Listener(Extractor):
    """Runs an evaluation on drawn features, and keeps the texts that it asked for."""

    heard: dict[str, None] = field(default_factory=dict)

    def images(self, paths: Sequence[Readable]) -> Features:
        """Unit features [N, 2], drawn."""
        return self._draw(paths)

    def texts(self, texts: Sequence[str]) -> Features:
        """Unit features [N, 2], drawn."""
        self.heard.update(dict.fromkeys(texts))
        return self._draw(texts)

    def _draw(self, items: Sequence[Any]) -> Features:
        angles = np.random.default_rng(0).random(len(items)) * 2 * np.pi
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
