"""The public functions and classes: ``mclclip.finetune``, ``Run``, ``load_model``, ``Encoder``.

    run = mclclip.finetune("photos", captions="captions.csv", base="ViT-B-32-quickgelu@openai",
                           out="runs/mine")
    run.results                                # pandas.DataFrame
    run.encoder().encode_image(["a.jpg"])      # numpy, unit rows
    run.report()                               # path of a page to look at

The front door calls the verbs in their order and writes nothing but what they write, and the
settings that it chose.
"""

from __future__ import annotations

import html
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any

import torch

from mclclip import choices, compare, files, opened_run, pack, pipeline, process, report
from mclclip import config as configuration
from mclclip.choices import Situation
from mclclip.compare import Comparison
from mclclip.config import Config
from mclclip.data.findings import Findings
from mclclip.data.tables import Table, open_table
from mclclip.eval import results
from mclclip.models.encoder import Encoder, load_model
from mclclip.plan.machine import GIB, Machine
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.artifacts import Artifact, is_finished

__all__ = ["Encoder", "Run", "finetune", "load_model"]

log = logging.getLogger("mclclip")
HELD_OUT = 0.1
"""Share of the pictures that each of the two held-out shares has."""
SETTINGS = "settings.yaml"
_OF_TABLES = ("path_column", "caption_column", "delimiter", "allow_roots")


class Run(opened_run.Run):
    """A run directory: what ``finetune`` or ``mclclip run`` left there, opened by name.

        run = mclclip.Run.open("runs/mine")

    Beside what ``opened_run.Run`` has: ``encoder``, ``verdict`` and ``report``.
    """

    def encoder(self, name: str | None = None, device: str = "cpu") -> Encoder:
        """An encoder of the run by its name in ``results``; default is the best one on the share
        ``choose`` (``best``).

        Raises FileNotFoundError where it was not exported, and ValueError for an unknown name.
        """
        name = name or self.best()
        paths = self.exports()
        if name not in paths:
            raise ValueError(f"no encoder {name!r} in {self.directory}: it has {', '.join(paths)}")
        return load_model(paths[name], device=device)

    def best(self) -> str:
        """The encoder with the highest mean of the share ``choose``'s main metrics, of controls
        too; where there is no such share, of all benchmarks' main metrics."""
        if (best := results.best(self.result_rows)) is None:
            raise FileNotFoundError(
                f"no results in {self.layout.results}: run 'mclclip eval' first"
            )
        return best

    def verdict(self) -> list[str]:
        """Three sentences on the share ``report``: what got better than the base, what got worse,
        and whether that is beyond chance and beyond the ungrouped control."""
        best = self.best()
        if best == "stage_0":
            return [
                "Better: nothing; on the share choose no encoder is better than the base.",
                "Worse: nothing, since the base is kept.",
                "Beyond chance: there is no gain to judge. More pictures, captions that say more, "
                "or another base may help.",
            ]
        against, twin = {"the base": "stage_0"}, f"control_ungrouped_{best}"
        rows = [row for row in compare.rows_of(self) if row[0].benchmark == results.REPORT]
        if not best.startswith("control_") and twin in self.exports():
            against["the same training without groups"] = twin
        compared = {name: compare.compare(rows, [best], other) for name, other in against.items()}
        better = [_gain(c) for c in compared["the base"] if c.gain > 0]
        worse = [_gain(c) for c in compared["the base"] if c.gain < 0]
        sure = [f"against {name} {_judged(judged)}" for name, judged in compared.items()]
        of = f"({best} against the base, on the share report)"
        return [
            f"Better: {', '.join(better) or 'nothing'} {of}.",
            f"Worse: {', '.join(worse) or 'nothing that was measured'}.",
            f"Beyond chance: {'; '.join(sure)}. One training says nothing of other seeds.",
        ]

    def report(self) -> Page:
        """Writes ``report.html``, one page of all that the run left; returns its path, which a
        notebook shows as the page."""
        return Page(report.run(str(self.directory)))


class Page(PosixPath):
    """The path of a page of HTML; as the result of a notebook's cell it is shown as the page."""

    def _repr_html_(self) -> str:
        page = html.escape(self.read_text())
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 80vh"></iframe>'


# --- fine-tuning ---------------------------------------------------------------------------------


def finetune(
    images: str | Path,
    *,
    captions: str | Path | None = None,
    base: str,
    out: str | Path,
    options: Mapping[str, Any] | Sequence[str] = (),
    held_out: float = HELD_OUT,
    seed: int = 0,
    force: bool = False,
    **packing: Any,
) -> Run:
    """Fine-tunes ``base`` on captioned pictures by MCL, beside its ungrouped control.

        run = mclclip.finetune("photos", captions="captions.csv", base="ViT-B-32@openai", out="run")

    Packs ``images`` with their captions (see ``mclclip pack``, whose arguments such as
    ``caption_column`` can be given too), holds out two shares of the pictures by a hash of their
    bytes, chooses all settings (``out/finetune/settings.yaml``), trains, evaluates, and returns the
    run. The same call goes on where it was stopped.

    ``base``: NAME@TAG of open_clip, NAME@random, or a folder. ``options``: settings in the place of
    chosen ones, ``{"train.lr": 1e-5}`` or ``["train.lr=1e-5"]``. ``held_out``: the share of the
    pictures that each of both shares gets. Raises ValueError and FileNotFoundError, one line, for
    what is wrong, such as an ``out`` that was begun with other arguments; ``force`` moves aside
    what does not fit and makes it again.
    """
    overrides = [*options]
    if isinstance(options, Mapping):
        overrides = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    in_notebook = "ipykernel" in sys.modules and not log.handlers
    if in_notebook or not log.hasHandlers():  # nobody else shows how far it is
        runlog.setup(int(os.environ.get("RANK", "0")))

    def work(context: Context) -> None:
        run(
            context, Path(images), captions=captions, base=base, out=Path(out),
            overrides=overrides, held_out=held_out, seed=seed, force=force, **packing,
        )  # fmt: skip

    process.run(_first(out, overrides), "finetune", work)
    return Run.open(out)


def run(
    context: Context,
    images: Path,
    *,
    captions: str | Path | None,
    base: str,
    out: Path,
    overrides: Sequence[str],
    held_out: float,
    seed: int,
    force: bool,
    **packing: Any,
) -> Run:
    """``finetune`` in a process that has its place among the ranks and the lock of ``out``."""

    def settle() -> str:
        choices.architecture(base)  # refused before hours of packing
        _check_held_out(held_out)
        columns = {n: packing[n] for n in _OF_TABLES if n in packing}
        given = ["--captions", str(captions)] if captions else []
        command = ["mclclip", "finetune", str(images), *given, "--base", base, "--out", str(out)]
        table = None if captions is None else Path(captions)
        _table(images, table, command=command, **columns)
        # Until settings are chosen nothing depends on what a mistaken call may have packed.
        renew = force or not is_finished(out / "finetune")
        packed = pack.pack(
            images, out / "data", captions=table, command=command, force=renew and "unfit",
            held_out={"choose": held_out, "report": held_out}, **packing,
        )  # fmt: skip
        wanted = {"base": base, "seed": seed, "given": list(overrides)}
        folder, inputs = out / "finetune", {"shards": packed.digest}
        made = Artifact.open(
            folder, kind="finetune", config=wanted, inputs=inputs, force=renew and "unfit"
        )
        if not made.finished:
            shares = packed.counts["shares"]
            if lacking := [name for name, share in shares.items() if not share["captions"]]:
                raise ValueError(
                    f"{', '.join(lacking)} of {images} has no picture with a caption: give a table "
                    "by --captions, or a text beside each picture (a.jpg, a.txt)"
                )
            count = shares["train"]["samples"]
            machine, half = choose_machine(context)
            cores = len(os.sched_getaffinity(0)) // context.world_size
            at = Situation(base, count, out / "data", out, machine, cores, half, seed)
            text = choices.choose(at, overrides)
            files.write_bytes(folder / SETTINGS, text.encode())
            made.finish({"samples": count})
            log.info("chose the settings, each with its reason: %s", folder / SETTINGS)
            log.info("'mclclip doctor --data %s' looks at the data", folder / SETTINGS)
            for line in text.splitlines():
                log.debug("%s", line)
        return str(folder / SETTINGS)

    settings = collectives.on_main(settle)
    pipeline.run(configuration.load(settings), context, force=force)
    return Run.open(out)


def _check_held_out(share: float) -> None:
    if not 0 < share < 0.5:
        raise ValueError(
            f"held_out is {share:g}: wanted the share of the pictures that each of two shares "
            "gets, above 0 and below 0.5"
        )


def _table(
    images: Path,
    captions: Path | None,
    *,
    path_column: str | None = None,
    caption_column: str | Sequence[str] | None = None,
    delimiter: str | None = None,
    allow_roots: Sequence[Path] = (),
    command: Sequence[str] = (),
) -> Table:
    """The pictures with their captions. Raises ValueError where there are no captions."""
    table = open_table(
        images, captions, image_column=path_column, caption_column=caption_column,
        delimiter=delimiter, allow_roots=allow_roots, command=command,
    )  # fmt: skip
    if not table.caption_columns:
        raise ValueError(
            f"{table.path} has no column of captions, it has {', '.join(table.columns)}: a CLIP is "
            "fine-tuned on pictures with captions; name the column with --caption-column"
        )
    return table


def dry_run(
    images: Path,
    *,
    base: str,
    gpu_gib: float | None,
    samples: int | None,
    captions: Path | None,
    out: Path,
    overrides: Sequence[str],
    held_out: float,
    seed: int,
    **columns: Any,
) -> str:
    """The settings that ``run`` would choose on a GPU of so many GiB, or on this machine's
    processors; reads no weights and writes nothing. ``samples`` None: they are counted."""
    _check_held_out(held_out)
    if samples is None:
        table = _table(images, captions, **columns)
        rows = table.rows(Findings())
        samples = sum(1 for _ in rows) if table.holds_images else len({row.path for row in rows})
    machine = Machine(memory_gib=gpu_gib, elsewhere=True)
    train, cores = round(samples * (1 - 2 * held_out)), len(os.sched_getaffinity(0))
    at = Situation(base, train, out / "data", out, machine, cores, seed=seed)
    return choices.choose(at, overrides)


def choose_machine(context: Context) -> tuple[Machine, str]:
    """The ranks with the memory of a GPU of theirs, and the 16-bit format that it computes in."""
    device, ranks = context.device, context.world_size
    if device.type == "cpu":
        return Machine(gpus_per_node=ranks), "bf16"
    memory_gib = torch.cuda.mem_get_info(device)[1] / GIB
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return Machine(gpus_per_node=ranks, memory_gib=memory_gib), half


def run_verb(args: Mapping[str, Any]) -> None:
    """The verb ``finetune`` of the command line."""
    given = dict(args)
    ahead = {name: given.pop(name) for name in ("gpu_gib", "samples")}
    for name, value in ahead.items():
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}: wanted more than 0")
    if given.pop("dry_run"):
        asked = {name: value for name, value in given.items() if name != "force"}
        print(dry_run(**asked, **ahead), end="")
        return
    if named := [f"--{n.replace('_', '-')}" for n, value in ahead.items() if value is not None]:
        raise ValueError(f"{named[0]} is for --dry-run: add that, or leave it out")

    def work(context: Context) -> None:
        done = run(context, **given)
        if context.is_main:
            print(results.table(done.result_rows))
            print("", *done.verdict(), sep="\n")
            print(f"The best encoder: {done.exports()[done.best()]}")
            print(f"Report, to open in a browser: {done.report()}")

    process.run(_first(given["out"], given["overrides"]), "finetune", work)


def _first(out: str | Path, overrides: Sequence[str]) -> Config:
    """The options of the process that are known before the settings are chosen."""
    top = [each for each in overrides if "." not in each.partition("=")[0]]
    if moved := [each for each in top if each.startswith("run_dir=")]:
        raise ValueError(f"got {moved[0]}: the folder of the run is given as out, {out} here")
    return configuration.from_tree({"run_dir": str(out)}, top)


def _gain(c: Comparison) -> str:
    value, other, change, *_ = c.texts()
    return (
        f"{results.short_name(c.row.metric)} {other} -> {value} ({change} {c.row.unit.difference})"
    )


def _judged(judged: Sequence[Comparison]) -> str:
    words = [
        f"{results.short_name(c.row.metric)} is {c.verdict} (p = {c.corrected:.2g})" for c in judged
    ]
    return ", ".join(words)
