"""The public functions and classes: ``mclclip.finetune``, ``Run``, ``load_model``, ``Encoder``.

    run = mclclip.finetune("photos", captions="captions.csv", base="ViT-B-32-quickgelu@openai",
                           out="runs/mine")
    run.results                                # pandas.DataFrame
    run.encoder().encode_image(["a.jpg"])      # numpy, unit rows
    run.report()                               # path of a page to look at

``finetune`` calls the verbs in their order. Beside their artifacts it writes only the settings that
it chooses.
"""

from __future__ import annotations

import html
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral, Real
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
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util import advice, files
from mclclip.util.options import brief
from mclclip.util.remake import Remake
from mclclip.verbs import compare, make_pairs, pack, report

__all__ = ["Encoder", "Run", "finetune", "load_model"]

log = logging.getLogger("mclclip")
HELD_OUT = 0.1
"""Default share of the pictures for each of the two held-out shares."""
SIZE = 512  # the largest image size of open_clip's models
SETTINGS = "settings.yaml"
_MANY = 1_000_000  # number of pictures for early checks, if only reading all would count them
_OF_TABLES = ("path_column", "caption_column", "delimiter", "allow_roots")


class Run(opened.Run):
    """The results of a run directory, which ``finetune`` or ``mclclip run`` has written.

    run = mclclip.Run.open("runs/mine")
    """

    def encoder(self, name: str | None = None, device: str = "cpu") -> Encoder:
        """Loads an encoder of the run by its name in ``results``, such as 'stage_1'.

        Without a name it loads the one that the verdict recommends: the tuned one if it is better
        than the base beyond chance, else the base, 'stage_0'; then a warning says why.
        ``run.encoder(run.tuned())`` is the tuned one in any case. Raises FileNotFoundError if the
        encoder was not exported or the outcomes for a verdict are missing, and ValueError for an
        unknown name.
        """
        if name is None:
            name, tuned = self._judged.recommended, self._judged.tuned
            if tuned not in (name, None):
                log.warning("encoder() gives the base; encoder(%r) gives the tuned one", tuned)
                log.warning("%s", self._judged.headline)
        paths = self.exports()
        if name not in paths:
            there = (
                f"it has {', '.join(paths)}" if paths else "it has no exports, so use load_model"
            )
            raise ValueError(f"no encoder {name!r} in {self.directory}: {there}")
        return load_model(paths[name], device=device)

    def recommended(self) -> str:
        """Returns the name of the encoder that the verdict recommends."""
        return self._judged.recommended

    def tuned(self) -> str:
        """Returns the name of the trained encoder that represents the run, better than the base or
        not: the one with the highest mean of the main metrics of the share ``choose``, or of all
        benchmarks without that share. A single model that is above the base is preferred to a
        concat that is not better beyond chance. It is 'stage_0' if only stage 0 and controls were
        measured."""
        return compare.tuned(compare.read_runs([self.directory])) or compare.BASE

    def verdict(self) -> list[str]:
        """Returns the verdict in sentences: which encoder to use, how it differs from the base and
        from the ungrouped control, and how far to trust this."""
        return self._judged.sentences()

    @cached_property
    def _judged(self) -> Verdict:
        return Verdict.of(compare.read_runs([self.directory]))

    def report(self) -> Page:
        """Writes ``report.html``, a page with all results of the run; returns its path, which a
        notebook shows as the page."""
        return Page(report.run(str(self.directory)))


class Page(PosixPath):
    """The path of a page of HTML; a notebook shows the page if it is the result of a cell."""

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
    size: int = SIZE,
    force: bool = False,
    **packing: Any,
) -> Run:
    """Fine-tunes ``base`` on captioned pictures by MCL, beside its ungrouped control.

        run = mclclip.finetune("photos", captions="captions.csv", base="ViT-B-32@openai", out="run")

    Packs ``images`` with their captions, holds out two shares of the pictures by a hash of their
    bytes (one to choose the best encoder by, one to report on), chooses all settings
    (``out/finetune/settings.yaml``), trains, evaluates, and returns the run. If it was stopped, the
    same call goes on.

    ``images``: a folder, a table, shards, or the name of a data set of the Hugging Face hub, such
    as 'hf://datasets/ORG/NAME'. ``captions``: a table or a folder of texts; None if
    ``images`` has the captions too.
    ``base``: NAME@TAG of open_clip, NAME@FILE of weights, NAME@random, a folder, or hf:FOLDER of a
    CLIP or SigLIP of transformers. ``options``: settings that replace chosen ones,
    ``{"train.lr": 1e-5}`` or ``["train.lr=1e-5"]``. ``held_out``: the size of each held-out share.
    ``size``: pictures whose shorter side has more pixels are packed smaller; 0 packs all as they
    are. ``packing``: arguments of ``mclclip pack``, such as ``caption_column``.

    Raises ValueError or FileNotFoundError for wrong arguments, such as an ``out`` that was begun
    with others, and TypeError for arguments that neither it nor ``pack`` has; ``force`` moves aside
    the artifacts that differ and makes them again. Ctrl-C raises KeyboardInterrupt after a training
    has saved its state; the same call then goes on.
    """
    for name, value in {"images": images, "captions": captions, "base": base, "out": out}.items():
        may_lack = name == "captions" and value is None
        if not (may_lack or isinstance(value, str | Path) and str(value).strip()):
            raise ValueError(f"{name} is {brief(value)}: wanted a name or a path")
    for name, number in {"held_out": held_out, "seed": seed, "size": size}.items():
        if not isinstance(number, Real if name == "held_out" else Integral):
            raise ValueError(f"{name} is {brief(number)}: wanted a number")
    inspect.signature(pack.pack).bind(images, out, **packing)  # raises TypeError
    overrides = [options] if isinstance(options, str) else [*options]
    if isinstance(options, Mapping):
        overrides = [f"{n}={json.dumps(v)}" for n, v in files.as_json({**options}).items()]
    in_notebook = "ipykernel" in sys.modules and not log.handlers
    if in_notebook or not log.hasHandlers():  # nothing else would show the progress
        runlog.setup(failures.number_of("RANK", 0))
    table = None if captions is None else Path(captions)
    tuning = FineTuning(
        Path(images), table, base, Path(out), overrides, held_out, seed, force, size=size,
        **packing,
    )  # fmt: skip
    with signals.save_on_interrupt(), process_group.keep_generators():
        process.run(tuning.process_options(), "finetune", tuning.run)
    return Run.open(out)


class FineTuning:
    """The arguments of ``finetune``; ``packing`` has those of ``pack`` by name."""

    def __init__(
        self,
        images: Path,
        captions: Path | None,
        base: str,
        out: Path,
        overrides: Sequence[str],
        held_out: float,
        seed: int,
        force: bool = False,
        **packing: Any,
    ) -> None:
        self.images, self.captions, self.base, self.out = images, captions, base, out
        self.overrides, self.held_out, self.seed = tuple(overrides), held_out, seed
        self.force, self.packing = force, packing

    def process_options(self) -> Config:
        """Returns the options of the process, which are needed before settings are chosen. Raises
        ValueError for a folder of the run that is a file, or the folder of the pictures."""
        if self.out.is_file() or self.out.resolve() == self.images.resolve():
            what = "a file" if self.out.is_file() else "the folder of the pictures"
            raise ValueError(f"--out {self.out} is {what}: give a new folder")
        top = [each for each in self.overrides if "." not in each.partition("=")[0]]
        if run_dirs := [each for each in top if each.startswith("run_dir=")]:
            raise ValueError(
                f"got {run_dirs[0]}: the folder of the run is given as out, {self.out} here"
            )
        return configuration.from_tree({"run_dir": str(self.out)}, top)

    def run(self, context: Context) -> None:
        """Packs, chooses the settings and runs the method; the process has the lock of ``out``."""
        settings, remake = collectives.on_main(partial(self._settle, context))
        config = configuration.load(settings)
        with process_group.num_threads(config.num_threads):
            method.run(config, context, force=remake)

    def dry_run(self, gpu_gib: float | None, samples: int | None) -> str:
        """Returns the settings for a GPU of ``gpu_gib`` GiB, or None for this machine's CPUs.

        ``samples``: the number of pictures; None counts them. Writes and downloads nothing.
        """
        self.process_options()
        self._check_held_out()
        if samples is None:
            names = {"captions": self.captions, "base": self.base, "out": self.out}
            command = advice.words_of("finetune", self.images, **names)
            table = self._open_table(command)
            counted = self._count(table, command)
            samples = sum(1 for _ in table.rows(Findings())) if counted is None else counted
        machine = Machine(memory_gib=gpu_gib, elsewhere=True)
        situation = Situation(
            self.base, self._count_training(samples), self.out / "data", self.out, machine,
            len(os.sched_getaffinity(0)), seed=self.seed, pairs=self.out / choices.PAIRS,
        )  # fmt: skip
        likely, text = choices.choose(situation, self.overrides)
        self._check_size(likely)
        choices.check_base(self.base, fetch=False)
        return text

    def _settle(self, context: Context) -> tuple[str, Remake]:
        """Packs the pictures and chooses the settings. Returns the settings' file, and how the
        method treats what an earlier call left."""
        self._check_held_out()
        # Until something was trained, the results of a mistaken call are replaced.
        replaces = self.force or not _has_trained(self.out)
        remake = Remake.UNFIT if replaces else Remake.NOTHING
        command = advice.words_of(
            "finetune", self.images, *self.overrides, captions=self.captions, base=self.base,
            out=self.out, seed=self.seed, held_out=self.held_out, **self.packing,
        )  # fmt: skip
        table = self._open_table(command)
        if replaces:
            count = self._count_training(self._count(table, command) or _MANY)
            likely, _ = choices.choose(self._situation(context, count), self.overrides)
            self._check_size(likely)
            method.check(likely, context, reads_benchmarks=False)
            choices.check_base(self.base, fetch=True)
        packed = pack.pack(
            self.images, self.out / "data", captions=self.captions, command=command, force=remake,
            held_out={"choose": self.held_out, "report": self.held_out}, **self.packing,
        )  # fmt: skip
        options = {name: value for name, _, value in (o.partition("=") for o in self.overrides)}
        folder = self.out / "finetune"
        choose = partial(self._choose, context, packed, remake)
        make_artifact(Settings(self.base, self.seed, options), folder, (packed, choose), remake)
        return str(folder / SETTINGS), remake

    def _choose(self, context: Context, packed: Manifest, remake: Remake) -> tuple[int, str]:
        """Makes minimal pairs and chooses the settings; returns the number of training samples,
        and the text of the settings. Raises ValueError if a share has no caption."""
        shares = packed.counts["shares"]
        if lacking := [name for name, share in shares.items() if not share["captions"]]:
            raise ValueError(_describe_lack(f"{', '.join(lacking)} of {self.images}"))
        pairs: Path | None = self.out / choices.PAIRS
        try:
            shards = self.out / "data" / "report"
            make_pairs.run(shards, self.out / choices.PAIRS, captions="json:captions", force=remake)
        except make_pairs.NoItems as error:
            log.info("there will be no minimal pairs: %s", error)
            pairs = None
        count = shares["train"]["samples"]
        return count, choices.choose(self._situation(context, count, pairs), self.overrides)[1]

    def _situation(self, context: Context, count: int, pairs: Path | None = None) -> Situation:
        machine, half = choose_machine(context)
        data, cores = self.out / "data", process_group.count_cores()
        return Situation(self.base, count, data, self.out, machine, cores, half, self.seed, pairs)

    def _check_held_out(self) -> None:
        if not 0 < self.held_out < 0.5:
            raise ValueError(
                f"held_out is {self.held_out:g}: wanted the share of the pictures that each of two "
                "shares gets, above 0 and below 0.5"
            )

    def _check_size(self, config: Config) -> None:
        """Raises ValueError if the options make the model read larger pictures than are stored."""
        models = filter(None, (config.model, config.trained_model))
        sizes = [model.image_size or 0 for model in models]
        largest = max(sizes + [n for each in config.trainings.values() for n in each.listed_sizes])
        if 0 < (size := self.packing.get("size", 0)) < largest:
            raise ValueError(
                f"image_size is {largest}, and the pictures would be stored with a shorter side of "
                f"at most {size} pixels: give size as {largest} or more, or 0 for all as they are"
            )

    def _count_training(self, num_pictures: int) -> int:
        return round(num_pictures * (1 - 2 * self.held_out))

    def _open_table(self, command: Sequence[str]) -> Table:
        """Opens the pictures with their captions; ValueError if there is no column of captions."""
        columns = {name: self.packing[name] for name in _OF_TABLES if name in self.packing}
        table = open_table(self.images, self.captions, command=command, **columns)
        if not table.caption_columns:
            raise ValueError(
                f"{table.path} has no column of captions, it has {', '.join(table.columns)}: a "
                "CLIP is fine-tuned on pictures with captions; name the column with "
                "--caption-column"
            )
        return table

    def _count(self, table: Table, command: Sequence[str]) -> int | None:
        """Returns the number of pictures of a table that are there; None if only reading all would
        tell. Raises ValueError if there is none, or none has a caption."""
        if table.holds_images:
            return table.count
        rows = pack.present_rows(table, self.images, self.packing.get("allow_roots", ()), command)
        if not any(row.captions for row in rows):
            raise ValueError(_describe_lack(str(table.path)))
        return len(rows)


def _describe_lack(what: str) -> str:
    """Returns the message for pictures without captions."""
    return (
        f"{what} has no picture with a caption: give a table or a folder of texts by --captions, "
        "or a text beside each picture (a.jpg, a.txt); where folders are classes, "
        "'mclclip make-dataset folder --out OUT --source folder=FOLDER' packs both"
    )


@dataclass(frozen=True)
class Settings(Step[tuple[Manifest, Callable[[], tuple[int, str]]]]):
    """The settings that are chosen for the packed pictures; the user has set ``options``."""

    kind = "finetune"
    base: str
    seed: int
    options: Mapping[str, str]

    def reads(self, how: tuple[Manifest, Any]) -> dict[str, str]:
        """Returns the digest of the packed shards."""
        return {"shards": how[0].digest}

    def make(self, out: Artifact, how: tuple[Any, Callable[[], tuple[int, str]]]) -> Made:
        """Writes the settings. ``how`` ends with a function that returns the number of training
        samples and the text of the settings."""
        count, text = how[1]()
        path = out.begin() / SETTINGS
        files.write_bytes(path, text.encode())
        log.info("chose the settings, each with its reason: %s", path)
        log.info("to look at the data: %s", advice.again(["mclclip", "doctor", "--data"], path))
        for line in text.splitlines():
            log.debug("%s", line)
        return Made({"samples": count}, files.records_of(out.directory, SETTINGS))


def _has_trained(out: Path) -> bool:
    """Returns True if a training of the run has finished or has saved a checkpoint."""
    folders = ("", "controls/*/")
    left = ("checkpoints/step_*", MANIFEST)
    return any(any(out.glob(f"{at}stage_*/train/{name}")) for at in folders for name in left)


def choose_machine(context: Context) -> tuple[Machine, str]:
    """Returns the machine of these ranks, and the 16-bit format that its GPUs compute in."""
    device, ranks = context.device, context.world_size
    if device.type == "cpu":
        return Machine(gpus_per_node=ranks), "bf16"
    memory_gib = torch.cuda.mem_get_info(device)[1] / GIB
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return Machine(gpus_per_node=ranks, memory_gib=memory_gib), half


def run_verb(*, dry_run: bool, gpu_gib: float | None, samples: int | None, **flags: Any) -> None:
    """Runs the verb ``finetune`` of the command line by its flags."""
    tuning = FineTuning(**flags)
    if dry_run:
        print(tuning.dry_run(gpu_gib, samples), end="")
        return
    if gpu_gib is not None or samples is not None:
        raise ValueError("--gpu-gib and --samples are of --dry-run: add that, or leave them out")

    def work(context: Context) -> None:
        tuning.run(context)
        if context.is_main:
            _print_results(Run.open(tuning.out))

    process.run(tuning.process_options(), "finetune", work)


def _print_results(run: Run) -> None:
    """Writes the report and prints its path; before, if there are results, it prints the table, the
    verdict and the paths of encoders."""
    page = run.report()  # first, since whoever reads the output may close it after any line
    if run.result_rows:  # eval.suite={} gives none
        shown = (compare.BASE, run.tuned(), f"{compare.TWIN}{run.tuned()}")
        print(results.table([row for row in run.result_rows if row.model in shown]))
        print(f"(all {len({row.model for row in run.result_rows})} encoders are in the report)")
        print("", *run.verdict(), sep="\n")
        exports, recommended = run.exports(), run.recommended()
        print(f"Recommended: {exports[recommended]}")
        if (tuned := run.tuned()) != recommended:
            print(f"Tuned, not recommended: {exports[tuned]}")
    print(f"Report, to open in a browser: {page}")
