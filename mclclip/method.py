"""The method (MCL): for each stage: embed -> cluster -> train -> export -> evaluate; then join.

Stage 0 is the given encoder, or one trained from scratch. Every stage s >= 1 starts from stage 0's
weights (unless ``train.start`` or ``trained_model`` says otherwise). Its batches are groups of
samples that the encoders of stages 0..s-1 put into the same clusters. The controls repeat these
trainings without groups, or with permuted ones, for as many steps.

Finished artifacts are skipped, so the same command resumes a run that was killed anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mclclip import config as configuration
from mclclip.config import Config, TrainConfig
from mclclip.data import extras
from mclclip.data.bytes import excluded_keys, read_excluded
from mclclip.data.epoch_plan import check_samples
from mclclip.data.labels import SampleWeights
from mclclip.data.sample_index import SampleIndex
from mclclip.eval import results
from mclclip.eval.protocols import BenchmarkConfig, evaluator
from mclclip.models.loading import (
    check_tokenizer,
    has_texts,
    load_towers,
    model_config,
    refuse_folded_norms,
)
from mclclip.models.memory import load_shapes
from mclclip.models.options import ModelConfig
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Force, Layout, is_finished
from mclclip.train.loop import check_training
from mclclip.util import files
from mclclip.verbs import cluster, embed, export, index, relocate, train
from mclclip.verbs import eval as evaluation

log = logging.getLogger("mclclip")


def run(config: Config, context: Context, *, force: bool = False, only: str | None = None) -> Path:
    """Runs the whole method and returns the run directory.

    Options that would stop the run only at a later stage are checked first: they raise ValueError
    or FileNotFoundError before anything is written. ``force`` makes artifacts again that are of
    other settings or damaged; the others are kept. ``only``: a control that runs without the
    method itself, whose labels it must find where it reads any.
    """
    run_dir = Path(config.run_dir)
    collectives.on_main(lambda: check(config, context))
    recorded = run_dir / "config.yaml"
    before = recorded.read_bytes() if context.is_main and recorded.exists() else None
    text = configuration.dump(config).encode()
    collectives.on_main(lambda: files.write_bytes(recorded, text))
    try:
        _steps(config, context, "unfit" if force else False, only)
    except (ValueError, FileNotFoundError):
        if context.is_main and before is not None:  # the run did not accept the new options
            files.write_bytes(recorded, before)
        raise
    log.info("'mclclip report %s' makes one page of all that this run left", run_dir)
    return run_dir


def prepare(
    config: Config, context: Context, *, readers: Mapping[str, Config], force: bool = False
) -> None:
    """Makes what every training of stage 1 starts from: the index, stage 0, its figures and its
    embeddings (of texts too where the configuration or one of the ``readers`` of stage 0 reads
    them), clusters and pseudo labels. Options are checked as by ``run``, and the samples are for
    ``readers`` too, by whose names their errors begin."""
    remake: Force = "unfit" if force else False
    collectives.on_main(lambda: check(config, context))
    samples = index.run(config, context, force=remake)
    _check_data(config, samples)
    for name, reader in readers.items():
        try:
            _check_data(reader, samples)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    _stage(config, context, 0, "mcl", remake)
    embed.run(config, context, stage=0, readers=[*readers.values()], force=remake)
    cluster.run(config, context, stage=0, force=remake)


def _steps(config: Config, context: Context, force: Force, only: str | None) -> None:
    _check_data(config, index.run(config, context, force=force))
    _stage(config, context, 0, "mcl", force)
    if only is None:
        _method(config, context, force)
    for control in config.controls if only is None else [only]:
        log.info("--- control: %s", control)
        for stage in range(1, config.num_stages + 1):
            _stage(config, context, stage, control, force)
        _join(config, context, control, force)


def _method(config: Config, context: Context, force: Force) -> None:
    """Every stage of MCL after stage 0, and their join."""
    for stage in range(1, config.num_stages + 1):
        log.info("--- stage %d of %d", stage, config.num_stages)
        embed.run(config, context, stage=stage - 1, force=force)
        cluster.run(config, context, stage=stage - 1, force=force)
        # Copies that a finished training has read may be deleted.
        trained = partial(is_finished, Layout.of(config).train(stage))
        if config.relocate.enabled and (force or not collectives.on_main(trained)):
            relocate.run(config, context, stage=stage, force=force)
        _stage(config, context, stage, "mcl", force)
    _join(config, context, "mcl", force)


def check(config: Config, context: Context, *, reads_benchmarks: bool = True) -> None:
    """Raises, before the first verb, errors of options that would stop the run later.

    ``reads_benchmarks`` False: the folders of benchmarks need not be there yet."""
    for name, options in config.trainings.items():
        check_training(name, options, context.world_size)
        _benchmarks(config, options)
    excluded_keys(config.data.exclude)
    for stage in range(config.num_stages):
        config.cluster.clusters_of(stage)
    _check_image_weights(config)
    _check_objectives(config)
    if config.relocate.enabled and config.has_stages:
        relocate.check(config)
        if config.relocate.url is not None:
            raise ValueError(
                f"relocate.url={config.relocate.url} is where copies are uploaded between the "
                "verbs 'relocate' and 'train', and 'run' would train before that: leave it out, or "
                "call the verbs"
            )
    (evaluation.check if reads_benchmarks else evaluation.check_options)(config.eval.suite)
    _check_tokenizers(config)


def _check_image_weights(config: Config) -> None:
    """Loads the image towers that are given by a file, and raises what their trainings would."""
    for name, options in config.trainings.items():
        model = config.model_of(name)
        if model.image_weights is not None:
            given = load_towers(model.name, image_weights=model.image_weights, text=model.text)
            given.lock(**options.model_arguments()["lock"])
            refuse_folded_norms(given.train())


def _check_objectives(config: Config) -> None:
    """Checks what objectives want of an encoder with a start of its own."""
    with_text = [n for n, b in config.eval.suite.items() if evaluator(b.kind).reads_text]
    for name, options in config.trainings.items():
        if options.objective.reads.captions and not _reads_texts(config.model_of(name)):
            raise ValueError(
                f"{options.reader(name)} reads captions, and the model has no text tower: take an "
                "objective of views, such as nt_xent, or a CLIP model"
            )
    if with_text and not _reads_texts(config.model):
        raise ValueError(
            f"eval.suite.{with_text[0]} compares images with texts, and the model has no text "
            "tower: leave it out, or take a CLIP model"
        )
    chosen, widths, one_architecture = config.trained_model, None, True
    if chosen is not None:
        given, trained = model_config(config.model.name), model_config(chosen.name)
        clustered = replace(config.model, projector=[])  # embeddings lie before it
        widths, one_architecture = (_width(clustered), _width(chosen)), given == trained
        one_architecture &= config.model.long_context == chosen.long_context
    for options in config.trainings.values():
        facts = replace(config.facts(options), widths=widths)
        options.objective.check(facts)
    if not one_architecture and (config.export.concat or config.export.soup):
        raise ValueError(
            "trained_model has another architecture than model, and only stages of one "
            "architecture can be joined: set export.concat=[] and export.soup=false"
        )
    if with_text and chosen is not None and chosen.pretrained is None:
        log.warning(
            "%s compare images with texts, but no stage trains the text tower of trained_model: "
            "its figures will be those of chance (launch/recipes/lit.yaml trains one)",
            ", ".join(with_text),
        )


def _check_tokenizers(config: Config) -> None:
    """Raises FileNotFoundError where texts are to be read by a tokenizer that cannot be had."""
    readers = [n for n, options in config.trainings.items() if options.objective.reads.captions]
    models = [config.model_of(name) for name in readers]
    measured = any(evaluator(b.kind).reads_text for b in config.eval.suite.values())
    if measured or (config.has_stages and config.needs_text_embeddings):
        models.append(config.model)
    first = Layout.of(config).export(0)  # has a copy of the tokenizer's files
    names = [
        first if one is config.model and is_finished(first) else one.name
        for one in models
        if one.text
    ]
    for number, name in enumerate(names):
        if name not in names[:number]:
            check_tokenizer(name)


def _reads_texts(model: ModelConfig) -> bool:
    return model.text and has_texts(model.name)


def _width(model: ModelConfig) -> int:
    """Width of the features that an objective gets of a model; reads no weights."""
    if model.projector:
        return model.projector[-1]
    if has_texts(model.name):
        width: int = model_config(model.name)["embed_dim"]
        return width
    return load_shapes(model.name, text=False).embed_dim


def _check_data(config: Config, samples: SampleIndex) -> None:
    """Raises ValueError, before stage 0 takes hours, for options that the samples cannot meet."""
    collectives.on_main(lambda: read_excluded(samples, config.data.exclude))
    if config.has_stages and config.cluster.feature == "mean":
        samples.without_caption("cluster.feature=mean")
    most = max(config.clusters, default=1)
    begun = collectives.on_main(lambda: is_finished(Layout.of(config).export(0)))
    for name, options in config.trainings.items():
        reads, reader = options.objective.reads, options.reader(name)
        lacking = samples.left_out(reader, captions=reads.captions, attribute=reads.attribute)
        weights = SampleWeights.open(samples, config.data, options.plan, f"{name}.plan")
        draws = None if weights is None else weights.num_draws
        batch, policy = options.global_batch, options.plan.policy
        check_samples(name, batch, policy, most, len(samples), len(lacking), draws)
        if reads.digests and config.image_rows.enabled and name == "train":
            extras.check_checksums(samples)
        if reads.edits and not begun:  # each training surveys them too
            survey = partial(extras.survey, reads.edits, samples, config.data, name)
            collectives.on_main(survey)


def _stage(config: Config, context: Context, stage: int, variant: str, force: Force) -> None:
    """Trains, exports and evaluates one stage of MCL or of a control (stage 0 may be given)."""
    if stage or config.base is not None:
        train_stage(config, context, stage=stage, variant=variant, force=force)
    path = export.stage(config, context, stage=stage, variant=variant, force=force)
    _evaluate(config, context, variant, {f"stage_{stage}": path})


def _join(config: Config, context: Context, variant: str, force: Force) -> None:
    """Joins the stages of MCL or of a control by concatenation and soup, and evaluates both.

    Nothing happens where stage 0 is all there is.
    """
    if not config.has_stages:
        return
    joined = export.join(config, context, variant=variant, force=force)
    _evaluate(config, context, variant, joined)


def _evaluate(config: Config, context: Context, variant: str, named: Mapping[str, Path]) -> None:
    """Evaluates encoders of MCL or of a control, given by name, but for those that
    ``eval.encoders`` leaves out. Stage 0 is what all are compared with."""
    layout, wanted = Layout.of(config, variant), config.eval.encoders
    chosen = {
        layout.model_name(name): path
        for name, path in named.items()
        if wanted is None or name in ("stage_0", *wanted)
    }
    if chosen:
        evaluation.evaluate(config, context, chosen, path=layout.results)


# --- within a training --------------------------------------------------------------------------


def train_stage(
    config: Config, context: Context, *, stage: int, variant: str = "mcl", force: Force = False
) -> Path:
    """The verb ``train``, with the evaluations that its options ask for; returns its directory."""
    evaluate = None
    options = config.base if stage == 0 else config.train
    if options is not None and options.evaluate.every is not None:
        benchmarks, choices = _benchmarks(config, options), {}
        if (metric := options.evaluate.metric) is not None:
            decides = metric.partition("/")[0]
            choices[decides] = f"the checkpoint or the end of stage {stage} (evaluate.metric)"
            rows = collectives.on_main(lambda: results.read(Layout.of(config).results))
            base = [row for row in rows if row.model == "stage_0"]
            results.check_unseen(base, [decides], choices[decides])
        evaluate = partial(_figures, config, context, stage, variant, benchmarks, choices)
    return train.run(config, context, stage=stage, variant=variant, force=force, evaluate=evaluate)


def _benchmarks(config: Config, options: TrainConfig) -> dict[str, BenchmarkConfig]:
    """The benchmarks that a training is evaluated on; ValueError for names that are not there."""
    suite, how = config.eval.suite, options.evaluate
    names = how.suite or list(suite)
    needed = names if how.metric is None else [*names, how.metric.partition("/")[0]]
    if how.every is not None and not names:
        raise ValueError("evaluate.every is set, and eval.suite has no benchmark: set eval.suite")
    if lacking := [name for name in needed if name not in suite or name not in names]:
        raise ValueError(
            f"evaluate names the benchmark {lacking[0]!r}: wanted one of "
            f"{', '.join(names if lacking[0] in suite else suite) or 'eval.suite, which is empty'}"
        )
    if how.metric is not None and how.mode == "max":
        if evaluator(suite[how.metric.partition("/")[0]].kind).is_loss:
            raise ValueError(
                f"evaluate.metric={how.metric} is a loss, of which the smaller one is better, and "
                "evaluate.mode is max: set it to min"
            )
    return {name: suite[name] for name in names}


def _figures(
    config: Config,
    context: Context,
    stage: int,
    variant: str,
    benchmarks: Mapping[str, BenchmarkConfig],
    choices: Mapping[str, str],
    step: int,
) -> dict[str, float]:
    """Figures, as BENCHMARK/METRIC, of the checkpoint of a step, the same on all ranks."""
    folder = Layout.of(config, variant).train(stage) / "evaluations"
    encoder, name = folder / "encoder", f"step_{step:08d}"
    collectives.on_main(
        lambda: export.write_step(config, stage, variant, step=step, directory=encoder)
    )
    path = folder / "results.jsonl"
    evaluation.evaluate(
        config, context, {name: encoder}, benchmarks=benchmarks, path=path, choices=choices
    )
    rows = collectives.on_main(lambda: results.read(path))
    shown = [r for r in rows if r.model == name and r.protocol.get("level") != "detail"]
    return {f"{row.benchmark}/{row.metric}": row.value for row in shown}
