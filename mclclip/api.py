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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PosixPath
from typing import Any

import torch

from mclclip import config as configuration
from mclclip import method
from mclclip.cli import process
from mclclip.config import Config
from mclclip.data.findings import Findings
from mclclip.data.tables import Table, open_table
from mclclip.eval import results
from mclclip.models.encoder import Encoder, load_model
from mclclip.plan import choices
from mclclip.plan.choices import Situation
from mclclip.plan.machine import GIB, Machine
from mclclip.ranks import collectives, failures, process_group, signals
from mclclip.ranks.process_group import Context
from mclclip.report.verdict import Verdict
from mclclip.run import opened, runlog
from mclclip.run.artifacts import MANIFEST, Artifact, Manifest
from mclclip.run.steps import Made, Step, make
from mclclip.util import advice, files
from mclclip.util.remake import Remake
from mclclip.verbs import compare, make_pairs, pack, report

__all__ = ["Encoder", "Run", "finetune", "load_model"]

log = logging.getLogger("mclclip")
HELD_OUT = 0.1
"""Share of the pictures that each of the two held-out shares has."""
SETTINGS = "settings.yaml"
_MANY = 1_000_000  # pictures for which options are checked before it is known how many there are
_OF_TABLES = ("path_column", "caption_column", "delimiter", "allow_roots")


class Run(opened.Run):
    """A run directory: what ``finetune`` or ``mclclip run`` left there, opened by name.

        run = mclclip.Run.open("runs/mine")

    Beside what ``opened.Run`` has: ``encoder``, ``recommended``, ``tuned``, ``verdict`` and
    ``report``.
    """

    def encoder(self, name: str | None = None, device: str = "cpu") -> Encoder:
        """An encoder of the run by its name in ``results``.

        Without a name it is the one that the verdict recommends: the tuned one where it is better
        than the base beyond chance, else the base, ``stage_0``, and the log says so and why.
        ``run.encoder(run.tuned())`` is the tuned one whatever the verdict. Raises FileNotFoundError
        where it was not exported, or the outcomes are not there that a verdict needs, and
        ValueError for an unknown name.
        """
        if name is None:
            name, tuned = self._judged.recommended, self._judged.tuned
            if tuned not in (name, None):
                log.warning("encoder() gives the base; encoder(%r) gives the tuned one", tuned)
                log.warning("%s", self._judged.headline)
        paths = self.exports()
        if name not in paths:
            raise ValueError(f"no encoder {name!r} in {self.directory}: it has {', '.join(paths)}")
        return load_model(paths[name], device=device)

    def recommended(self) -> str:
        """The name of the encoder that the verdict recommends (``encoder``)."""
        return self._judged.recommended

    def tuned(self) -> str:
        """The name of the trained encoder that stands for the run, whether it is proven or not:
        that with the highest mean of the share ``choose``'s main metrics (where there is no such
        share, of all benchmarks'); a single model before a concat that is not better beyond chance.
        ``stage_0`` where nothing was measured but it and controls."""
        return compare.tuned(self._rows()) or compare.BASE

    def verdict(self) -> list[str]:
        """The verdict in sentences: what to use, what changed against the base and against the
        ungrouped control, and how far to trust it."""
        return self._judged.sentences()

    @cached_property
    def _judged(self) -> Verdict:
        return Verdict.of(self._rows())

    def _rows(self) -> list[compare.Row]:
        return compare.read_runs([self.directory])

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

    ``base``: NAME@TAG of open_clip, NAME@FILE of weights, NAME@random, a folder, or hf:FOLDER of a
    CLIP or SigLIP of transformers. ``options``: settings in the place of chosen ones,
    ``{"train.lr": 1e-5}`` or ``["train.lr=1e-5"]``. ``held_out``: the share of the pictures that
    each of both shares gets. Raises ValueError and FileNotFoundError, one line, for
    what is wrong, such as an ``out`` that was begun with other arguments; ``force`` moves aside
    what does not fit and makes it again. Ctrl-C raises KeyboardInterrupt, as everywhere in Python,
    once the training under way has saved; the same call then goes on.
    """
    overrides = [*options]
    if isinstance(options, Mapping):
        overrides = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    in_notebook = "ipykernel" in sys.modules and not log.handlers
    if in_notebook or not log.hasHandlers():  # nobody else shows how far it is
        runlog.setup(failures.number_of("RANK", 0))

    def work(context: Context) -> None:
        run(
            context, Path(images), captions=captions, base=base, out=Path(out),
            overrides=overrides, held_out=held_out, seed=seed, force=force, **packing,
        )  # fmt: skip

    with signals.save_on_interrupt():
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
    folder = out / "finetune"
    command = advice.words_of(
        "finetune", images, *overrides, captions=captions, base=base, out=out, seed=seed,
        held_out=held_out, **packing,
    )  # fmt: skip
    given = {name: value for name, _, value in (each.partition("=") for each in overrides)}

    def settle() -> tuple[str, Remake]:
        _check_held_out(held_out)
        # As long as nothing was trained, what a mistaken call left is made again where it differs.
        anew = Remake.UNFIT if force or not _has_trained(out) else Remake.NOTHING
        columns = {n: packing[n] for n in _OF_TABLES if n in packing}
        table = None if captions is None else Path(captions)
        pictures = _table(images, table, command=command, **columns)
        if anew is Remake.UNFIT:
            count = _count(pictures) or _MANY
            likely, _ = choices.choose(situation(round(count * (1 - 2 * held_out))), overrides)
            method.check(likely, context, reads_benchmarks=False)
            choices.check_base(base, fetch=True)
        packed = pack.pack(
            images, out / "data", captions=table, command=command, force=anew,
            held_out={"choose": held_out, "report": held_out}, **packing,
        )  # fmt: skip

        def choose() -> tuple[int, str]:
            _check_captioned(packed, images)
            count = packed.counts["shares"]["train"]["samples"]
            pairs = _make_pairs(out, force=anew)
            return count, choices.choose(situation(count, pairs), overrides)[1]

        make(Settings(base, seed, given), folder, (packed, choose), anew)
        return str(folder / SETTINGS), anew

    def situation(count: int, pairs: Path | None = None) -> Situation:
        machine, half = choose_machine(context)
        cores = process_group.count_cores()
        return Situation(base, count, out / "data", out, machine, cores, half, seed, pairs)

    settings, anew = collectives.on_main(settle)
    settled = configuration.load(settings)
    with process_group.num_threads(settled.num_threads):
        method.run(settled, context, force=anew)
    return Run.open(out)


def _check_captioned(packed: Manifest, images: Path) -> None:
    """Raises ValueError where a share of what was packed of ``images`` has no caption."""
    shares = packed.counts["shares"]
    if lacking := [name for name, share in shares.items() if not share["captions"]]:
        raise ValueError(
            f"{', '.join(lacking)} of {images} has no picture with a caption: give a table "
            "by --captions, or a text beside each picture (a.jpg, a.txt)"
        )


def _make_pairs(out: Path, force: Remake) -> Path | None:
    """Makes minimal pairs of the share ``report``; None where its captions fit no rule."""
    shards, folder = out / "data" / "report", out / choices.PAIRS
    try:
        make_pairs.run(shards, folder, captions="json:captions", force=force)
    except make_pairs.NoItems as error:
        log.info("there will be no minimal pairs: %s", error)
        return None
    return folder


@dataclass(frozen=True)
class Settings(Step[tuple[Manifest, Callable[[], tuple[int, str]]]]):
    """The settings that are chosen for what was packed; ``options`` are those that were given."""

    kind = "finetune"
    base: str
    seed: int
    options: Mapping[str, str]

    def reads(self, how: tuple[Manifest, Any]) -> dict[str, str]:
        """Returns what was packed."""
        return {"shards": how[0].digest}

    def make(self, out: Artifact, how: tuple[Any, Callable[[], tuple[int, str]]]) -> Made:
        """Chooses them, by a function that returns for how many samples, and their text."""
        count, text = how[1]()
        path = out.begin() / SETTINGS
        files.write_bytes(path, text.encode())
        log.info("chose the settings, each with its reason: %s", path)
        log.info("'mclclip doctor --data %s' looks at the data", path)
        for line in text.splitlines():
            log.debug("%s", line)
        return Made({"samples": count}, files.records_of(out.directory, SETTINGS))


def _has_trained(out: Path) -> bool:
    """Returns whether a training of the run has finished, or has a checkpoint to go on from."""
    folders = ("", "controls/*/")
    left = ("checkpoints/step_*", MANIFEST)
    return any(any(out.glob(f"{at}stage_*/train/{name}")) for at in folders for name in left)


def _count(table: Table) -> int | None:
    """How many pictures a table names; None where only reading them all would say it.

    Raises ValueError where it names pictures and none has a caption.
    """
    if table.holds_images:
        return table.count
    captions: dict[str, bool] = {}  # whether a picture has one
    for row in table.rows(Findings()):
        captions[row.path] = captions.get(row.path, False) or any(map(str.strip, row.captions))
    if captions and not any(captions.values()):
        raise ValueError(
            f"{table.path} has no picture with a caption: give a table by --captions, or a text "
            "beside each picture (a.jpg, a.txt)"
        )
    return len(captions)


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
    processors; writes and fetches nothing. ``samples`` None: they are counted."""
    _check_held_out(held_out)
    if samples is None:
        command = advice.words_of("finetune", images, captions=captions, base=base, out=out)
        table = _table(images, captions, command=command, **columns)
        samples = _count(table) or sum(1 for _ in table.rows(Findings()))
    machine = Machine(memory_gib=gpu_gib, elsewhere=True)
    train, cores = round(samples * (1 - 2 * held_out)), len(os.sched_getaffinity(0))
    at = Situation(
        base, train, out / "data", out, machine, cores, seed=seed, pairs=out / choices.PAIRS
    )
    _, text = choices.choose(at, overrides)
    choices.check_base(base, fetch=False)
    return text


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
        if value is not None and not 0 < value < float("inf"):
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
            page = done.report()  # before the table: standard output may end at any line
            print(results.table(done.result_rows))
            print("", *done.verdict(), sep="\n")
            exports, chosen = done.exports(), done.recommended()
            print(f"Recommended: {exports[chosen]}")
            if (tuned := done.tuned()) != chosen:
                print(f"Tuned, not recommended: {exports[tuned]}")
            print(f"Report, to open in a browser: {page}")

    process.run(_first(given["out"], given["overrides"]), "finetune", work)


def _first(out: str | Path, overrides: Sequence[str]) -> Config:
    """The options of the process that are known before the settings are chosen."""
    top = [each for each in overrides if "." not in each.partition("=")[0]]
    if moved := [each for each in top if each.startswith("run_dir=")]:
        raise ValueError(f"got {moved[0]}: the folder of the run is given as out, {out} here")
    return configuration.from_tree({"run_dir": str(out)}, top)
