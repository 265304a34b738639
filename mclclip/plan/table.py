"""A plan as text: short lines, aligned, with units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mclclip.objectives.class_centers.cost import (
    MEMORY_BYTES_PER_S,
    NETWORK_BYTES_PER_S,
    PRODUCTS_PER_S,
)
from mclclip.plan import groups
from mclclip.plan.machine import GIB
from mclclip.plan.memory import PARTS


def text(plan: dict[str, Any]) -> str:
    """The whole plan, several lines."""
    blocks = [_heading(plan), _steps(plan)]
    if any(training["coverage"] for training in plan["trainings"]):
        blocks.append(_coverage(plan))
    blocks += [_batches(plan), _parameters(plan), _memory(plan)]
    heads = [kind["objective"] for kind in plan["memory"].values() if kind["objective"]]
    blocks += [_class_centers(head) for head in heads]
    return "\n\n".join("\n".join(block) for block in (*blocks, _disk(plan)))


def _heading(plan: dict[str, Any]) -> Iterator[str]:
    machine = f"{plan['nodes']} node(s) x {plan['gpus_per_node']} GPU(s)"
    yield f"plan of {plan['run_dir']} on {machine} = {plan['ranks']} rank(s)"
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
    rows = [["training", "groups", "steps", "per epoch", "samples seen", ""]]
    for training in plan["trainings"]:
        values = [training[key] for key in ("groups", "steps", "steps_per_epoch", "samples_seen")]
        found = "exact" if training["exact"] else ""
        rows.append([_name(training), *map(_range, values), found])
    if all(training["steps"] for training in plan["trainings"]):
        steps, seen = (
            tuple(sum(t[key][end] for t in plan["trainings"]) for end in (0, 1))
            for key in ("steps", "samples_seen")
        )
        rows.append(["in all", "", _range(steps), "", _range(seen), ""])
    yield from _aligned(rows)


def _coverage(plan: dict[str, Any]) -> Iterator[str]:
    """What an epoch of each stage makes of its groups; random groups have the same sizes."""
    rows = [["an epoch", "steps", "full label", "mixed", "negatives", "left out", "", "repeated"]]
    found = [t for t in plan["trainings"] if t["variant"] == "mcl"]
    for training in found:
        for epoch in training["coverage"]:
            rows.append(
                [
                    f"{_name(training)}, {epoch['sizes']} groups",
                    f"{epoch['steps']:,}",
                    _percent(epoch["full_label_share"]),
                    _percent(epoch["mixed_steps"] / max(epoch["steps"], 1)),
                    f"{epoch['negatives']:,.0f}",
                    f"{epoch['left_out']:,}",
                    _percent(epoch["left_out_share"]),
                    f"{epoch['repeated']:,}",
                ]
            )
    yield from _aligned(rows)
    if any(epoch["sizes"] in groups.ASSUMED for t in found for epoch in t["coverage"]):
        yield from groups.NOTE


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _batches(plan: dict[str, Any]) -> Iterator[str]:
    kinds = plan["memory"]
    rows = [["batches", *kinds]]
    for key, label in (("global_batch", "global"), ("local_batch", "per rank")):
        rows.append([label, *(f"{kind[key]:,}" for kind in kinds.values())])
    each = [f"{kind['micro_batches']} x {kind['micro_batch']:,}" for kind in kinds.values()]
    rows.append(["micro-batches", *each])
    caching = ["on" if kind["micro_batches"] > 1 else "off" for kind in kinds.values()]
    rows.append(["gradient caching", *caching])
    rows.append(["engine", *(kind["engine"] for kind in kinds.values())])
    yield from _aligned(rows)


def _parameters(plan: dict[str, Any]) -> Iterator[str]:
    kinds = plan["memory"]
    rows = [["parameters", *(f"{name} {what}" for name in kinds for what in ("trains", "freezes"))]]
    towers = list(next(iter(kinds.values()))["counts"])
    for tower in towers:
        counts = [kind["counts"][tower] for kind in kinds.values()]
        rows.append([tower, *(f"{n:,}" for count in counts for n in count.values())])
    sums = [
        sum(kind["counts"][tower][what] for tower in towers)
        for kind in kinds.values()
        for what in ("trainable", "frozen")
    ]
    rows.append(["in all", *(f"{n:,}" for n in sums)])
    yield from _aligned(rows)


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    kinds = plan["memory"]
    rows = [["GiB per rank (estimate)", *kinds]]
    for part, label in PARTS.items():
        rows.append([label, *(_gib(kind["parts"][part]) for kind in kinds.values())])
    rows.append(["sum", *(_gib(kind["sum"]) for kind in kinds.values())])
    if plan["limit"] is not None:
        rows.append(["of a GPU's", *(_gib(plan["limit"]) for _ in kinds)])
    rows.append(["main memory: batches", *(_gib(kind["host"]) for kind in kinds.values())])
    yield from _aligned(rows)
    yield from (f"note: {note}" for kind in kinds.values() for note in kind["notes"])


def _class_centers(head: dict[str, Any]) -> Iterator[str]:
    rows = [["class centers", "in all", "per rank"]]
    rows.append(["classes", f"{head['num_classes']:,}", f"{head['rows']:,}"])
    rows.append(["negatives of a step", "", f"{head['negatives']:,}"])
    distinct = f"{head['distinct_positives']:,} different"
    rows.append(["positives of a step", distinct, f"{head['positives']:,}"])
    for part, size in head["parts"].items():
        rows.append([f"MB of {part}", "", f"{size / 1e6:,.1f}"])
    for name, size in head["collectives"].items():
        rows.append([f"MB, {name}", f"{size / 1e6:,.2f}", ""])
    rows.append(["GFLOP of products", "", f"{head['operations'] / 1e9:,.1f}"])
    for name, seconds in head["seconds"].items():
        rows.append([f"ms of {name}, expected", "", f"{1e3 * seconds:,.1f}"])
    rows.append(["ms of a step, expected", "", f"{1e3 * sum(head['seconds'].values()):,.1f}"])
    yield from _aligned(rows)
    yield (
        f"note: at {PRODUCTS_PER_S / 1e12:g} TFLOP/s (fp32), {MEMORY_BYTES_PER_S / 1e12:g} TB/s "
        f"and {NETWORK_BYTES_PER_S / 1e9:g} GB/s per GPU, nothing overlapped"
    )


def _disk(plan: dict[str, Any]) -> Iterator[str]:
    disk = plan["disk"]
    rows = [["GiB on disk", "each", "kept", "in all"]]
    for training in disk["trainings"]:
        label = f"checkpoints, {_name(training)}"
        sizes = (_gib(training["each"]), f"{training['number']:,}", _gib(training["kept"]))
        rows.append([label, *sizes])
    for key in ("checkpoints", "exports", "embeddings", "clusters", "sum", "present", "free"):
        label = "checkpoints, one more at a time" if key == "checkpoints" else key
        rows.append([label, "", "", "unknown" if disk[key] is None else _gib(disk[key])])
    yield from _aligned(rows)


def _name(training: dict[str, Any]) -> str:
    variant = "" if training["variant"] == "mcl" else f", {training['variant']}"
    return f"stage {training['stage']}{variant}"


def _range(value: Sequence[int] | None) -> str:
    if value is None:
        return "unknown"
    low, high = value
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.2f}"


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
