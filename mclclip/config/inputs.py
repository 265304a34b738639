"""Checks, before the first verb runs, that the files and samples that a run reads exist and fit."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from mclclip.config.options import Config
from mclclip.data import extras
from mclclip.data.bytes import excluded_keys, read_excluded
from mclclip.data.epoch_plan import check_samples as check_numbers
from mclclip.data.labels import SampleWeights
from mclclip.data.sample_index import SampleIndex
from mclclip.data.text_rows import width_of
from mclclip.eval.protocols import reading_texts
from mclclip.models.encoder_names import check_encoder
from mclclip.models.loading import has_texts, load_towers, model_tokenizer
from mclclip.models.preparing import refuse_folded_norms
from mclclip.ranks import collectives
from mclclip.run.artifacts import RunPaths, is_finished
from mclclip.util.options import prefix_errors

log = logging.getLogger("mclclip")


def check(config: Config) -> None:
    """Raises ValueError or FileNotFoundError for files that are wrong or missing.

    These are the file of excluded samples, weights of samples and of image towers, text rows,
    teachers, and tokenizers.
    Warns if benchmarks will give figures of chance, since no training has trained the text tower
    that they use.
    """
    excluded_keys(config.data.exclude)
    if config.text_rows:
        width_of(config.text_rows + config.eval.text_rows)
    for name, options in config.trainings.items():
        if (weights := options.plan.weights) and not Path(weights).is_file():
            raise FileNotFoundError(f"{name}.plan.weights={weights}: there is no such file")
        model = config.model_of(name)
        if model.image_weights is not None:
            towers = load_towers(
                model.name, image_weights=model.image_weights, **model.tower_arguments
            )
            towers.lock(**options.model_arguments()["lock"])
            refuse_folded_norms(towers.train())
    for teacher, parts in config.teachers.items():
        with prefix_errors(f"objective.teacher={teacher}"):
            check_encoder(teacher, text="text_features" in parts)
    suite, trained = config.eval.suite, config.trained_model
    with_text = reading_texts(suite)
    _check_tokenizers(config, reads_text=bool(with_text))
    trains_text = config.train.objective.reads.captions
    if with_text and trained is not None and trained.pretrained is None and not trains_text:
        log.warning(
            "%s compare images with texts, but no stage trains the text tower of trained_model: "
            "its figures will be those of chance (launch/recipes/lit.yaml trains one)",
            ", ".join(with_text),
        )


def _check_tokenizers(config: Config, reads_text: bool) -> None:
    """Raises FileNotFoundError if texts will be read and a model's tokenizer cannot be fetched."""
    trainings = config.trainings.items()
    models = [config.model_of(n) for n, each in trainings if each.objective.reads.captions]
    if reads_text or (config.has_stages and config.stored_texts):
        models.append(config.model)
    first = RunPaths.of(config).export(0)  # stage 0's export has a copy of the tokenizer's files
    names = [
        first if model is config.model and is_finished(first) else model.name
        for model in models
        if model.text and not model.text_rows
    ]
    for number, name in enumerate(names):
        if name not in names[:number] and has_texts(name):
            model_tokenizer(name)


def check_samples(config: Config, index: SampleIndex) -> None:
    """Raises ValueError for options that the samples of the index cannot meet, such as too large a
    batch, before stage 0 takes hours. All ranks call it."""
    collectives.on_main(lambda: read_excluded(index, config.data.exclude))
    if config.has_stages and config.cluster.feature == "mean":
        index.without_caption("cluster.feature=mean")
    most = max(config.clusters, default=1)
    has_base = collectives.on_main(lambda: is_finished(RunPaths.of(config).export(0)))
    for name, options in config.trainings.items():
        reads, reader = options.objective.reads, options.reader(name)
        lacking = index.left_out(reader, captions=reads.captions, attribute=reads.attribute)
        weights = SampleWeights.open(index, config.data, options.plan, f"{name}.plan")
        draws = None if weights is None else weights.num_draws
        batch, policy = options.global_batch, options.plan.policy
        check_numbers(name, batch, policy, most, len(index), len(lacking), draws)
        if extras.PICTURE_DIGEST in reads.digests and config.image_rows.enabled and name == "train":
            extras.check_checksums(index)
        if reads.edits and not has_base:  # later, the training itself surveys the captions
            survey = partial(extras.report_edits, reads.edits, index, config.data, name)
            collectives.on_main(survey)
