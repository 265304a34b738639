"""Verb ``soup``: exported models of one base -> one model, an average of their weights.

    uniform   equal shares
    greedy    models in the order of their scores, each kept if the soup does not become worse
              (Wortsman et al., "Model soups", 2022, Recipe 1)
    wise      the line (1 - alpha) A + alpha B between two models, measured at several alphas
              (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022)

Models are exports of stages, soups, or other people's open_clip directories with safetensors. What
was measured lies in ``scores/`` of the soup: ``results.jsonl`` as ``eval`` writes it, and
``trace.json`` or ``curve.json`` with ``curve.png``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from mclclip import files
from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode
from mclclip.eval.images import SUFFIXES, StoredImage, read_shards
from mclclip.eval.options import BenchmarkConfig
from mclclip.eval.outcomes import Unit
from mclclip.eval.results import Result
from mclclip.export import written
from mclclip.figures import drawing
from mclclip.models import soup, weights
from mclclip.models.encoder import Encoder
from mclclip.models.loading import has_texts, load_towers
from mclclip.models.model import Model
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Force, refuse_foreign

log = logging.getLogger("mclclip")

Method = Literal["uniform", "greedy", "wise"]
ALPHAS = tuple(number / 10 for number in range(11))
SCORES = "scores"
_STATISTICS_BATCH = 64  # images of a batch that batch norms are estimated on
_ADVICE = (
    "; where you know that they have one, which other people's files do not say, give --any-base"
)


class Judge(Protocol):
    """Measures encoders that lie in memory (``eval.run.Judge``)."""

    @property
    def benchmarks(self) -> Mapping[str, BenchmarkConfig]:
        """Benchmarks by name, the one that decides first."""
        ...

    @property
    def read_texts(self) -> list[str]:
        """Those that compare images with texts."""
        ...

    @property
    def context(self) -> Context:
        """Where encoders are measured."""
        ...

    def measure(self, encoder: Encoder, path: Path, model_name: str) -> list[Result]:
        """The encoder's rows on all benchmarks, which ``path`` then has too."""
        ...


def run(
    method: Method,
    models: Sequence[str],
    out: Path,
    *,
    judge: Judge,
    metrics: Sequence[str] = (),
    alpha: float | None = None,
    alphas: Sequence[float] | None = None,
    images: Path | None = None,
    any_base: bool = False,
    force: Force = False,
) -> Path:
    """Writes a soup of ``models``, given as ``[NAME=]PATH``, into the folder ``out``; returns it.

    The score of a model is the mean of ``metrics`` (``BENCHMARK/METRIC``; default: the main ones of
    the judge's first benchmark); of losses in nats the smaller one is better. ``greedy`` needs a
    score, and so does ``wise`` unless ``alpha`` says what is written; with one it is measured at
    ``alphas`` (default: 0, 0.1 ... 1) too. ``images``: a folder of training images, as shards or as
    files, on which batch norms are estimated again where the models' own differ.

    Raises ValueError for models that have no average (``soup.check_ingredients``), for what a
    method needs and was not given and for what it cannot use, and FileNotFoundError where there is
    no such model. After an error there is no soup in ``out``.
    """
    refuse_foreign(out, "--out")
    named = _named(models)
    _check(method, named, judge, metrics, alpha, alphas)
    paths = [*named.values()]
    if out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f"--out {out} is one of the models: give a new folder")
    soup.check_ingredients(paths, any_base=any_base, advice=_ADVICE)
    for path in paths:
        weights.check_recorded(path)
    _check_towers(paths, judge)
    if images is None and soup.needs_statistics(paths):
        raise ValueError(
            "the models have batch norms with different running statistics, which have no average "
            "that fits: give --images FOLDER with training images, to estimate them on"
        )
    fields = {
        "method": method,
        "models": [*named],
        "metrics": [*metrics],
        "alpha": alpha,
        "alphas": None if alphas is None else [*alphas],
        "benchmarks": {name: asdict(one) for name, one in judge.benchmarks.items()},
        "images": None if images is None else str(images),
    }
    ingredients = _Ingredients(named, images, judge, tuple(metrics), out / SCORES / "results.jsonl")
    inputs = {name: files.digest_file(weights.find_weights(path)) for name, path in named.items()}
    if method == "wise":
        choose = partial(_wise, ingredients, alpha=alpha, alphas=alphas)
    else:
        choose = partial(_greedy if method == "greedy" else _uniform, ingredients)
    return written(
        out, "soup", fields, inputs, force, lambda folder: _write(ingredients, choose(), folder)
    )


def chosen(method: Method, alpha: float | None) -> str:
    """What a soup chooses by its benchmarks, in words; empty where they decide nothing."""
    if method == "greedy":
        return "what a greedy soup keeps"
    return "alpha" if method == "wise" and alpha is None else ""


# --- checks ------------------------------------------------------------------------------------


def _named(models: Sequence[str]) -> dict[str, Path]:
    """Models by name: that of the folder, or of the stage; a repeated one gets a number."""
    found: dict[str, Path] = {}
    for text in models:
        name, equals, where = text.partition("=")
        if not equals or Path(text).exists():
            name, where = "", text
        path = Path(where.removeprefix("local-dir:"))
        whole = path.resolve()
        name = name or (whole.parent.name if whole.name == "export" else whole.name)
        taken = sum(known.partition("#")[0] == name for known in found)
        found[f"{name}#{taken + 1}" if taken else name] = path
    return found


def _check(
    method: Method,
    named: Mapping[str, Path],
    judge: Judge,
    metrics: Sequence[str],
    alpha: float | None,
    alphas: Sequence[float] | None,
) -> None:
    """Raises ValueError where options and method do not fit."""
    measured = "--held-out FOLDER (shards with captions) or --suite FILE"
    if len(named) < 2:
        raise ValueError(f"a soup is made of two models or more, got {len(named)}: give --model")
    if method == "wise" and len(named) != 2:
        raise ValueError(f"wise is the line between two models, got {len(named)}: give two")
    if method != "wise" and (alpha is not None or alphas is not None):
        raise ValueError(f"{method} has no alpha: leave out --alpha and --alphas, or take wise")
    if outside := [a for a in (alpha, *(alphas or ())) if a is not None and not 0 <= a <= 1]:
        raise ValueError(f"alpha is {outside[0]}: wanted numbers from 0 (the first model) to 1")
    if method == "greedy" and not judge.benchmarks:
        raise ValueError(f"greedy keeps models by their score on held-out data: give {measured}")
    if method == "wise" and not judge.benchmarks and (alpha is None or alphas is not None):
        raise ValueError(
            f"wise chooses alpha by a score on held-out data: give {measured}, or --alpha alone"
        )
    if metrics and not judge.benchmarks:
        raise ValueError(f"there is nothing to measure {metrics[0]} on: give {measured}")
    for metric in metrics:
        if metric.partition("/")[0] not in judge.benchmarks or "/" not in metric:
            raise ValueError(
                f"--metric {metric}: wanted BENCHMARK/METRIC of {', '.join(judge.benchmarks)}"
            )


def _check_towers(paths: Sequence[Path], judge: Judge) -> None:
    """Raises ValueError where a benchmark reads texts, and the models have no text tower."""
    without = [path for path in paths if not has_texts(path)]
    if without and judge.read_texts:
        raise ValueError(
            f"{without[0]} is an image encoder without a text tower, and {judge.read_texts[0]} "
            "compares images with texts: take a suite of benchmarks such as knn"
        )


# --- scores ------------------------------------------------------------------------------------


@dataclass
class _Choice:
    """Shares of the ingredients of a soup, and what the manifest and a table say of the choice."""

    shares: Sequence[float]
    record: dict[str, Any] = field(default_factory=dict)
    table: str = ""


@dataclass(frozen=True)
class _Ingredients:
    """The ingredients, and how soups of them are made and measured."""

    named: Mapping[str, Path]
    images: Path | None
    judge: Judge
    metrics: tuple[str, ...]
    results: Path

    @cached_property
    def model(self) -> Model:
        """The one model that every soup is filled into, on the judge's device."""
        model = load_towers(next(iter(self.named.values())), load_weights=False)
        return model.to(self.judge.context.device)

    def make(self, shares: Sequence[float]) -> tuple[Model, dict[str, Tensor], int]:
        """``soup.load_soup`` of these shares, in ``model``."""
        images = None if self.images is None else partial(_images, self.images)
        return soup.load_soup([*self.named.values()], shares, images, self.model)

    def measure(self, shares: Sequence[float], name: str) -> dict[str, Result]:
        """The figures of a soup that ``eval`` shows, by BENCHMARK/METRIC."""
        model, _, _ = self.make(shares)
        rows = self.judge.measure(Encoder([model]), self.results, name)
        return {
            f"{row.benchmark}/{row.metric}": row
            for row in rows
            if row.protocol.get("level") != "detail"
            or f"{row.benchmark}/{row.metric}" in self.metrics
        }

    def deciding(self, figures: Mapping[str, Result]) -> list[str]:
        """The metrics whose mean is the score. ValueError where one was not measured."""
        first = next(iter(self.judge.benchmarks))
        own = [name for name, row in figures.items() if row.benchmark == first]
        main = [name for name in own if figures[name].protocol.get("level") == "headline"]
        chosen = [*self.metrics] or main or own[:1]
        if lacking := [name for name in chosen if name not in figures]:
            raise ValueError(f"--metric {lacking[0]}: there are {', '.join(figures)}")
        if len({figures[name].unit for name in chosen}) > 1:
            raise ValueError(
                f"{', '.join(chosen)} are losses and shares of hits: they have no mean"
            )
        return chosen

    def score(self, figures: Mapping[str, Result]) -> float:
        """The mean of the deciding metrics, of losses its negative: larger is better."""
        chosen = self.deciding(figures)
        mean = math.fsum(figures[name].value for name in chosen) / len(chosen)
        return figures[chosen[0]].unit.sign * mean


def _images(folder: Path, model: Model) -> Iterator[Tensor]:
    """Yields batches of images [B, C, H, W] of a folder: of its shards, or else of the pictures
    below it; a fixed choice of at most 4,096. Those that cannot be decoded are counted and told.

    Raises FileNotFoundError where there is none.
    """
    places: Sequence[StoredImage | Path]
    if any(folder.glob("*.tar")):
        places = read_shards(folder)[0]
    else:
        places = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not places:
        raise FileNotFoundError(f"--images {folder} has neither shards (*.tar) nor pictures below")
    order = np.random.default_rng(0).permutation(len(places))[: soup.STATISTICS_IMAGES]
    arrays = bool(getattr(model.preprocess_val, "reads_arrays", False))
    bad = 0
    for start in range(0, len(order), _STATISTICS_BATCH):
        batch = []
        for row in order[start : start + _STATISTICS_BATCH]:
            try:
                image = decode(places[row].read_bytes(), MAX_IMAGE_PIXELS, arrays)
            except DecodeError:
                bad += 1
                continue
            batch.append(model.preprocess_val(image))
        if batch:
            yield torch.stack(batch)
    if bad:
        log.warning("%d of %d images of %s cannot be decoded", bad, len(order), folder)


# --- methods -----------------------------------------------------------------------------------


def _uniform(ingredients: _Ingredients) -> _Choice:
    shares = [1.0] * len(ingredients.named)
    choice = _Choice(shares)
    if ingredients.judge.benchmarks:
        names = {name: _alone(ingredients, number) for number, name in enumerate(ingredients.named)}
        every = {name: ingredients.measure(own, name) for name, own in names.items()}
        every["soup_uniform"] = ingredients.measure(shares, "soup_uniform")
        choice.table = _table("model", every)
    return choice


def _alone(ingredients: _Ingredients, number: int) -> list[float]:
    """The shares of one ingredient by itself."""
    return [float(other == number) for other in range(len(ingredients.named))]


def _greedy(ingredients: _Ingredients) -> _Choice:
    """Models by their own score, the best first (of equal ones the first given); each is kept if
    the soup with it scores at least what the soup without it does. So the score is never below
    that of the best model."""
    names = [*ingredients.named]
    figures = [
        ingredients.measure(_alone(ingredients, number), name) for number, name in enumerate(names)
    ]
    alone = [ingredients.score(found) for found in figures]
    first, *others = sorted(range(len(names)), key=lambda number: -alone[number])
    shares, best = _alone(ingredients, first), alone[first]
    trace = [{"model": names[first], "alone": best, "soup": best, "kept": True}]
    for step, number in enumerate(others, start=2):
        tried = [share + (other == number) for other, share in enumerate(shares)]
        found = ingredients.score(ingredients.measure(tried, f"soup_{step}"))
        kept = found >= best
        if kept:
            shares, best = tried, found
        trace.append({"model": names[number], "alone": alone[number], "soup": found, "kept": kept})
    metrics = ingredients.deciding(figures[0])
    files.write_json(
        ingredients.results.parent / "trace.json", {"metrics": metrics, "trace": trace}
    )
    title = f"score: mean of {', '.join(metrics)}"
    rows = [[t["model"], t["alone"], t["soup"], "kept" if t["kept"] else "left out"] for t in trace]
    table = tabulate(rows, headers=["model", "alone", "soup with it", ""], floatfmt=".4f")
    record = {"decided_by": metrics, "trace": trace, "score": best}
    return _Choice(shares, record, f"{title}\n{table}")


def _wise(
    ingredients: _Ingredients, alpha: float | None, alphas: Sequence[float] | None
) -> _Choice:
    """The point of the line that ``alpha`` names, or the one with the best score (of equal ones
    the nearest to the first model), and the curve of all that was measured."""
    if not ingredients.judge.benchmarks:
        assert alpha is not None, "_check has asked for it"
        return _Choice([1.0 - alpha, alpha], {"alpha": alpha})
    places = sorted({*(ALPHAS if alphas is None else alphas), *([] if alpha is None else [alpha])})
    found = {a: ingredients.measure([1.0 - a, a], f"alpha_{a:g}") for a in places}
    scores = {a: ingredients.score(figures) for a, figures in found.items()}
    chosen = max(places, key=lambda a: scores[a]) if alpha is None else alpha
    metrics = ingredients.deciding(found[chosen])
    values = {name: [found[a][name].value for a in places] for name in found[chosen]}
    curve = {
        "models": [*ingredients.named],
        "alphas": places,
        "decided_by": metrics,
        "alpha": chosen,
        "values": values,
    }
    folder, main = ingredients.results.parent, _main(found[chosen])
    files.write_json(folder / "curve.json", curve)
    units = {found[chosen][name].unit.name for name in main}
    _draw(folder / "curve.png", curve, main, " or ".join(sorted(units)))
    price = _price(curve)
    digits = {name: _digits([price[name]], found[chosen][name].unit) for name in price}
    changes = ", ".join(f"{name} {price[name]:+.{digits[name]}f}" for name in main if name in price)
    table = _table("alpha", {f"{a:g}": figures for a, figures in found.items()})
    table += f"\nalpha {chosen:g} is written" + (f"; against alpha 0: {changes}" if changes else "")
    return _Choice([1.0 - chosen, chosen], curve | {"price": price}, table)


def _price(curve: Mapping[str, Any]) -> dict[str, float]:
    """The difference of each figure at the chosen alpha to that of the first model, where it was
    measured, in the figure's unit."""
    places = curve["alphas"]
    if 0.0 not in places:
        return {}
    zero, here = places.index(0.0), places.index(curve["alpha"])
    return {name: values[here] - values[zero] for name, values in curve["values"].items()}


def _main(figures: Mapping[str, Result]) -> list[str]:
    """The main metrics of every benchmark: its headlines, or all where it has none."""
    of: dict[str, list[str]] = {}
    for name, row in figures.items():
        of.setdefault(row.benchmark, []).append(name)
    headlines = [name for name, row in figures.items() if row.protocol.get("level") == "headline"]
    return [
        name for names in of.values() for name in ([n for n in names if n in headlines] or names)
    ]


def _draw(path: Path, curve: Mapping[str, Any], main: Sequence[str], unit: str) -> None:
    try:
        drawing.library()
    except ValueError as error:  # the soup does not depend on it
        log.warning("the curve is not drawn: %s", error)
        return
    first, second = (name for name in curve["models"])
    series = {name: curve["values"][name] for name in main}
    title = f"from {first} (0) to {second} (1)"
    drawing.curves(path, title, curve["alphas"], series, "alpha", unit, curve["alpha"])


def _table(first: str, every: Mapping[str, Mapping[str, Result]]) -> str:
    """The main figures by model or alpha."""
    main = _main(next(iter(every.values())))
    columns = {metric: [figures[metric] for figures in every.values()] for metric in main}
    heads, cells = [first], [[*every]]
    for metric, rows in columns.items():
        digits = _digits([row.value for row in rows], rows[0].unit)
        heads.append(metric.replace("/", "/\n") + rows[0].unit.note)
        cells.append([f"{row.value:.{digits}f}" for row in rows])
    align = ("left", *["right"] * len(main))
    return tabulate(
        [*zip(*cells, strict=True)], headers=heads, disable_numparse=True, colalign=align
    )


def _digits(values: Sequence[float], unit: Unit) -> int:
    """Decimals of figures that differ little, as those of soups do."""
    return max(2, unit.decimals(values))


# --- writing -----------------------------------------------------------------------------------


def _write(ingredients: _Ingredients, choice: _Choice, directory: Path) -> dict[str, Any]:
    """Writes the soup into the directory of its artifact; returns counts for the manifest."""
    paths = [*ingredients.named.values()]
    config = soup.check_ingredients(paths, any_base=True)
    chosen = [path for path, share in zip(paths, choice.shares, strict=True) if share]
    if len(chosen) == 1:
        config = weights.read_config(chosen[0])  # this model as it is, with its own base
    _, tensors, count = ingredients.make(choice.shares)
    if choice.table:
        print(choice.table)
    weights.copy_tokenizer(chosen[0], directory)
    weights.write_model(directory, config, tensors)
    if ingredients.judge.benchmarks:
        log.info("a figure by which a soup was chosen is too good: report it on other data")
    shares = {name: share for name, share in zip(ingredients.named, choice.shares, strict=True)}
    return {"shares": shares, "statistics_samples": count} | choice.record
