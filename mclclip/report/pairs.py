"""Minimal pairs that one encoder gets right and another does not, with their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from markupsafe import Markup

from mclclip.eval import outcomes
from mclclip.eval.items import Item, path_of
from mclclip.eval.minimal_pairs import read_pairs
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Result
from mclclip.report import charts
from mclclip.report.material import Material
from mclclip.report.scores import MINIMAL_PAIRS
from mclclip.report.thumbnails import Picture, Thumbnails, shortened

EXAMPLES = 4
"""Pairs shown of those won, and as many of those lost."""

_METRIC = "average"  # its outcomes hold the Type of every pair
_BEST = ("concat_stage_norm", "concat_raw", "concat_weighted")


@dataclass(frozen=True)
class Shown:
    """A pair with its pictures and statements."""

    type: str
    name: str
    statements: Sequence[str]
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Exchange:
    """Pairs of a benchmark that ``model`` won and lost against another encoder.

    types    (Type, pairs won, pairs lost, pairs, the two as bars)
    won      examples; ``missing`` says why there are none where pairs were won or lost
    """

    benchmark: str
    model: str
    against: str
    types: Sequence[tuple[str, int, int, int, Markup]]
    won: Sequence[Shown]
    lost: Sequence[Shown]
    missing: str = ""


def exchanges(material: Material, thumbnails: Thumbnails) -> list[Exchange]:
    """The pairs won and lost against stage 0 and against the ungrouped control, by benchmark.

    Raises FileNotFoundError and ValueError where outcomes are missing or damaged.
    """
    found = []
    rows = [
        row
        for row in material.rows
        if row.metric == _METRIC and row.protocol.get("name") == MINIMAL_PAIRS
    ]
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        own = {row.model: row for row in rows if row.benchmark == benchmark}
        model = best_of(own)
        if model is None:
            continue
        pairs, missing = _read(material, benchmark)
        right = _outcomes(material, own[model])
        for against in ("stage_0", f"control_ungrouped_{model}"):
            if against in own:
                other = _outcomes(material, own[against])
                found.append(
                    _exchange(
                        benchmark, (model, right), (against, other), pairs, thumbnails, missing
                    )
                )
    return found


def best_of(models: Mapping[str, Result] | Sequence[str]) -> str | None:
    """The encoder that stands for the run: its concat, or its last stage; None without stages."""
    for name in _BEST:
        if name in models:
            return name
    stages = sorted((name for name in models if name.startswith("stage_")), key=_number)
    return stages[-1] if stages and stages[-1] != "stage_0" else None


def _number(stage: str) -> int:
    number = stage.removeprefix("stage_")
    return int(number) if number.isdecimal() else -1


def _outcomes(material: Material, row: Result) -> Outcomes:
    name = row.protocol.get("outcomes")
    if not isinstance(name, str) or Path(name).name != name:
        raise FileNotFoundError(
            f"{row.model} on {row.benchmark} has no outcomes of items, it was evaluated by an "
            "older version: evaluate again with 'mclclip eval --force'"
        )
    return outcomes.read(material.run_dir / outcomes.FOLDER / name)[_METRIC]


def _read(material: Material, benchmark: str) -> tuple[dict[str, Item], str]:
    """The pairs of a benchmark by name, or the reason why their pictures cannot be shown."""
    known = None if material.config is None else material.config.eval.suite.get(benchmark)
    if known is None:
        return {}, "The configuration does not say where the pictures of this benchmark lie."
    try:
        return {pair.name: pair for pair in read_pairs(Path(known.path))}, ""
    except (OSError, ValueError) as error:
        return {}, f"Their pictures are not there any more: {error}."


def _exchange(
    benchmark: str,
    ours: tuple[str, Outcomes],
    theirs: tuple[str, Outcomes],
    pairs: Mapping[str, Item],
    thumbnails: Thumbnails,
    missing: str,
) -> Exchange:
    (model, own), (against, other) = ours, theirs
    if own.items != other.items:
        raise ValueError(
            f"{model} and {against} were not measured on the same pairs of {benchmark}"
        )
    gained = own.values - other.values
    kinds = list(own.strata or [""] * len(own))
    won, lost = ([n for n, value in enumerate(s * gained) if value > 0] for s in (1, -1))
    by_type = {
        kind: tuple(sum(kinds[n] == kind for n in rows) for rows in (won, lost))
        for kind in dict.fromkeys(kinds)
    }
    most = max(chain.from_iterable(by_type.values()), default=0)
    types = [
        (kind, up, down, kinds.count(kind), charts.balance(up, down, most))
        for kind, (up, down) in by_type.items()
    ]

    def examples(rows: Sequence[int]) -> list[Shown]:
        names = [own.items[n] for n in one_of_each(rows, kinds) if own.items[n] in pairs]
        return [_shown(pairs[name], thumbnails) for name in names[:EXAMPLES]]

    return Exchange(benchmark, model, against, types, examples(won), examples(lost), missing)


def one_of_each(rows: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """The rows in another order: first one of each kind, then a second of each, and so on."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(kinds[row], []).append(row)
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return [row for row in turns if row is not None]


def _shown(pair: Item, thumbnails: Thumbnails) -> Shown:
    pictures = [
        thumbnails.of_file(path_of(image), statement)
        for image, statement in zip(pair.images, pair.texts, strict=True)
    ]
    return Shown(pair.kind, pair.name, [shortened(text) for text in pair.texts], pictures)
