"""Verb ``report``: the data of a run -> one page ``report.html``.

The page is one file. It needs no network, contains no script, follows the reader's light or dark
theme, and fits a phone. It begins with the verdict, and shows results, comparisons, clusters,
neighbours, curves and costs if the run has them. It names files that cannot be read, with the
reason, and ends with a list of the parts that the run lacks. If there are many samples it reads
only some, and says so.

A report changes only its own file, which it replaces by rename. So it takes no lock, and can be
written while the run is training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mclclip import __version__
from mclclip import config as configuration
from mclclip.config import Config
from mclclip.eval.comparisons import render as render_table
from mclclip.report import clusters, duration, environment, pictures, scores, story
from mclclip.report.pictures import Thumbnails
from mclclip.report.verdict import Verdict
from mclclip.run.opened import Run
from mclclip.run.runlog import count_of
from mclclip.run.trackers import Trackers
from mclclip.util import files
from mclclip.verbs import compare

log = logging.getLogger("mclclip")

NAME = "report.html"


def run(
    run_dir: str | Path | None = None, *, config: str | None = None, out: Path | None = None
) -> Path:
    """Writes the page of a run; returns its path.

    ``run_dir``: the folder of the run (default: ``run_dir`` of the configuration). ``config``: a
    YAML file or a recipe (default: the configuration that the run has recorded). ``out``: default
    is ``report.html`` in the folder. Raises FileNotFoundError if there is no run or nothing to show
    yet, and ValueError if results.jsonl or the configuration is wrong or ``out`` is a folder.
    """
    files.refuse_folder(out, "--out")
    settled = None if config is None else configuration.load(config, [])
    if run_dir is None:
        if settled is None:
            raise ValueError("wanted a run directory, such as 'mclclip report runs/mine'")
        run_dir = settled.run_dir
    # The table of the index is not compared with its checksum, which would read it whole. Captions
    # are compared with the checksums in it, so a damaged row is noticed.
    opened = Run.open(run_dir, config=settled)
    if not opened.result_rows and not opened.stages:
        raise FileNotFoundError(
            f"{run_dir} has nothing to show yet, neither results.jsonl nor stage_0: run 'mclclip "
            "run' or 'mclclip eval' first"
        )
    path = out or opened.directory / NAME
    files.write_bytes(path, render(opened).encode())
    log.info("wrote %s", path)
    return path


def track(config: Config) -> None:
    """Writes verdict.md and report.html into a run, and logs both to its trackers.

    One that cannot be written is left out with a warning.
    """
    opened, paths = Run.open(config.run_dir, config=config), list[Path]()
    for name, text_of in (("verdict.md", _verdict), (NAME, render)):
        try:
            files.write_bytes(opened.directory / name, text_of(opened).encode())
            paths.append(opened.directory / name)
        except (FileNotFoundError, RuntimeError, ValueError) as error:
            log.warning("track: %s is left out: %s", name, error)
    trackers = Trackers.open(config.track, opened.directory, config=asdict(config))
    for path in paths:
        trackers.attach(path)
    trackers.close()


def _verdict(run: Run) -> str:
    """Returns the verdict of a run in sentences, and the table of its comparisons if there are any,
    as Markdown."""
    verdict = Verdict.of(compare.rows_of(run))
    table = [render_table(verdict.family, "markdown")] if verdict.family else []
    return "\n\n".join([*verdict.sentences(), *table]) + "\n"


def render(run: Run) -> str:
    """Returns the page as text; the same run gives the same bytes."""
    return environment().get_template("page.html").render(_content(run))


def _content(run: Run) -> dict[str, Any]:
    """Returns the variables of the template."""
    thumbnails, trained = Thumbnails(run), _section(lambda: story.trainings(run))
    trainings = trained["content"] or []
    better = _section(lambda: [Verdict.of(compare.rows_of(run))])
    verdict = better["content"][0] if better["content"] else None
    if verdict is not None:
        better = _section(lambda: scores.by_opponent(verdict.family))
    sections = _sections(run, thumbnails, verdict)
    if trained["missing"]:
        sections["curves"] = trained
    clustered = sections["clusters"]["content"] or ()
    content = {
        **sections,
        "chapters": _section(lambda: story.chapters(run, trainings, clustered)),
        "joined": story.joined(run),
        "version": __version__,
        "name": run.directory.resolve().name,
        "run": run,
        "model_colours": {scores.colour_of(row.model) for row in run.result_rows},
        "better": better,
        "verdict_lines": [] if verdict is None else verdict.sentences(),
        "first_of_each": scores.first_of_each,
        "label_rows": clusters.LABEL_ROWS,
        "trainings": trainings,
        "seconds": story.total([training["seconds"] for training in trainings]),
        "rank_hours": story.total([training["rank_hours"] for training in trainings]),
        "colours": story.COLOURS,
        "summary": _summary(run, trainings),
        "not_there": [name for name, section in sections.items() if section["empty"]],
    }
    return content | {"lost": thumbnails.lost()}


def _sections(
    run: Run, thumbnails: Thumbnails, verdict: Verdict | None
) -> dict[str, dict[str, Any]]:
    """Returns the parts of the page by name, each as `_section` does."""
    tuned = None if verdict is None else verdict.tuned
    is_run = run.layout.index.is_dir() or (run.directory / "config.yaml").is_file()
    return {
        "tables": _section(lambda: scores.tables(run.result_rows, scores.references())),
        "exchanges": _section(lambda: pictures.exchanges(run, thumbnails, tuned)),
        "clusters": _section(lambda: clusters.clustered(run, thumbnails) if is_run else []),
        "agreement": _section(lambda: clusters.agreement(run) if is_run else []),
        "anchors": _section(lambda: pictures.anchors(run, thumbnails, tuned) if is_run else []),
        "blindspots": _section(lambda: pictures.blindspots(run, thumbnails)),
        "filters": _section(lambda: pictures.filters(run)),
        "curves": _section(lambda: story.curves(run)),
    }


def _section(make: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """Calls ``make`` and returns a part of the page as a mapping.

    'content' is what ``make`` returns, or None. 'empty' is True if the run has nothing for this
    part. 'missing' says why the part could not be read, such as a damaged file; else it is ''.
    """
    try:
        content = make()
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        log.warning("report: a part is left out: %s", error)
        return {"content": None, "missing": f"{error}.", "empty": False}
    return {"content": content or None, "missing": "", "empty": not content}


def _summary(run: Run, trainings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns the tiles at the top of the report, each (number, caption, detail)."""
    tiles = []
    if run.layout.index.is_dir() and (samples := _section(lambda: [len(run.index)])["content"]):
        tiles.append((f"{samples[0]:,}", "samples", ""))
    if (seconds := story.total([training["seconds"] for training in trainings])) is not None:
        steps = sum(training["steps"] for training in trainings)
        more = f"{steps:,} steps in {count_of(len(trainings), 'training')}"
        tiles.append((duration(seconds), "of training", more))
    return tiles
