"""A plan as text: short lines, aligned, with units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tabulate import tabulate

from mclclip.plan import steps
from mclclip.plan.machine import GIB, PEAK_OF
from mclclip.plan.memory import PARTS
from mclclip.run.runlog import count_of


def text(plan: dict[str, Any]) -> str:
    """The whole plan, several lines."""
    blocks = [_summary(plan), _heading(plan), _steps(plan)]
    if any(training["coverage"] for training in plan["trainings"]):
        blocks.append(_coverage(plan))
    blocks += [_batches(plan), _parameters(plan), _memory(plan)]
    blocks += [_hours(plan), _disk(plan)]
    return "\n\n".join("\n".join(block) for block in blocks)


def _summary(plan: dict[str, Any]) -> Iterator[str]:
    """Hours, memory of a GPU and disk in one line, and whether they fit; and what decoding wants
    where it is the limit."""
    hours, disk, limit = plan["hours"]["range"], plan["disk"], plan["limit"]
    most, where = max(kind["sum"] for kind in plan["memory"].values()), "a GPU"
    if plan["on_cpu"]:
        where = "a process"
    memory = "" if limit is None else f" of {limit / GIB:,.0f}"
    lacking = ["memory"] if limit is not None and most > limit else []
    if not disk["elsewhere"] and disk["sum"] - disk["present"] > disk["free"]:
        lacking.append("disk")
    verdict = f"does not fit ({', '.join(lacking)})" if lacking else "fits"
    if limit is None and not lacking:
        verdict += f" where {where} has as much memory"
    fewest, longest = (f"{float(f'{end:.2g}'):,g}" for end in hours or (0, 0))
    time = f"{fewest} h" if fewest == longest else f"{fewest} to {longest} h"
    time = "hours unknown" if hours is None else time
    size = f"{disk['sum'] / GIB:,.1f} GiB of disk"
    yield f"{time}, {most / GIB:,.1f}{memory} GiB of {where}, {size}: {verdict}"
    cores, there = plan["decoding"].values()
    if not plan["on_cpu"] and cores is not None and cores > there:
        yield (
            f"decoding is the limit: {count_of(plan['ranks'], 'GPU')} that never wait want "
            f"{count_of(cores, 'core')}, and have {there:,}, {there // plan['ranks']} each"
            f"{' as is assumed' if disk['elsewhere'] else ''}"
        )


def _heading(plan: dict[str, Any]) -> Iterator[str]:
    many = "es" if plan["gpus_per_node"] > 1 else ""
    each = f"{plan['gpus_per_node']} CPU process{many}"
    if not plan["on_cpu"]:
        each = count_of(plan["gpus_per_node"], "GPU")
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


def _steps(plan: dict[str, Any]) -> Iterator[str]:
    trainings, keys = plan["trainings"], ("groups", "steps", "steps_per_epoch", "samples_seen")
    rows = [["training", "groups", "steps", "per epoch", "samples seen", ""]]
    for of in trainings:
        cells = [_range(of[key]) for key in keys]
        rows.append([_name(of), *cells, "exact" if of["exact"] else ""])
    if all(of["steps"] for of in trainings):
        total, seen = (
            [sum(of[key][end] for of in trainings) for end in (0, 1)]
            for key in ("steps", "samples_seen")
        )
        rows.append(["in all", "", _range(total), "", _range(seen), ""])
    yield from _aligned(rows)


def _coverage(plan: dict[str, Any]) -> Iterator[str]:
    """Rows on the groups of an epoch, by stage; random groups have the same sizes."""
    rows = [["an epoch", "steps", "full label", "mixed", "negatives", "left out", "", "repeated"]]
    trainings = [of for of in plan["trainings"] if of["variant"] == "mcl"]
    epochs = [(_name(of), epoch) for of in trainings for epoch in of["coverage"]]
    for name, epoch in epochs:
        label, mixed = epoch["full_label_share"], epoch["mixed_steps"] / max(epoch["steps"], 1)
        row = [f"{name}, {epoch['sizes']} groups", f"{epoch['steps']:,}", _percent(label)]
        row += [_percent(mixed), f"{epoch['negatives']:,.0f}", f"{epoch['left_out']:,}"]
        rows.append([*row, _percent(epoch["left_out_share"]), f"{epoch['repeated']:,}"])
    yield from _aligned(rows)
    if any(epoch["sizes"] in steps.ASSUMED for _, epoch in epochs):
        yield from steps.NOTE


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _batches(plan: dict[str, Any]) -> Iterator[str]:
    rows = [["batches", "global", "per rank", "micro-batches", "gradient caching", "engine"]]
    for name, kind in plan["memory"].items():
        micro = f"{kind['micro_batches']} x {kind['micro_batch']:,}"
        sizes = [f"{kind['global_batch']:,}", f"{kind['local_batch']:,}", micro]
        caching = "on" if kind["micro_batches"] > 1 else "off"
        rows.append([name, *sizes, caching, kind["engine"]])
    yield from _aligned(list(map(list, zip(*rows, strict=True))))


def _parameters(plan: dict[str, Any]) -> Iterator[str]:
    kinds = plan["memory"]
    counts = [kind["counts"] for kind in kinds.values()]
    table = {tower: [n for count in counts for n in count[tower].values()] for tower in counts[0]}
    table["in all"] = [sum(column) for column in zip(*table.values(), strict=True)]
    rows = [["parameters", *(f"{name} {what}" for name in kinds for what in ("trains", "freezes"))]]
    yield from _aligned(rows + [[tower, *(f"{n:,}" for n in row)] for tower, row in table.items()])


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    kinds = plan["memory"].values()
    held = [part for part in PARTS if part != "context" or not plan["on_cpu"]]
    sizes = {PARTS[part]: [kind["parts"][part] for kind in kinds] for part in held}
    sizes["sum"] = [kind["sum"] for kind in kinds]
    if plan["limit"] is not None:
        sizes["of a GPU's"] = [plan["limit"] for _ in kinds]
    sizes["main memory: batches"] = [kind["host"] for kind in kinds]
    rows = [["GiB per rank (estimate)", *plan["memory"]]]
    yield from _aligned(rows + [[label, *map(_gib, row)] for label, row in sizes.items()])
    yield from (f"note: {note}" for kind in kinds for note in kind["notes"])


def _hours(plan: dict[str, Any]) -> Iterator[str]:
    found = plan["hours"]
    unit = "process" if plan["on_cpu"] else "GPU"
    rows = [["hours", "samples", "GFLOP each", f"per s and {unit}", "hours", f"{unit}-hours", ""]]
    for of in found["passes"]:
        name = _name(of) if of["name"] == "training" else f"stage {of['stage']}, embed {of['name']}"
        most = of["samples"] and of["samples"][1:] * 2  # the fewest are among the steps
        cells = [_range(most), _figure(of["sample"] / 1e9), _figure(of["samples_per_s"])]
        cells += [_range(of[key]) for key in ("hours", "gpu_hours")]
        how = "as given" if of["given"] else "estimate" if of["samples_per_s"] else ""
        rows.append([name, *cells, how])
    sums = [_range(found[key]) for key in ("hours", "gpu_hours")]
    rows.append(["in all", "", "", "", *sums, ""])
    yield from _aligned(rows)
    if all(of["given"] for of in found["passes"]):
        return
    if "peak_tflops" not in found["speed"]:
        yield "note: how fast a CPU is depends on too much to assume: give rates measured on it,"
        yield "--samples-per-s of a training and --images-per-s of embedding"
        return
    speed = found["speed"]
    peaks = {of["precision"]: PEAK_OF[of["precision"]] for of in found["passes"]}
    of_peaks = ", ".join(
        f"{speed['peak_tflops'] * of:,.4g} in {name}" for name, of in peaks.items()
    )
    yield f"note: estimates are at {100 * speed['share']:.3g} % of a GPU's TFLOP/s, {of_peaks}"
    yield "(--share, --peak-tflops), without evaluation, k-means, and waiting for data; measured"
    yield "rates of a GPU replace them: --samples-per-s of a training, --images-per-s of embedding"


def _disk(plan: dict[str, Any]) -> Iterator[str]:
    disk = plan["disk"]
    rows = [["GiB on disk", "each", "kept", "in all"]]
    for of in disk["trainings"]:
        number = f"{of['number']:,}"
        rows.append([f"checkpoints, {_name(of)}", _gib(of["each"]), number, _gib(of["kept"])])
    rows.append(["checkpoints, at most", "", "", _gib(disk["checkpoints"])])
    kinds = ("exports", "embeddings", "clusters", "copies", "copies, in relocate.folder",
             "image rows", "sum", "present",
             "free")  # fmt: skip
    for key in filter(disk.__contains__, kinds):
        rows.append([key, "", "", "unknown" if disk[key] is None else _gib(disk[key])])
    yield from _aligned(rows)


def _name(training: dict[str, Any]) -> str:
    variant = "" if training["variant"] == "mcl" else f", {training['variant']}"
    return f"stage {training['stage']}{variant}"


def _range(value: Sequence[float] | None) -> str:
    if value is None:
        return "unknown"
    low, high = (f"{end:,}" if isinstance(end, int) else _figure(end) for end in value)
    return low if low == high else f"{low} to {high}"


def _figure(value: float | None) -> str:
    """Three digits that count, and all before the point."""
    if value is None:
        return "unknown"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.2f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right, two spaces apart."""
    columns = ["left"] + ["right"] * (len(rows[0]) - 1)
    text = tabulate(rows, tablefmt="plain", colalign=columns, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]
