"""The method (MCL), which ``cli``, ``api``, ``race`` and ``demo`` call, and which calls verbs: for
each stage embed -> cluster -> train -> export -> evaluate; then join.

MCL: "Learning the Unlearned: Mitigating Feature Suppression in Contrastive Learning" (Zhang et
al., 2024, arXiv:2402.11816).

Stage 0 is the given encoder, which is trained first if the options have ``base``. Encoders that
trainings learn from (teachers) are embedded before. Every stage s >= 1 starts from stage 0's
weights (unless ``train.start`` or ``trained_model`` says otherwise). Its batches are groups of
samples that the encoders of stages 0..s-1 put into the same clusters. The controls repeat these
trainings without groups, or with permuted ones, for as many steps.

Finished artifacts are skipped, so the same command resumes a run that was killed anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mclclip import config as configuration
from mclclip.config import Config, inputs, rules
from mclclip.eval import results
from mclclip.plan import memory
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import trackers
from mclclip.run.artifacts import RunPaths
from mclclip.train.loop import Evaluate
from mclclip.util import files
from mclclip.util.remake import Remake
from mclclip.verbs import cluster, embed, export, index, relocate, report, texts, train
from mclclip.verbs import eval as evaluation

log = logging.getLogger("mclclip")


def run(
    config: Config, context: Context, *, force: Remake = Remake.NOTHING, only: str | None = None
) -> Path:
    """Runs the whole method and returns the run directory.

    Options that would stop the run only at a later stage are checked first: they raise ValueError
    or FileNotFoundError before anything is written. ``only``: a control that runs without the
    method itself, whose labels it must find where it reads any.
    """
    collectives.on_main(lambda: check(config, context))
    with _recorded(config, context):
        inputs.check_samples(config, index.run(config, context, force=force))
        if config.text_rows:
            texts.run(config, context, force=force)
        teachers = {}
        for teacher, parts in config.teachers.items():
            folder = embed.run(config, context, encoder=teacher, force=force).parent
            if "text_features" in parts:  # so it can be evaluated on every benchmark
                teachers[f"teacher_{folder.name}"] = folder / "export"
        _stage(config, context, 0, "mcl", force)
        _evaluate(config, context, "mcl", teachers)
        for variant in ["mcl", *config.controls] if only is None else [only]:
            if variant != "mcl":
                log.info("--- control: %s", variant)
            for stage in range(1, config.num_stages + 1):
                if variant == "mcl":
                    log.info("--- stage %d of %d", stage, config.num_stages)
                    embed.run(config, context, stage=stage - 1, force=force)
                    cluster.run(config, context, stage=stage - 1, force=force)
                    if config.relocate.enabled:
                        relocate.run(config, context, stage=stage, force=force)
                _stage(config, context, stage, variant, force)
            if config.has_stages:  # concatenation and soup of the stages
                joined = export.join(config, context, variant=variant, force=force)
                _evaluate(config, context, variant, joined)
    if config.track:
        collectives.on_main(lambda: report.track(config))
    return Path(config.run_dir)


def prepare(
    config: Config,
    context: Context,
    *,
    readers: Mapping[str, Config],
    force: Remake = Remake.NOTHING,
) -> None:
    """Makes what every training of stage 1 starts from: the index, stage 0, its figures and its
    embeddings (of texts too where the configuration or one of the ``readers`` of stage 0 reads
    them), clusters and pseudo labels. Options are checked as by ``run``, and the samples are for
    ``readers`` too, by whose names their errors begin."""
    collectives.on_main(lambda: check(config, context))
    samples = index.run(config, context, force=force)
    inputs.check_samples(config, samples)
    for name, reader in readers.items():
        try:
            inputs.check_samples(reader, samples)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if config.text_rows:
        texts.run(config, context, force=force)
    for teacher in sorted({name for reader in readers.values() for name in reader.teachers}):
        embed.run(config, context, encoder=teacher, readers=[*readers.values()], force=force)
    _stage(config, context, 0, "mcl", force)
    embed.run(config, context, stage=0, readers=[*readers.values()], force=force)
    cluster.run(config, context, stage=0, force=force)


def check(config: Config, context: Context, *, reads_benchmarks: bool = True) -> None:
    """Raises, before the first verb, errors of options that would stop the run later.

    ``reads_benchmarks`` False: the folders of benchmarks need not be there yet."""
    rules.check(config, num_ranks=context.world_size, run=True)
    inputs.check(config)
    for name in config.trainings:
        memory.check_parameters(config, name)
    trackers.check_installed(config.track)
    if config.relocate.enabled and config.has_stages:
        relocate.check(config)
    if reads_benchmarks:
        evaluation.check(config.eval.suite)
    else:
        evaluation.check_options(config.eval.suite)


@contextmanager
def _recorded(config: Config, context: Context) -> Iterator[None]:
    """Writes the options into the run directory for the other verbs, which may read it while the
    block runs. Where the block refuses them for the artifacts that are there, puts back those that
    made these artifacts."""
    path = Path(config.run_dir) / "config.yaml"
    before = path.read_bytes() if context.is_main and path.exists() else None
    text = configuration.dump(config).encode()
    collectives.on_main(lambda: files.write_bytes(path, text))
    try:
        yield
    except (ValueError, FileNotFoundError):
        if context.is_main and before is not None:
            files.write_bytes(path, before)
        raise


def _stage(config: Config, context: Context, stage: int, variant: str, force: Remake) -> None:
    """Trains, exports and evaluates one stage of MCL or of a control (stage 0 may be given)."""
    if stage or config.base is not None:
        evaluate = evaluations(config, context, stage, variant)
        train.run(config, context, stage=stage, variant=variant, force=force, evaluate=evaluate)
    path = export.stage(config, context, stage=stage, variant=variant, force=force)
    _evaluate(config, context, variant, {f"stage_{stage}": path})


def _evaluate(config: Config, context: Context, variant: str, paths: Mapping[str, Path]) -> None:
    """Evaluates encoders of MCL or of a control, given by name, but for those that
    ``eval.encoders`` leaves out. Stage 0 is what all are compared with."""
    layout, encoders = RunPaths.of(config, variant), config.eval.encoders
    compared = {
        layout.model_name(name): path
        for name, path in paths.items()
        if encoders is None or name in ("stage_0", *encoders)
    }
    if compared:
        path, widths = layout.results, config.widths
        evaluation.evaluate(config, context, compared, path=path, widths=widths)


# --- within a training --------------------------------------------------------------------------


def evaluations(config: Config, context: Context, stage: int, variant: str) -> Evaluate | None:
    """Returns a function that evaluates the checkpoint of a step while ``verbs.train`` trains; None
    where the options ask for none. Its figures are named BENCHMARK/METRIC, equal on all ranks."""
    options = config.base if stage == 0 else config.train
    if options is None or options.evaluate.every is None:
        return None
    suite, choices = config.eval.suite, dict[str, str]()
    benchmarks = {name: suite[name] for name in options.evaluate.suite or suite}
    if (metric := options.evaluate.metric) is not None:
        benchmark = metric.partition("/")[0]
        choices[benchmark] = f"the checkpoint or the end of stage {stage} (evaluate.metric)"
        rows = collectives.on_main(lambda: results.read(RunPaths.of(config).results))
        base = [row for row in rows if row.model == "stage_0"]
        results.check_unseen(base, [benchmark], choices[benchmark])
    folder = RunPaths.of(config, variant).train(stage) / "evaluations"
    encoder, path = folder / "encoder", folder / "results.jsonl"

    def evaluate(step: int) -> dict[str, float]:
        name = f"step_{step:08d}"
        collectives.on_main(
            lambda: export.write_step(config, stage, variant, step=step, directory=encoder)
        )
        evaluation.evaluate(
            config, context, {name: encoder}, benchmarks=benchmarks, path=path, choices=choices
        )
        rows = collectives.on_main(lambda: results.read(path))
        shown = [r for r in rows if r.model == name and r.protocol.get("level") != "detail"]
        return {f"{row.benchmark}/{row.metric}": row.value for row in shown}

    return evaluate
