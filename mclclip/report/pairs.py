"""Minimal pairs that one encoder gets right and another does not, with their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from mclclip import compare
from mclclip.eval.items import Item, path_of
from mclclip.eval.minimal_pairs import read_pairs
from mclclip.eval.outcomes import Outcomes
from mclclip.opened_run import Run
from mclclip.report import charts
from mclclip.report.scores import MINIMAL_PAIRS
from mclclip.report.thumbnails import Thumbnails, shortened

EXAMPLES = 4
"""Pairs shown of those won, and as many of those lost."""

_METRIC = "average"  # its outcomes hold the Type of every pair
_BEST = ("concat_stage_norm", "concat_raw", "concat_weighted")


def exchanges(run: Run, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """The pairs won and lost against stage 0 and against the ungrouped control, by benchmark.

    benchmark, model, against  what was measured, and the two encoders
    types      (Type, pairs won, pairs lost, pairs, the two as bars)
    won, lost  examples; ``missing`` says why there are none where pairs were won or lost

    Raises FileNotFoundError and ValueError where outcomes are missing or damaged.
    """
    exchanged, read = [], compare.Reader()
    rows = [
        (row, path)
        for row, path in compare.rows_of(run)
        if row.metric == _METRIC and row.protocol.get("name") == MINIMAL_PAIRS
    ]
    for benchmark in dict.fromkeys(row.benchmark for row, _ in rows):
        own = {row.model: (row, path) for row, path in rows if row.benchmark == benchmark}
        model = best_of([*own])
        if model is None:
            continue
        pairs, missing = _pictured(run, benchmark)
        for against in ("stage_0", f"control_ungrouped_{model}"):
            if against in own:
                outcomes = read(*own[model]), read(*own[against])
                if outcomes[0].items != outcomes[1].items:
                    raise ValueError(
                        f"{model} and {against} were not measured on the same pairs of {benchmark}"
                    )
                names = {"benchmark": benchmark, "model": model, "against": against}
                exchanged.append(
                    names | {"missing": missing} | _exchanged(*outcomes, pairs, thumbnails)
                )
    return exchanged


def best_of(models: Sequence[str]) -> str | None:
    """The encoder that stands for the run: its concat, or its last stage; None without stages."""
    for name in _BEST:
        if name in models:
            return name
    stages = sorted(
        (name for name in models if name.startswith("stage_")),
        key=lambda name: int(number) if (number := name[len("stage_") :]).isdecimal() else -1,
    )
    return stages[-1] if stages and stages[-1] != "stage_0" else None


def _pictured(run: Run, benchmark: str) -> tuple[dict[str, Item], str]:
    """The pairs of a benchmark by name, or the reason why their pictures cannot be shown."""
    known = None if run.config is None else run.config.eval.suite.get(benchmark)
    if known is None:
        return {}, "The configuration does not say where the pictures of this benchmark lie."
    try:
        pairs = read_pairs(Path(known.path))
    except (OSError, ValueError) as error:
        return {}, f"Their pictures are not there any more: {error}."
    return {pair.name: pair for pair in pairs}, ""


def _exchanged(
    own: Outcomes, other: Outcomes, pairs: Mapping[str, Item], thumbnails: Thumbnails
) -> dict[str, Any]:
    """The ``types`` of the pairs with what was won and lost of them, and examples of both."""
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
    examples = {}
    for name, rows in (("won", won), ("lost", lost)):
        items = [own.items[n] for n in one_of_each(rows, kinds) if own.items[n] in pairs]
        examples[name] = [_example(pairs[item], thumbnails) for item in items[:EXAMPLES]]
    return {"types": types, **examples}


def one_of_each(rows: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """The rows in another order: first one of each kind, then a second of each, and so on."""
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(kinds[row], []).append(row)
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return [row for row in turns if row is not None]


def _example(pair: Item, thumbnails: Thumbnails) -> dict[str, Any]:
    """A pair with its pictures, each with its statement."""
    pictures = [
        (thumbnails.of_file(path_of(image), statement), shortened(statement))
        for image, statement in zip(pair.images, pair.texts, strict=True)
    ]
    return {"type": pair.kind, "name": pair.name, "pictures": pictures}
