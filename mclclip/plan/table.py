"""Prints a plan as short, aligned tables, whose columns have the names of the plan's fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from mclclip.plan import steps
from mclclip.plan.machine import GIB, PEAK_OF
from mclclip.run.runlog import count_of

_TRAINING = ("groups", "steps", "steps_per_epoch", "samples_seen", "exact")
_EPOCH = ("sizes", "steps", "full_label_share", "mixed_steps", "negatives", "remainder", "repeated")
_COUNTS = ("global_batch", "local_batch", "micro_batch", "trained_weights", "frozen_weights")
_GROUP = ("lr", "weight_decay", "tensors", "weights")
_PASS = ("samples", "gflop_each", "samples_per_s", "hours", "rank_hours", "given")

Row = Mapping[str, Any]


def text(plan: dict[str, Any]) -> str:
    """Returns the text of a plan; ``plan`` is what ``verbs.plan.compute`` returned."""
    trainings, memory, hours = plan["trainings"], plan["memory"], plan["hours"]
    epochs = [of | {"name": each["name"]} for each in trainings for of in each["coverage"]]
    assumed = any(of["sizes"] in steps.ASSUMED for of in epochs)
    parts = {name: kind["parts"] for name, kind in memory.items()}
    parts = {name: of | {"sum": sum(of.values())} for name, of in parts.items()}
    # A pass has [fewest, most] samples; the table shows the most.
    passes = [of | {"gflop_each": of["sample"] / 1e9} for of in hours["passes"]]
    passes = [of | {"samples": of["samples"] and of["samples"][1]} for of in passes]
    in_all = {"name": "in all", "hours": hours["hours"], "rank_hours": hours["rank_hours"]}
    disk = dict(plan["disk"])
    on_disk = [of | {"number": str(of["number"])} for of in disk.pop("trainings")]
    names = {"checkpoints": "checkpoints, at most"}
    on_disk += [{"name": names.get(name, name), "kept": size} for name, size in disk.items()]
    blocks = [
        [_verdict(plan)],
        _heading(plan),
        _table("training", _TRAINING, trainings),
        [*_table("an epoch", _EPOCH, epochs), *(steps.NOTE if assumed else ())] if epochs else [],
        _columns("training", _COUNTS, memory),
        *(_table(f"parameters, {name}", _GROUP, of["groups"]) for name, of in memory.items()),
        _columns("GiB per rank (estimate)", [*next(iter(parts.values()))], parts, GIB),
        [*_table("hours (estimate)", _PASS, [*passes, in_all]), *_assumptions(plan)],
        _table("GiB on disk", ("each", "number", "kept"), on_disk, GIB),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _verdict(plan: Row) -> str:
    """Says in one line how many hours, how much memory of a GPU and how much disk the run needs,
    and whether they fit."""
    hours, disk, limit = plan["hours"]["range"], plan["disk"], plan["memory_gib"]
    most = max(kind["sum"] for kind in plan["memory"].values()) / GIB
    unit = "process" if plan["on_cpu"] else "GPU"
    lacking = ["memory"] if limit is not None and most > limit else []
    if not plan["elsewhere"] and disk["sum"] - disk["present"] > disk["free"]:
        lacking.append("disk")
    is_known = None not in disk.values()
    verdict = "fits" if is_known else "what is known fits"
    verdict = f"does not fit ({', '.join(lacking)})" if lacking else verdict
    if limit is None and not lacking:
        verdict += f" where a {unit} has as much memory"
    ends = dict.fromkeys(f"{float(f'{end:.2g}'):,g}" for end in hours or ())
    room = f"{'' if is_known else 'at least '}{disk['sum'] / GIB:,.1f}"
    time = f"{' to '.join(ends)} h" if ends else "hours unknown"
    memory = f"{most:,.1f}{'' if limit is None else f' of {limit:,.0f}'} GiB of a {unit}"
    return f"{time}, {memory}, {room} GiB of disk: {verdict}"


def _heading(plan: Row) -> Iterator[str]:
    """Yields lines about the machine and the samples."""
    each = count_of(plan["gpus_per_node"], "CPU rank" if plan["on_cpu"] else "GPU")
    machine = f"{count_of(plan['nodes'], 'node')} x {each}"
    yield f"plan of {plan['run_dir']} on {machine} = {count_of(plan['ranks'], 'rank')}"
    samples = plan["samples"]
    if samples["number"] is None:
        yield "samples: unknown (no index yet); give --samples N for steps and embeddings"
    elif samples["exact"]:
        outside = samples["number"] - samples["usable"]
        without = samples["without_caption"]
        bare = f", {without:,} more have no caption" if without else ""
        yield f"samples: {samples['number']:,} in the index, {outside:,} of them undecodable{bare}"
    else:
        yield f"samples: {samples['number']:,} as given (no index yet), one caption each"


def _assumptions(plan: Row) -> Iterator[str]:
    """Yields notes about the rates by which hours were estimated."""
    passes, speed = plan["hours"]["passes"], plan["hours"]["speed"]
    if "peak_tflops" not in speed:
        yield "note: give rates that were measured on this CPU (--samples-per-s, --images-per-s)"
    elif not all(of["given"] for of in passes):
        peaks = dict.fromkeys(of["precision"] for of in passes)
        rates = ", ".join(f"{speed['peak_tflops'] * PEAK_OF[p]:,.4g} in {p}" for p in peaks)
        yield f"note: estimates are at {100 * speed['share']:.3g} % of a GPU's TFLOP/s, {rates}"
        yield "(--share, --peak-tflops; measured rates: --samples-per-s, --images-per-s), without"
        yield "evaluation, k-means, and waiting for data"


def _table(title: str, keys: Sequence[str], rows: Sequence[Row], unit: int = 1) -> list[str]:
    """Returns the lines of a table: a header with ``title`` and the keys, and a line per row."""
    cells = [[row["name"], *(_cell(key, row.get(key, ""), unit) for key in keys)] for row in rows]
    cells.insert(0, [title, *(key.replace("_", " ") for key in keys)])
    align = ["left"] + ["right"] * len(keys)
    lines = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True).splitlines()
    return [line.rstrip() for line in lines]


def _columns(title: str, keys: Sequence[str], of: Mapping[str, Row], unit: int = 1) -> list[str]:
    """Returns the lines of a table with a line for each key, and a column for each training."""
    rows = [
        {"name": key.replace("_", " "), **{n: row[key] for n, row in of.items()}} for key in keys
    ]
    return _table(title, [*of], rows, unit)


def _cell(key: str, value: Any, unit: int = 1) -> str:
    """Formats a value: a number divided by ``unit`` or with three significant digits, or [fewest,
    most] as "2 to 3"."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list | tuple):
        return " to ".join(dict.fromkeys(_cell(key, end, unit) for end in value))
    if isinstance(value, str):
        return value
    if unit > 1:
        return f"{value / unit:,.2f}"
    if key in ("lr", "weight_decay"):
        return f"{value:.3g}"
    if key.endswith("share"):
        return f"{100 * value:.1f} %"
    digits = 0 if isinstance(value, int) or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits if value >= 1 else 3 * isinstance(value, float)}f}"
