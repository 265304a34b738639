"""Verb: one base, several remedies of equal cost -> a comparison of each with training alone.

A remedy is a name and a few overrides of the base configuration, such as ``ifm``. All remedies of
a seed share one index, one stage 0, and its embeddings, clusters and pseudo labels. Each trains on
as many samples, in as many steps, as the stages of the base configuration do together::

    RACE/
      race.json                 the base configuration, which later calls are compared with
      base/seed_3/              index  stage_0/  stage_1/pseudo_labels  results.jsonl
      mcl/seed_3/  ungrouped/seed_3/  ifm/seed_3/ ...
                                one run each; its index, stage_0 and labels link to the base's
      race.csv  race.html

Finished work is skipped, so the same command resumes a race that was killed anywhere. Every remedy
has its own lock: several jobs may train one remedy each (``only``), and a last call compares all.
"""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mclclip import config as configuration
from mclclip import method
from mclclip.config import Config
from mclclip.data.epoch_plan import total_steps
from mclclip.eval import results
from mclclip.plan import steps as planned
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.report import race as page
from mclclip.report import story
from mclclip.report.race import Entrant
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths
from mclclip.run.lock import RunLock
from mclclip.run.opened import JOINED, Run
from mclclip.run.steps import identity_of
from mclclip.util import files
from mclclip.util.options import prefix_errors
from mclclip.util.remake import Remake
from mclclip.util.remedies import BASE, CONTROL, Remedy
from mclclip.verbs import plan

log = logging.getLogger("mclclip")

# Options of the base configuration that may differ: they change neither weights nor groups, or
# they belong to a seed.
_FREE = {"run_dir", "seed", "device", "deterministic", "num_threads", "wall_time_s", "eval"}
_FREE |= {"peer_timeout_s", "poll_s", "track", "embed", "export"}


@dataclass(frozen=True)
class Race:
    """A race, before or after it has run.

    recipe     the base configuration: a YAML file or the name of a shipped recipe
    remedies   all remedies, with the control (``remedies.choose_remedies`` returns them)
    seeds      one set of trainings each; empty: the seed of the configuration
    only       trains one remedy, by name or by its number from 1 on, or 'base'; makes no table
    overrides  of the base configuration, such as 'train.steps=100'
    """

    recipe: str
    remedies: Sequence[Remedy]
    seeds: Sequence[int] = ()
    only: str | None = None
    overrides: Sequence[str] = ()
    force: Remake = Remake.NOTHING

    # --- settings ---

    @cached_property
    def base(self) -> Config:
        """The base configuration; its run directory is that of the race."""
        config = configuration.load(self.recipe, [*self.overrides, "controls=[]"])
        if not config.has_stages or not config.eval.suite:
            raise ValueError(
                f"num_stages is {config.num_stages} and eval.suite has {len(config.eval.suite)} "
                "benchmarks: a race trains one stage or more, and is judged by benchmarks: set both"
            )
        return config

    @cached_property
    def trained(self) -> list[Remedy]:
        """The remedies to train, in order: the first one of each set of overrides. Remedies with
        equal overrides share one run, and are judged by different encoders of it."""
        first: dict[tuple[str, ...], Remedy] = {}
        for remedy in self.remedies:
            first.setdefault(tuple(sorted(remedy.overrides)), remedy)
        return [*first.values()]

    def _shares_run(self, remedy: Remedy, other: Remedy) -> bool:
        return sorted(remedy.overrides) == sorted(other.overrides)

    def folder(self, remedy: Remedy, seed: int) -> Path:
        """The run directory in which a remedy is trained."""
        first = next(other for other in self.trained if self._shares_run(remedy, other))
        return Path(self.base.run_dir) / first.name / f"seed_{seed}"

    def base_of(self, seed: int) -> Config:
        """The configuration of the run ``base/seed_SEED``, which the remedies of a seed share."""
        run_dir = Path(self.base.run_dir) / BASE / f"seed_{seed}"
        return replace(self.base, run_dir=str(run_dir), seed=seed)

    @property
    def all_seeds(self) -> list[int]:
        """The seeds of the race, or else the one of the configuration."""
        return [*self.seeds] or [self.base.seed]

    def settings(self, remedy: Remedy, seed: int, steps: int | None = None) -> Config:
        """Returns the configuration of a remedy.

        ``steps``: of all its stages together (None: ``train.steps`` times the number of stages of
        the base configuration, if that sets ``train.steps``). Raises ValueError, naming the remedy,
        if its overrides are refused.
        """
        run_dir = self.folder(remedy, seed)
        words = [*self.overrides, "controls=[]", *remedy.overrides]
        with prefix_errors(remedy.label):
            config = configuration.load(self.recipe, [*words, f"run_dir={run_dir}", f"seed={seed}"])
            if len(config.controls) > 1 or not config.has_stages:
                raise ValueError(
                    f"got controls={config.controls} and num_stages={config.num_stages}: wanted "
                    "one control or none, and at least one stage"
                )
            if config.train.evaluate.patience is not None:
                raise ValueError(
                    "train.evaluate.patience may end a training early, and remedies are compared "
                    "at the same cost: leave it out"
                )
            if steps is None and self.base.train.steps is not None:
                steps = self.base.num_stages * self.base.train.steps
            if steps is not None:
                if steps % config.num_stages:
                    raise ValueError(
                        f"the {steps:,} steps of all remedies cannot be divided among "
                        f"num_stages={config.num_stages}: set another train.steps"
                    )
                each = steps // config.num_stages
                config = replace(config, train=replace(config.train, steps=each))
        if remedy.encoder is not None and remedy.encoder not in (encoders := config.encoders[1:]):
            raise ValueError(
                f"{remedy.label} is judged by {remedy.encoder}, which is not made: wanted "
                f"one of {', '.join(encoders)} (export.soup and export.concat say which)"
            )
        return config

    def encoder(self, remedy: Remedy) -> str:
        """Returns the name in results.jsonl of the encoder that a remedy is judged by."""
        config = self.settings(remedy, self.all_seeds[0])
        return RunPaths.of(config, *config.controls).model_name(_judged_by(remedy, config))

    @cached_property
    def job(self) -> Config:
        """The configuration of the process, whose run directory it locks: that of the race, or with
        ``only`` that of the remedy, so that several jobs may train one remedy each."""
        if self.only is None:
            return self.base
        return replace(self.base, run_dir=str(Path(self.base.run_dir) / self._only))

    @cached_property
    def _only(self) -> str:
        """The name of the remedy that ``only`` selects, or 'base'."""
        name, trained = str(self.only), [remedy.name for remedy in self.trained]
        if name.isdecimal() and 1 <= int(name) <= len(trained):
            return trained[int(name) - 1]
        if name in (BASE, *trained):
            return name
        if name in (others := {remedy.name: remedy for remedy in self.remedies}):
            return self.folder(others[name], 0).parent.name  # of the remedy whose run it shares
        numbered = ", ".join(f"{number} {remedy}" for number, remedy in enumerate(trained, 1))
        raise ValueError(f"--only {name}: wanted {BASE}, or a remedy by name or number: {numbered}")

    # --- running ---

    def check(self, context: Context) -> None:
        """Raises, before anything is written, the errors that would stop the race later, and
        ValueError if the folder holds a race of another base configuration."""
        labels = [r.name for r in self.remedies if "controls=[random_groups]" in r.overrides]
        mcl = any(not remedy.overrides for remedy in self.remedies)
        if labels and self.base.num_stages > 1 and not mcl:
            raise ValueError(
                f"remedy {labels[0]!r} permutes the labels of all stages of mcl: name mcl too"
            )
        for remedy in self.remedies:
            config = self.settings(remedy, self.all_seeds[0])
            with prefix_errors(remedy.label):
                method.check(config, context)
        holds_run = artifacts.is_finished(RunPaths.of(self.base).index)
        if holds_run and not self.record_path.exists():
            raise ValueError(
                f"{self.base.run_dir} holds a run, whose files a race would mix with its own: give "
                "the race another run_dir"
            )
        path = self.record_path
        if path.exists() and self.force is Remake.NOTHING:
            before = files.read_json(path)
            if difference := artifacts.difference(before, self.record):
                raise ValueError(
                    f"{path.parent} is a race of another base configuration: {difference}. Give "
                    "another run_dir, or --force to make again what depends on it"
                )

    @property
    def record_path(self) -> Path:
        """The file that holds ``record``."""
        return Path(self.base.run_dir) / "race.json"

    @property
    def record(self) -> dict[str, Any]:
        """Options of the base configuration that change what is trained."""
        tree = {name: v for name, v in asdict(self.base).items() if name not in _FREE}
        tree["data"] = {"sources": tree["data"]["sources"], "pixels": tree["data"]["pixels"]}
        for name in self.base.trainings:
            tree[name] = identity_of(getattr(self.base, name))
        return files.as_json(tree)  # type: ignore[no-any-return]

    def run(self, context: Context) -> None:
        """Runs the race, or the remedy that ``only`` selects. ``check`` has been called before."""
        for seed in self.all_seeds:
            shared = self.base_of(seed)
            with self._lock(shared, context):
                readers = {remedy.label: self.settings(remedy, seed) for remedy in self.trained}
                log.info("=== race, seed %d: base", seed)
                path, text = Path(shared.run_dir) / "config.yaml", configuration.dump(shared)
                collectives.on_main(partial(files.write_bytes, path, text.encode()))
                method.prepare(shared, context, readers=readers, force=self.force)
                # Not earlier: a race that was refused may start again with another base.
                collectives.on_main(partial(files.write_json, self.record_path, self.record))
            steps = collectives.on_main(partial(steps_of_base, shared))
            for remedy in self.trained:
                if self.only is None or remedy.name == self._only:
                    self._run(remedy, seed, steps, context)
        if self.only is None:
            collectives.on_main(lambda: self._compare(steps))

    def _run(self, remedy: Remedy, seed: int, steps: int, context: Context) -> None:
        """Trains, exports and evaluates a remedy."""
        log.info("=== race, seed %d: %s", seed, remedy.name)
        config = self.settings(remedy, seed, steps)
        same = [other for other in self.remedies if self._shares_run(remedy, other)]
        judged = [*dict.fromkeys(_judged_by(other, config) for other in same)]
        config = replace(config, eval=replace(config.eval, encoders=judged))
        with self._lock(config, context):
            collectives.on_main(lambda: self._link_base(config, seed))
            control = config.controls[0] if config.controls else None
            # A control stays in the configuration, since whoever opens the run reads it there.
            config = config if control else replace(config, controls=[])
            method.run(config, context, force=self.force, only=control)

    def _link_base(self, config: Config, seed: int) -> None:
        """Makes links to the base's artifacts in the run of ``config``, and copies the base's
        figures. A control that permutes labels gets links to the labels of the remedy mcl too."""
        base, run_dir = Path(self.base_of(seed).run_dir), Path(config.run_dir)
        names = ("index", "stage_0", "teachers", "text_rows", "eval_text_rows")
        shared = {name: base / name for name in names if (base / name).is_dir()}
        sources = {1: base}
        if config.controls == ["random_groups"]:
            mcl = self.folder(next(r for r in self.remedies if not r.overrides), seed)
            sources |= dict.fromkeys(range(2, config.num_stages + 1), mcl)
        for stage, source in sources.items():
            labels = Path(f"stage_{stage}/pseudo_labels")
            if artifacts.is_finished(source / labels):
                shared[str(labels)] = source / labels
            elif stage > 1:
                raise FileNotFoundError(
                    f"{config.run_dir} needs the labels of stage {stage} of mcl, which are not "
                    f"finished in {source}: train mcl first (--only mcl)"
                )
        for name, source in shared.items():
            link = run_dir / name
            if not link.is_symlink() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(source, link.parent.resolve()))
        figures = base / "results.jsonl"
        results.copy(results.read(figures), figures, run_dir / "results.jsonl")

    # --- comparing ---

    def _compare(self, steps: int) -> None:
        """Compares the trainings of all remedies, each of ``steps`` steps: writes race.csv and
        race.html, and prints the comparison."""
        folder, seeds = Path(self.base.run_dir), self.all_seeds
        base = Entrant(BASE, "stage_0", [Path(self.base_of(seed).run_dir) for seed in seeds])
        entrants = [self._entrant(remedy, steps) for remedy in self.remedies]
        control = next(entrant for entrant in entrants if entrant.name == CONTROL)
        for entrant in entrants:
            entrant.cost["share"] = entrant.cost["operations"] / control.cost["operations"]
        standings = page.standings(base, control, entrants, [*self.base.eval.suite])
        files.write_bytes(folder / page.TABLE, page.frame(standings).to_csv(index=False).encode())
        text = page.render(folder.resolve().name, standings, base, entrants)
        files.write_bytes(folder / page.PAGE, text.encode())
        print(page.table(standings, entrants))
        for sentence in page.sentences(standings):
            print("\n" + textwrap.fill(files.printable(sentence), results.WIDTH))
        log.info("wrote %s and %s", folder / page.PAGE, folder / page.TABLE)

    def _entrant(self, remedy: Remedy, steps: int) -> Entrant:
        """Returns a remedy that has run, with its cost: the mean over seeds of recorded times."""
        runs = [self.folder(remedy, seed) for seed in self.all_seeds]
        settings = self.settings(remedy, self.all_seeds[0], steps)
        variant = settings.controls[0] if settings.controls else "mcl"
        # The training of the base does not count: all remedies share it.
        passes = plan.compute(replace(settings, base=None), plan.Machine())["hours"]["passes"]
        trained = [of for of in passes if of["stage"] > 0 and of["variant"] == variant]
        operations = sum(of["sample"] * of["samples"][1] for of in trained if of["samples"])
        recorded = [
            training
            for run in runs
            for training in story.trainings(Run.open(run))
            if training["stage"] > 0 and training["variant"] == variant
        ]
        totals = [
            story.total([training[name] for training in recorded])
            for name in ("seconds", "rank_hours")
        ]
        seconds, hours = (None if total is None else total / len(runs) for total in totals)
        first = runs[0].parent.name
        cost = {
            "steps": steps,
            "samples": steps * settings.train.global_batch,
            "operations": operations,
            "seconds": seconds,
            "rank_hours": hours,
            "of": None if first == remedy.name else first,
        }
        options = " ".join(remedy.overrides)
        return Entrant(remedy.name, self.encoder(remedy), runs, remedy.about, options, cost)

    @contextmanager
    def _lock(self, config: Config, context: Context) -> Iterator[None]:
        """Holds the lock of a run directory on the first rank. Waits for it up to
        ``peer_timeout_s``: of several jobs that start together, one makes the base."""
        lock = RunLock(Path(config.run_dir), wait_s=self.base.peer_timeout_s)
        collectives.raise_on_every_rank(lambda: context.is_main and lock.__enter__())
        if context.is_main:
            files.remove_leftovers(Path(config.run_dir))
        try:
            yield
        finally:
            if context.is_main:
                lock.__exit__(None, None, None)


def _judged_by(remedy: Remedy, config: Config) -> str:
    """Returns the encoder that a remedy is judged by, such as 'stage_1', without the prefix of a
    control: the one it names, else the first joined encoder of the run, else stage 1."""
    preferred = ("concat_stage_norm", *JOINED)
    first = next((name for name in preferred if name in config.encoders), "stage_1")
    return remedy.encoder or first


def steps_of_base(shared: Config) -> int:
    """Returns the steps that all stages of a remedy have together.

    If ``train.steps`` is not set, epochs are counted without groups, so that every remedy gets the
    same number whatever its policy on groups."""
    if (steps := shared.train.steps) is None:
        plain = replace(shared, num_stages=1, controls=["ungrouped"])
        control = planned.count(plain, None)["trainings"][-1]
        steps = total_steps(None, shared.train.epochs, control["steps_per_epoch"][0])
    return shared.num_stages * steps
