"""Verb: what a run left as data -> one page ``report.html``, to be looked at and passed on.

The page is one file: it asks nothing of a network, holds no script, follows the light or dark theme
of its reader, and fits a phone. It shows results, comparisons, clusters, neighbours, curves and
costs, as far as the run has them; what is missing is named with the reason. Of many samples only
some are read (see ``material``), which the page says.

A report changes nothing but its own file, which is replaced by rename. So it takes no lock, and may
be made of a run that is training.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mclclip import __version__, files
from mclclip import config as configuration
from mclclip.config import Config
from mclclip.data.options import DataConfig
from mclclip.eval import results
from mclclip.report import blindspots, clusters, filters, nearest, pairs, scores, story, training
from mclclip.report.material import Material
from mclclip.report.scores import Verdicts
from mclclip.report.thumbnails import Samples, Thumbnails
from mclclip.run.layout import Layout

log = logging.getLogger("mclclip")
T = TypeVar("T")

NAME = "report.html"


@dataclass(frozen=True)
class Section(Generic[T]):
    """A part of the page: its content, or the reason why it is missing."""

    content: T | None
    missing: str = ""


def run(run_dir: str | None = None, *, config: str | None = None, out: Path | None = None) -> Path:
    """Writes the page of a run; returns its path.

    ``run_dir``: the folder of the run (default: that of the configuration). ``config``: a YAML file
    or a recipe (default: the configuration that the run recorded, if it did). ``out``: default is
    ``report.html`` in the folder. Raises FileNotFoundError where there is no run, or nothing to
    show of it yet, and ValueError where results.jsonl or the configuration is wrong.
    """
    material = read(run_dir, config)
    page = render(material)
    path = out or material.run_dir / NAME
    files.write_bytes(path, page.encode())
    log.info("wrote %s", path)
    return path


def read(run_dir: str | None, config: str | None = None) -> Material:
    """The material of a report (see ``run``)."""
    settled = None if config is None else configuration.load(config, [])
    if run_dir is None:
        if settled is None:
            raise ValueError("wanted a run directory, such as 'mclclip report runs/mine'")
        run_dir = settled.run_dir
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run at {folder}: name the folder of a run")
    if settled is None:
        settled = _recorded(folder)
    rows = results.read(Layout(folder).results)
    if not rows and not Layout(folder).stage(0).is_dir():
        raise FileNotFoundError(
            f"{folder} has nothing to show yet, neither results.jsonl nor stage_0: run 'mclclip "
            "run' or 'mclclip eval' first"
        )
    return Material(folder, settled, rows)


def _recorded(folder: Path) -> Config | None:
    """The configuration that a run recorded. A folder of evaluations alone has none."""
    path = folder / "config.yaml"
    return configuration.load(str(path), []) if path.is_file() else None


def render(material: Material) -> str:
    """The page as text; the same bytes for the same run."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["duration"] = training.duration
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html").render(_content(material))


def _printable(value: Any) -> Any:
    """Strangers' text without characters that do not print; autoescape does the rest."""
    return files.shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(name: str) -> Markup:
    """A name that a line may break behind an underscore or a slash."""
    parts = re.split(r"(?<=[_/])", files.shown(name))
    return Markup("<wbr>").join(parts)


def _content(material: Material) -> dict[str, Any]:
    """All variables of the template."""
    data = DataConfig() if material.config is None else material.config.data
    thumbnails = Thumbnails(data.max_image_pixels)
    samples = _section(lambda: Samples(material.index, data), "")
    verdicts = scores.verdicts(material)
    trainings = training.trainings(material)

    of_samples = partial(_of_samples, samples)
    shown_clusters = of_samples(
        lambda known: clusters.clustered(material, known, thumbnails),
        "There are no clusters: 'mclclip cluster --stage 0' makes them.",
    )
    content = {
        "version": __version__,
        "name": material.run_dir.resolve().name,
        "material": material,
        "tables": _section(
            lambda: scores.tables(material.rows, scores.references()),
            "Nothing was evaluated yet: 'mclclip eval' does it.",
        ),
        "model_colours": {scores.colour_of(row.model) for row in material.rows},
        "verdicts": verdicts,
        "first_of_each": scores.first_of_each,
        "exchanges": _section(
            lambda: pairs.exchanges(material, thumbnails),
            "No benchmark of minimal pairs was measured for two encoders.",
        ),
        "clusters": shown_clusters,
        "agreement": of_samples(
            lambda _: [found] if (found := clusters.agreement(material)) else [],
            "Agreement needs the clusters of two stages, or attributes of samples "
            "(data.sources.NAME.attributes).",
        ),
        "anchors": of_samples(
            lambda known: nearest.anchors(material, known, thumbnails),
            "There are no embeddings of more than a few samples: 'mclclip embed --stage 0' makes "
            "them.",
        ),
        "blindspots": of_samples(
            lambda known: blindspots.blindspots(material, known, thumbnails),
            "None were looked for: 'mclclip blindspots' finds them.",
        ),
        "filters": _section(
            lambda: filters.filters(material),
            "No samples were chosen by their embeddings: 'mclclip filter' does it.",
        ),
        "curves": _section(lambda: training.curves(material), "No training has records."),
        "trainings": trainings,
        "seconds": training.total(trainings, lambda one: one.seconds),
        "rank_hours": training.total(trainings, lambda one: one.rank_hours),
        "colours": training.COLOURS,
        "chapters": _section(
            lambda: story.chapters(material, trainings, shown_clusters.content or (), verdicts),
            "The run has no stages.",
        ),
        "summary": _summary(material, trainings, verdicts),
    }
    return content | {"lost": thumbnails.lost()}


def _of_samples(
    samples: Section[Samples], make: Callable[[Samples], Sequence[T]], needs: str
) -> Section[Sequence[T]]:
    """A section that ``make`` makes of the samples, where there are some."""
    if samples.content is None:
        return Section(None, samples.missing)
    known = samples.content
    return _section(lambda: make(known), needs)


def _section(make: Callable[[], T], needs: str) -> Section[T]:
    """A section with what ``make`` returns. Where that is empty, it has ``needs`` as the reason
    instead, and where files are missing or damaged, their error."""
    try:
        content = make()
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        log.warning("report: a part is left out: %s", error)
        return Section(None, f"{error}.")
    return Section(None, needs) if isinstance(content, list) and not content else Section(content)


def _summary(
    material: Material, trainings: Sequence[training.Training], verdicts: Verdicts
) -> list[tuple[str, str, str]]:
    """The most important figures: value, what it is, more about it."""
    found = []
    best = pairs.best_of({row.model: row for row in material.rows})
    if best is not None and (own := verdicts.of(best)):
        first = own[0]
        (value, base, change, *_), unit = first.texts(), first.row.unit
        more = f"{best} has {value} {unit.name}, stage 0 {base}: {first.verdict}"
        found.append((change, f"{unit.difference} on {first.row.benchmark}", more))
    if twins := [c for c in verdicts.with_control if c.row.model == best]:
        first = twins[0]
        (_, base, change, *_), unit = first.texts(), first.row.unit
        what = f"{unit.difference} against the same training without groups"
        more = f"{first.against.model} has {base} {unit.name}: {first.verdict}"
        found.append((change, what, more))
    if material.layout.index.is_dir():
        section = _section(lambda: [len(material.index)], "")
        if section.content:
            found.append((f"{section.content[0]:,}", "samples", ""))
    if (seconds := training.total(trainings, lambda one: one.seconds)) is not None:
        steps = sum(one.steps for one in trainings)
        more = f"{steps:,} steps in {len(trainings)} trainings"
        found.append((training.duration(seconds), "of training", more))
    return found
