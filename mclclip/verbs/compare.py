"""Verb ``compare``: results and the outcomes of items -> comparisons of encoders, with tests.

Encoders are compared item by item, so items that are hard for both do not count. ``eval.outcomes``
computes tests and intervals. A run is judged by a family of comparisons, which its results alone
determine (``family``). P-values are corrected over this family, so a comparison has the same
p-value in the table, in the report and in the verdict.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

from mclclip.eval import outcomes, results
from mclclip.eval.comparisons import Comparison, Format, correct, render
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Result, short_name
from mclclip.eval.units import PERCENT, Unit
from mclclip.run.opened import JOINED, Run
from mclclip.util.files import refuse_folder, write_bytes
from mclclip.util.options import brief

log = logging.getLogger("mclclip")

Row = tuple[Result, Path]
"""A row of results.jsonl, and the file with the outcome of each item, which may be missing."""
Pair = tuple[Row, Row]
"""The rows of two encoders in the same metric of a benchmark."""
Key = tuple[str, str, str, str]
"""Benchmark, metric, and the names of two encoders."""

BASE, TWIN = "stage_0", "control_ungrouped_"
"""The encoder that others are compared with; how the name of the ungrouped control of an encoder
begins, such as ``control_ungrouped_stage_1``."""
_IS_CONTROL = re.compile(r"(?:.*:)?control_[^:]*(?::\d+)?").fullmatch  # [RUN:]NAME[:WIDTH]


def run(
    runs: Sequence[Path],
    *,
    models: Sequence[str] = (),
    against: str | None = None,
    benchmarks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    format: Format = "text",
    out: Path | None = None,
) -> list[Comparison]:
    """Compares ``models`` with ``against`` in the results of some run directories; prints a table.

    If none of the four selections is given, it makes the comparisons of ``family``. ``models``:
    names in results.jsonl (default: all but ``against``). ``against``: default stage_0, or else the
    first model. With several runs a name begins with its run, as in 'mine:stage_1'. ``benchmarks``:
    default all. ``metrics``: default those of the level 'headline'. ``out``: a file for the table
    instead of the standard output. Raises FileNotFoundError if there are no results or outcomes,
    and ValueError for unknown names and encoders that were not measured on the same items.
    """
    refuse_folder(out, "--out")
    rows = read_runs(runs)
    comparisons = compare(rows, models, against, benchmarks, metrics)
    others = [against or _base([row.model for row, _ in rows])] if models else []
    _warn_of_gaps(rows, [*models, *others], benchmarks)
    text = render(comparisons, format)
    compared = [row for c in comparisons for row in (c.row, c.against)]
    for benchmark in dict.fromkeys(row.benchmark for row in compared):
        for note in results.notes([row for row in compared if row.benchmark == benchmark]):
            log.warning("%s: %s", benchmark, note)
    if out is None:
        print(text)
    else:
        write_bytes(out, f"{text}\n".encode())
        log.info("wrote %s", out)
    return comparisons


def compare(
    rows: Sequence[Row],
    models: Sequence[str] = (),
    against: str | None = None,
    benchmarks: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> list[Comparison]:
    """Compares encoders of ``rows``; arguments and errors are those of ``run``.

    P-values of comparisons in the ``family`` are corrected over the whole family, and those of the
    other comparisons over each other.
    """
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    if len(names) < 2:
        raise ValueError(f"there are results of one model, {names[0]}: evaluate another one too")
    read, standard = Reader(), family(rows)
    if models or against or benchmarks or metrics or not standard:
        pairs = _choose_pairs(rows, models, against or _base(names), benchmarks, metrics)
    else:
        pairs = standard
    in_family, keys = {_key(pair) for pair in standard}, {_key(pair) for pair in pairs}
    compared = {}
    if in_family & keys:
        compared = _compare_pairs(read, standard, keys)
    others = [pair for pair in pairs if _key(pair) not in in_family]
    compared |= _compare_pairs(read, others, keys)
    return [compared[_key(pair)] for pair in pairs]


def _warn_of_gaps(rows: Sequence[Row], models: Sequence[str], benchmarks: Sequence[str]) -> None:
    """Warns of encoders, by default all but controls, that have no figures on some of the
    benchmarks on which others of them have."""
    measured: dict[str, set[str]] = {}
    for row, _ in rows:
        if row.model in models if models else not _IS_CONTROL(row.model):
            measured.setdefault(row.model, set()).add(row.benchmark)
    every = set().union(*measured.values()) & {*(benchmarks or (row.benchmark for row, _ in rows))}
    gaps: dict[str, list[str]] = {}
    for name, some in measured.items():
        gaps.setdefault(", ".join(sorted(every - some)), []).append(name)
    for lacking, names in gaps.items():
        if lacking:
            log.warning("not compared on %s, not measured there: %s", lacking, ", ".join(names))


def _choose_pairs(
    rows: Sequence[Row],
    models: Sequence[str],
    against: str,
    benchmarks: Sequence[str],
    metrics: Sequence[str],
) -> list[Pair]:
    """Pairs the rows of ``models`` with those of ``against``; ValueError for unknown names."""
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    compared = [*models] or [name for name in names if name != against]
    _check_names("model", [*compared, against], names)
    if against in compared:
        raise ValueError(f"{against} cannot be compared with itself: name another --against")
    _check_names("benchmark", benchmarks, [*dict.fromkeys(row.benchmark for row, _ in rows)])
    every = [*dict.fromkeys(row.metric for row, _ in rows)]
    of_short = {short_name(metric): metric for metric in every}
    metrics = [of_short.get(metric, metric) for metric in metrics]
    _check_names("metric", metrics, every)
    cells = [
        (row, path)
        for row, path in rows
        if (not benchmarks or row.benchmark in benchmarks)
        and (row.metric in metrics if metrics else row.protocol.get("level") == "headline")
    ]
    pairs = _pair_rows(cells, [(name, against) for name in compared])
    if not pairs:
        raise ValueError(
            f"no metric of {', '.join(compared)} was measured for {against} too: evaluate them on "
            "the same benchmarks"
        )
    return pairs


def _pair_rows(cells: Sequence[Row], names: Sequence[tuple[str, str]]) -> list[Pair]:
    """Pairs the rows of each two encoders, in every metric in which both were measured."""
    of = {(row.benchmark, row.metric, row.model): (row, path) for row, path in cells}
    return [
        (of[*metric, model], of[*metric, other])
        for metric in dict.fromkeys(cell[:2] for cell in of)
        for model, other in names
        if (*metric, model) in of and (*metric, other) in of
    ]


def _key(pair: Pair) -> Key:
    (row, _), (against, _) = pair
    return row.benchmark, row.metric, row.model, against.model


def _compare_pairs(
    read: Reader, pairs: Sequence[Pair], asked: Container[Key] | None = None
) -> dict[Key, Comparison]:
    """Compares pairs as one family; returns the comparisons by ``_key``. Pairs that cannot be
    compared are an error if they are ``asked`` for (None: all); a warning names the others."""
    compared, number = {}, len({_key(pair) for pair in pairs})
    for pair in pairs:
        try:
            compared[_key(pair)] = _compare_rows(read, *pair)
        except (ValueError, FileNotFoundError) as error:
            if asked is None or _key(pair) in asked:
                raise
            log.warning("left out of the comparisons that the run is judged by: %s", error)
    corrected = correct([*compared.values()], number - len(compared))
    return dict(zip(compared, corrected, strict=True))


# --- the comparisons that judge a run ----------------------------------------------------------


def family(rows: Sequence[Row]) -> list[Pair]:
    """Returns the comparisons that judge a run, in the main metrics of every benchmark.

    If there is a share ``choose`` of held-out pictures, as after ``finetune``, the encoder that it
    chooses (``tuned``) is judged on all other benchmarks. Otherwise every encoder is that the run
    made (``is_of_run``). Each is compared with stage 0 and with its ungrouped control. Without
    stage 0, as with several runs, all others except controls are compared with the first encoder,
    on all benchmarks but ``choose``.
    """
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    base, main = _base(names), _main(rows)
    judged = [n for n in names if (is_of_run(n) if base == BASE else not _IS_CONTROL(n))]
    if choosing := [row for row, _ in main if row.benchmark == results.CHOOSE]:
        if base == BASE:
            best = tuned(rows)
            judged = [] if best is None else [best]
        if len(choosing) < len(main):  # the chosen encoder's figures there are too good
            main = [(row, path) for row, path in main if row.benchmark != results.CHOOSE]
    pairs = [(name, base) for name in judged if name != base]
    pairs += [(name, TWIN + name) for name in judged if TWIN + name in names]
    return _pair_rows(main, pairs)


def is_of_run(name: str) -> bool:
    """Returns True for the names of a run's stages and of the encoders joined from them. Others are
    those of controls, of widths such as 'stage_1:64', and of models from elsewhere."""
    return name in JOINED or re.fullmatch(r"stage_\d+", name) is not None


def tuned(rows: Sequence[Row]) -> str | None:
    """Returns the trained encoder that represents a run, such as 'stage_2': the one with the
    highest mean (``means``).

    If a concat has the highest mean but is not better beyond chance than a single model whose mean
    is above that of the base, this is taken, since every client can load it. None if no trained
    encoder was measured.
    """
    by_mean = means(rows)
    order = sorted((name for name in by_mean if name != BASE), key=lambda name: -by_mean[name])
    if not order or "concat_" not in order[0]:
        return next(iter(order), None)
    best, read, deciding = order[0], Reader(), _deciding(rows)
    above = [name for name in order if by_mean[name] > by_mean.get(BASE, -math.inf)]
    for single in (name for name in above if "concat_" not in name):
        pairs = _pair_rows(deciding, [(best, single)])
        if all(c.verdict != "better" for c in _compare_pairs(read, pairs).values()):
            return single
    return best


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Returns for each encoder that the run made the mean of the main metrics of the share
    ``choose``, or of all benchmarks without it; losses count with the opposite sign.

    Only metrics in which all these encoders were measured count, and of those only metrics in
    percent; if none is in percent, those in the unit of the first. Without any, means are NaN.
    """
    values: dict[str, dict[tuple[str, str, Unit], float]] = {}
    for row, _ in _deciding(rows):
        if is_of_run(row.model):
            of_model = values.setdefault(row.model, {})
            of_model[row.benchmark, row.metric, row.unit] = row.unit.sign * row.value
    if not values:
        return {}
    first = next(iter(values.values()))
    shared = [metric for metric in first if all(metric in of for of in values.values())]
    units = [unit for _, _, unit in shared]
    unit = PERCENT if PERCENT in units else next(iter(units), PERCENT)
    counted = [metric for metric in shared if metric[-1] == unit]
    return {
        name: mean(of_model[metric] for metric in counted) if counted else math.nan
        for name, of_model in values.items()
    }


def _deciding(rows: Sequence[Row]) -> list[Row]:
    main = _main(rows)
    return [(row, path) for row, path in main if row.benchmark == results.CHOOSE] or main


def _main(rows: Sequence[Row]) -> list[Row]:
    return [(row, path) for row, path in rows if row.protocol.get("level") == "headline"]


def _base(names: Sequence[str]) -> str:
    return BASE if BASE in names else next(iter(names), BASE)


def _check_names(what: str, names: Sequence[str], there: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"no {what} {unknown[0]!r} in the results: there are {', '.join(there)}")


def read_runs(runs: Sequence[Path]) -> list[Row]:
    """Reads the rows of all runs; with several runs a model's name begins with its run.

    Raises FileNotFoundError for a run without results, and ValueError for a file.
    """
    rows: list[Row] = []
    last = [Path(run_dir).resolve().name for run_dir in runs]
    for run_dir, name in zip(runs, last, strict=True):
        if Path(run_dir).is_file():
            raise ValueError(f"{run_dir} is a file: give the folder of a run")
        run = Run(run_dir)
        if not run.result_rows:
            raise FileNotFoundError(f"no results in {run.layout.results}: run 'mclclip eval' first")
        # The name of a run is its last folder, or its whole path if another run has that folder.
        prefix = f"{name if last.count(name) == 1 else run_dir}:" if len(runs) > 1 else ""
        rows += [(replace(row, model=prefix + row.model), path) for row, path in rows_of(run)]
    return rows


def rows_of(run: Run) -> list[Row]:
    """Returns the rows of a run, each with the file of its items, which its protocol names."""
    folder = run.directory / outcomes.FOLDER
    files = (Path(str(row.protocol.get("outcomes"))).name for row in run.result_rows)
    return [(row, folder / name) for row, name in zip(run.result_rows, files, strict=True)]


class Reader:
    """Reads the outcomes of items; each file is read once."""

    def __init__(self) -> None:
        self._read = cache(outcomes.read)

    def __call__(self, row: Result, path: Path) -> Outcomes:
        """Returns the outcomes of a row from its file ``path``.

        Raises FileNotFoundError or ValueError if they are missing or damaged.
        """
        if row.metric not in (by_metric := self._read(path)):
            raise ValueError(f"{path} has no outcomes of {row.metric}: evaluate again with --force")
        return by_metric[row.metric]

    def beside(self, row: Result, path: Path) -> Outcomes:
        """Returns the outcomes of a row; for a pooled figure those of the mean over its parts, if
        the file has them."""
        average = self._read(path).get("average") if row.metric == "pooled" else None
        return average or self(row, path)


def _compare_rows(read: Reader, a: Row, b: Row) -> Comparison:
    """Compares two rows, without a correction of the p-value."""
    (row, _), (against, _) = a, b
    check_alike(row, against)
    if row.unit != against.unit:
        raise ValueError(
            f"{row.benchmark}, {row.metric}: {row.model} is measured in {row.unit.name} and "
            f"{against.model} in {against.unit.name}: evaluate again with 'mclclip eval --force'"
        )
    try:
        difference = outcomes.difference(read(*a), read(*b))
    except outcomes.NotTheSame as error:
        raise ValueError(
            f"{row.model} and {against.model} were not measured on the same items of "
            f"{row.benchmark}: {error}; evaluate both on the same data"
        ) from None
    return Comparison(row, against, difference, difference.p_value)


def check_alike(row: Result, against: Result) -> None:
    """Raises ValueError if two rows record other options or other data of their benchmark.

    Precision and batch size may differ: they are how an encoder computes, not what it is asked.
    """
    both = f"{row.benchmark}: {row.model} and {against.model} were measured with"
    first, second = (some.protocol.get("settings") for some in (row, against))
    if isinstance(first, dict) and isinstance(second, dict):
        for option in {**first, **second}:
            values = [some.get(option, "its default") for some in (first, second)]
            if values[0] != values[1]:
                raise ValueError(
                    f"{both} {option} {' and '.join(map(brief, values))}: evaluate both alike"
                )
    first, second = (some.protocol.get("data") for some in (row, against))
    if first is not None and second is not None and first != second:
        raise ValueError(f"{both} data that differ: evaluate both again on the same data")
