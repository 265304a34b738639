"""Verb ``soup``: exported models of one base -> one model, an average of their weights.

    uniform   equal shares
    greedy    adds models in the order of their scores, and keeps each that does not make the soup
              worse (Wortsman et al., "Model soups", 2022, Recipe 1)
    wise      a point of the line (1 - alpha) A + alpha B between two models, which are measured at
              several alphas (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022)

Models are exports of stages, soups, or other people's open_clip directories with safetensors. All
measurements lie in the soup's folder ``scores/``: ``results.jsonl`` as ``eval`` writes it, and
``trace.json`` (greedy) or ``curve.json`` with ``curve.png`` (wise).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, decode
from mclclip.data.picture_transform import as_transform
from mclclip.eval import results
from mclclip.eval.images import SUFFIXES, StoredImage, read_shards
from mclclip.eval.protocols import BenchmarkConfig
from mclclip.eval.results import Result
from mclclip.export import ExportStep
from mclclip.figures import drawing
from mclclip.models import soup, weights
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import refuse_foreign
from mclclip.run.steps import make_artifact
from mclclip.util import files
from mclclip.util.options import split_named_path
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

Method = Literal["uniform", "greedy", "wise"]
ALPHAS = tuple(number / 10 for number in range(11))
_STATISTICS_BATCH = 64  # images per batch when batch norms are estimated
Figures = Mapping[str, Result]
"""A soup's rows of results.jsonl, by BENCHMARK/METRIC."""
Choice = tuple[list[float], dict[str, Any], str]
"""The share of each ingredient, what the manifest records, and a table to print (may be empty)."""
_ADVICE = (
    "; where you know that they have one, which other people's files do not say, give --any-base"
)


class Judge(Protocol):
    """Measures encoders that lie in memory; ``verbs.eval.SuiteJudge`` is one."""

    @property
    def benchmarks(self) -> Mapping[str, BenchmarkConfig]:
        """Benchmarks by name; the first one decides."""

    @property
    def context(self) -> Context:
        """Ranks and device that measure encoders."""

    def measure(self, encoder: Encoder, path: Path, model_name: str) -> list[Result]:
        """Returns the encoder's rows on all benchmarks, and writes them to ``path``."""


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
    force: Remake = Remake.NOTHING,
) -> Path:
    """Writes a soup of ``models``, given as ``[NAME=]PATH``, into the folder ``out``; returns it.

    The score of a model is the mean of ``metrics`` (``BENCHMARK/METRIC``; default: the main ones of
    the judge's first benchmark); losses count with the opposite sign. ``greedy`` needs a judge with
    benchmarks. ``wise`` needs one too, or ``alpha``, the share of the second model; if it has
    benchmarks, the line is measured at ``alphas`` (default: 0, 0.1 ... 1). ``images``: a folder of
    training images, as shards or files, on which batch norms are estimated again if those of the
    models differ. ``any_base`` accepts models that do not record their common base.

    Raises ValueError for models that have no average (``models.soup.check_ingredients``) and for
    options that the method lacks or cannot use, FileNotFoundError for a missing model, and
    RuntimeError for a damaged export. After an error there is no soup in ``out``.
    """
    refuse_foreign(out, "--out")
    ingredients = _names_of(models)
    _check_options(method, ingredients, judge, metrics, alpha, alphas)
    paths = [*ingredients.values()]
    if out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f"--out {out} is one of the models: give a new folder")
    _check_models(paths, images, any_base)
    inputs = {
        name: files.digest_file(weights.find_weights(path)) for name, path in ingredients.items()
    }
    search = _Search(ingredients, images, judge, tuple(metrics), out / "scores")
    choose: dict[Method, Callable[[], Choice]] = {
        "uniform": partial(_uniform, search),
        "greedy": partial(_greedy, search),
        "wise": partial(_wise, search, alpha, alphas),
    }
    step = Soup(
        method, tuple(ingredients), tuple(metrics), alpha,
        None if alphas is None else tuple(alphas), judge.benchmarks,
        None if images is None else str(images),
    )  # fmt: skip
    write = partial(_write, search, choose[method], describe_choice(method, alpha))
    make_artifact(step, out, (inputs, write), force)
    return out


@dataclass(frozen=True)
class Soup(ExportStep):
    """An average of the weights of ``models``, whose shares ``method`` chooses."""

    kind = "soup"
    method: Method
    models: tuple[str, ...]
    metrics: tuple[str, ...]
    alpha: float | None
    alphas: tuple[float, ...] | None
    benchmarks: Mapping[str, BenchmarkConfig]
    images: str | None


def _write(
    search: _Search, choose: Callable[[], Choice], choice: str, directory: Path
) -> dict[str, Any]:
    """Writes the soup into ``directory``; returns counts for the manifest.

    ``choice``: what the benchmarks choose, as ``describe_choice`` says."""
    paths = [*search.ingredients.values()]
    config = soup.check_ingredients(paths, any_base=True)
    shares, record, table = choose()
    mixed = [path for path, share in zip(paths, shares, strict=True) if share]
    if len(mixed) == 1:  # the soup is this one model, so it has its base too
        config = weights.read_config(mixed[0])
    _, tensors, count = search.load(shares)
    if table:
        print(table)
    weights.copy_tokenizer(mixed[0], directory)
    weights.write_model(directory, config, tensors)
    if choice:
        log.info("a figure by which %s was chosen is too good: report it on other data", choice)
    by_name = dict(zip(search.ingredients, shares, strict=True))
    return {"shares": by_name, "statistics_samples": count} | record


def describe_choice(method: Method, alpha: float | None) -> str:
    """Returns for a message what the benchmarks choose, such as 'alpha'; empty if nothing."""
    if method == "greedy":
        return "what a greedy soup keeps"
    return "alpha" if method == "wise" and alpha is None else ""


# --- checks ------------------------------------------------------------------------------------


def _names_of(models: Sequence[str]) -> dict[str, Path]:
    """Returns the paths of ``[NAME=]PATH`` by name.

    Without NAME it is the folder's, or of an export the stage's; the second ``a`` becomes ``a#2``.
    """
    ingredients: dict[str, Path] = {}
    for text in models:
        name, where = split_named_path(text)
        if where.startswith("hf:"):
            raise ValueError(
                f"--model {where} is no export, of which soups are made: 'mclclip export --stage 0 "
                "model.name=hf:NAME run_dir=FOLDER' makes one"
            )
        path = Path(where.removeprefix("local-dir:"))
        whole = path.resolve()
        name = name or (whole.parent.name if whole.name == "export" else whole.name)
        taken = sum(other.partition("#")[0] == name for other in ingredients)
        ingredients[f"{name}#{taken + 1}" if taken else name] = path
    return ingredients


def _check_options(
    method: Method,
    ingredients: Mapping[str, Path],
    judge: Judge,
    metrics: Sequence[str],
    alpha: float | None,
    alphas: Sequence[float] | None,
) -> None:
    """Raises ValueError for options that do not fit the method or each other."""
    data = "--held-out FOLDER (shards with captions) or --suite FILE"
    number, is_wise, is_judged = len(ingredients), method == "wise", bool(judge.benchmarks)
    needs_score = alpha is None or alphas is not None if is_wise else method == "greedy"
    outside = [a for a in (alpha, *(alphas or ())) if a is not None and not 0 <= a <= 1]
    unknown = [m for m in metrics if "/" not in m or m.partition("/")[0] not in judge.benchmarks]
    rules = [
        (number < 2, f"a soup is made of two models or more, got {number}: give --model"),
        (
            is_wise and number != 2,
            f"wise is the line between two models, got {number}: give two --model",
        ),
        (
            not is_wise and (alpha is not None or alphas is not None),
            f"{method} has no alpha: leave out --alpha and --alphas, or take wise",
        ),
        (
            outside,
            f"alpha is {', '.join(map(str, outside))}: wanted 0 (the first model) to 1",
        ),
        (
            needs_score and not is_judged,
            f"{method} chooses by a score on held-out data: give {data}"
            + ", or --alpha alone" * is_wise,
        ),
        (
            metrics and not is_judged,
            f"there is nothing to measure {', '.join(metrics)} on: give {data}",
        ),
        (
            unknown,
            f"--metric {', '.join(unknown)}: wanted BENCHMARK/METRIC of "
            + ", ".join(judge.benchmarks),
        ),
    ]
    for is_broken, line in rules:
        if is_broken:
            raise ValueError(line)


def _check_models(paths: Sequence[Path], images: Path | None, any_base: bool) -> None:
    """Raises the errors of ``run`` that concern the models."""
    soup.check_ingredients(paths, any_base=any_base, advice=_ADVICE)
    for path in paths:
        weights.check_recorded(path)
    if images is None and soup.differing_norms(paths):
        raise ValueError(
            "the models have batch norms with different running statistics, which have no average "
            "that fits: give --images FOLDER with training images, to estimate them on"
        )


# --- scores ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    """Makes and measures soups of the ingredients; ``scores`` is the folder of the figures."""

    ingredients: Mapping[str, Path]
    images: Path | None
    judge: Judge
    metrics: tuple[str, ...]
    scores: Path

    @cached_property
    def model(self) -> Model:
        """The model on the judge's device into which the weights of every soup are loaded."""
        model = load_towers(next(iter(self.ingredients.values())), load_weights=False)
        return model.to(self.judge.context.device)

    def load(self, shares: Sequence[float]) -> tuple[Model, dict[str, Tensor], int]:
        """Loads the soup of these shares into ``model``; returns what ``soup.load_soup`` does: the
        model, its weights, and the number of images on which batch norms were estimated."""
        images = None if self.images is None else partial(_images, self.images)
        return soup.load_soup([*self.ingredients.values()], shares, images, self.model)

    def measure(self, shares: Sequence[float], name: str) -> Figures:
        """Measures a soup; returns the figures that ``eval`` shows, by BENCHMARK/METRIC."""
        encoder = Encoder([self.load(shares)[0]])
        figures = {}
        for row in self.judge.measure(encoder, self.scores / "results.jsonl", name):
            metric = f"{row.benchmark}/{row.metric}"
            if row.protocol.get("level") != "detail" or metric in self.metrics:
                figures[metric] = row
        return figures

    def deciding(self, figures: Figures) -> list[str]:
        """Returns the metrics whose mean is the score; ValueError if one was not measured."""
        first = next(iter(self.judge.benchmarks))
        of_first = [name for name, row in figures.items() if row.benchmark == first]
        main = [name for name in of_first if figures[name].protocol.get("level") == "headline"]
        deciding = [*self.metrics] or main or of_first[:1]
        if lacking := [name for name in deciding if name not in figures]:
            raise ValueError(f"--metric {lacking[0]}: there are {', '.join(figures)}")
        if len({figures[name].unit for name in deciding}) > 1:
            raise ValueError(
                f"{', '.join(deciding)} are losses and shares of hits: they have no mean"
            )
        return deciding

    def score(self, figures: Figures) -> float:
        """Returns the mean of the deciding metrics, for losses its negative: larger is better."""
        deciding = self.deciding(figures)
        mean = math.fsum(figures[name].value for name in deciding) / len(deciding)
        return figures[deciding[0]].unit.sign * mean


def _images(folder: Path, model: Model) -> Iterator[Tensor]:
    """Yields batches [B, C, H, W] of the images in a folder's shards, or of the pictures below it.

    Takes at most ``soup.STATISTICS_IMAGES``, always the same ones. A warning counts those that
    cannot be decoded. Raises FileNotFoundError if there is no image.
    """
    paths: Sequence[StoredImage | Path]
    if any(folder.glob("*.tar")):
        paths = read_shards(folder)[0]
    else:
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"--images {folder} has neither shards (*.tar) nor pictures below")
    order = np.random.default_rng(0).permutation(len(paths))[: soup.STATISTICS_IMAGES]
    arrays = as_transform(model.preprocess_val).reads_arrays
    bad = 0
    for start in range(0, len(order), _STATISTICS_BATCH):
        batch = []
        for row in order[start : start + _STATISTICS_BATCH]:
            try:
                image = decode(paths[row].read_bytes(), MAX_IMAGE_PIXELS, arrays)
            except DecodeError:
                bad += 1
                continue
            batch.append(model.preprocess_val(image))
        if batch:
            yield torch.stack(batch)
    if bad:
        log.warning("%d of %d images of %s cannot be decoded", bad, len(order), folder)


# --- methods ------------------------------------------------------------------------------------


def _uniform(search: _Search) -> Choice:
    """Returns equal shares; measures every model and the soup, if there are benchmarks."""
    shares = [1.0] * len(search.ingredients)
    if not search.judge.benchmarks:
        return shares, {}, ""
    alone = np.eye(len(shares)).tolist()
    every = {n: search.measure(row, n) for n, row in zip(search.ingredients, alone, strict=True)}
    every["soup_uniform"] = search.measure(shares, "soup_uniform")
    return shares, {}, _table(every.values())


def _greedy(search: _Search) -> Choice:
    """Adds models in the order of their scores, the best first (of equals the one listed first).

    Keeps a model if the soup with it scores at least as high as the soup without it. So the score
    is never below that of the best model.
    """
    names, single = [*search.ingredients], np.eye(len(search.ingredients)).tolist()
    figures = [search.measure(row, name) for row, name in zip(single, names, strict=True)]
    alone = [search.score(figure) for figure in figures]
    first, *others = sorted(range(len(names)), key=lambda number: -alone[number])
    shares, best = single[first], alone[first]
    trace = [{"model": names[first], "alone": best, "soup": best, "kept": True}]
    for step, number in enumerate(others, start=2):
        tried = [share + (other == number) for other, share in enumerate(shares)]
        score = search.score(search.measure(tried, f"soup_{step}"))
        is_kept = score >= best
        if is_kept:
            shares, best = tried, score
        row = {"model": names[number], "alone": alone[number], "soup": score, "kept": is_kept}
        trace.append(row)
    metrics = search.deciding(figures[0])
    files.write_json(search.scores / "trace.json", {"metrics": metrics, "trace": trace})
    rows = [[t["model"], t["alone"], t["soup"], "kept" if t["kept"] else "left out"] for t in trace]
    table = tabulate(rows, headers=["model", "alone", "soup with it", ""], floatfmt=".4f")
    record = {"decided_by": metrics, "trace": trace, "score": best}
    return shares, record, f"score: mean of {', '.join(metrics)}\n{table}"


def _wise(search: _Search, alpha: float | None, alphas: Sequence[float] | None) -> Choice:
    """Returns the point ``alpha`` of the line, or the one with the best score (of equals the one
    nearest to the first model), and records the curve of all measured points.

    The recorded ``price`` is each figure's difference from the first model's, if alpha 0 was
    measured.
    """
    if not search.judge.benchmarks:
        assert alpha is not None, "_check_options requires it"
        return [1.0 - alpha, alpha], {"alpha": alpha}, ""
    points = sorted({*(ALPHAS if alphas is None else alphas), *([] if alpha is None else [alpha])})
    every = {a: search.measure([1.0 - a, a], f"alpha_{a:g}") for a in points}
    scores = {a: search.score(figures) for a, figures in every.items()}
    best = max(points, key=lambda a: scores[a]) if alpha is None else alpha
    figures = every[best]
    curve: dict[str, Any] = {
        "models": [*search.ingredients],
        "alphas": points,
        "decided_by": search.deciding(figures),
        "alpha": best,
        "values": {name: [every[a][name].value for a in points] for name in figures},
    }
    files.write_json(search.scores / "curve.json", curve)
    main, (first, second) = _main(figures), curve["models"]
    try:
        drawing.library()
    except ValueError as error:  # matplotlib is missing; the soup does not need it
        log.warning("the curve is not drawn: %s", error)
    else:
        series = {name: curve["values"][name] for name in main}
        unit = " or ".join(sorted({figures[name].unit.name for name in main}))
        title = f"from {first} (0) to {second} (1)"
        path = search.scores / "curve.png"
        drawing.lines(path, title, series, "alpha", unit, places=points, marked=best)
    price = {}
    if 0.0 in every:
        price = {name: figures[name].value - row.value for name, row in every[0.0].items()}
    table = f"{_table(every.values())}\n\nalpha {best:g} is written"
    if price:
        shown = {name: price[name] for name in main if name in price}
        digits = {name: max(2, figures[name].unit.decimals([shown[name]])) for name in shown}
        changes = [f"{name} {change:+.{digits[name]}f}" for name, change in shown.items()]
        table += f"; against alpha 0: {', '.join(changes)}"
    return [1.0 - best, best], curve | {"price": price}, table


def _main(figures: Figures) -> list[str]:
    """Returns the main metrics of every benchmark: those with the level 'headline' in their
    protocol, or all if none has it."""
    of: dict[str, list[str]] = {}
    for name, row in figures.items():
        of.setdefault(row.benchmark, []).append(name)
    main = []
    for names in of.values():
        main += [n for n in names if figures[n].protocol.get("level") == "headline"] or names
    return main


def _table(every: Iterable[Figures]) -> str:
    """Returns a table of the main figures of several models."""
    return results.table([figures[name] for figures in every for name in _main(figures)])
