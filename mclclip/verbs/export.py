"""Verb ``export``: checkpoints -> exported models: one per stage, then the concat and the soup.

A CLIP is exported as an open_clip directory with safetensors, which plain
`open_clip.create_model_and_transforms('local-dir:...')` loads; an image encoder as `config.json`
and safetensors. Later verbs and other people read exports, never checkpoints.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.checkpoint import step_files
from mclclip.config import Config, TrainConfig
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.export import ExportStep
from mclclip.models import soup, weights
from mclclip.models.clip import is_without_weights
from mclclip.models.encoder import Encoder, counts_of, save_concat
from mclclip.models.encoder_names import identify_encoder
from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora, merge_lora
from mclclip.models.model import Model
from mclclip.models.options import Variant
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths
from mclclip.run.steps import make_artifact
from mclclip.train.loop import MODEL
from mclclip.util import files
from mclclip.util.options import with_prefix
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")
_SHORT = ("a photo of a dog", "two red cups on a table, seen from above")  # see `_report_context`


def stage(
    config: Config,
    context: Context,
    *,
    stage: int,
    variant: str = "mcl",
    force: Remake = Remake.NOTHING,
) -> Path:
    """Exports the last checkpoint of a stage, or as stage 0 the encoder of ``model`` if it is not
    trained; returns the directory.

    Raises FileNotFoundError if the training has not finished, and RuntimeError if its checkpoint is
    missing, damaged or of another model.
    """
    return collectives.on_main(lambda: _export_stage(config, stage, variant, force))


def join(
    config: Config, context: Context, *, variant: str = "mcl", force: Remake = Remake.NOTHING
) -> dict[str, Path]:
    """Joins the exports of stages 0 to N; returns the directories by name.

    The names are `concat_raw`, `concat_stage_norm` and `soup_uniform`, as far as ``export`` asks
    for them. Raises ValueError if there is no stage but stage 0, since a join needs two encoders,
    and FileNotFoundError if a stage has no export yet. A join of fewer stages, of before
    ``num_stages`` was raised, is moved aside and made again.
    """
    return collectives.on_main(lambda: _join(config, variant, force))


# --- one stage -------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageExport(ExportStep):
    """The encoder of a stage.

    ema    True: the average of the weights is exported; None: the training computed no average
    model  the fields that determine an encoder that is not trained here; None for trained ones
    seed   of random weights; None for others
    """

    kind = "export"
    stage: int
    variant: str
    ema: bool | None
    model: Mapping[str, Any] | None
    seed: int | None


def _export_stage(config: Config, stage: int, variant: str, force: Remake) -> Path:
    layout, options = RunPaths.of(config, variant), _options(config, stage)
    is_trained = stage > 0 or config.base is not None
    ema, encoder_fields, seed, inputs = None, None, None, dict[str, str]()
    if is_trained:
        inputs["train"] = artifacts.read_manifest(layout.train(stage), "train").digest
        ema = None if options.ema_decay is None else config.export.ema
    else:
        encoder_fields = identify_encoder(config.model)
        has_random = not config.model.pretrained or bool(config.model.text_rows)
        seed = config.seed if has_random else None
        if config.model.pretrained is None and is_without_weights(config.model.name):
            beside = "" if config.model.image_weights is None else " beside model.image_weights"
            log.warning("stage 0 has random weights%s: model.pretrained and base are null", beside)
    if stage > 0:
        inputs["base"] = artifacts.read_manifest(layout.export(0), "export").digest

    def write(directory: Path) -> dict[str, Any]:
        if is_trained:
            state = step_files.trained_state(layout.train(stage), averaged=bool(ema))
            model = _load_stage(config, layout, stage, state)
        else:
            model = _load_start(config, layout, stage)
            if config.model.long_context:
                _report_context(config, model)
        # Soups mix models of one base: a stage that started from stage 0 records stage 0.
        is_base = stage == 0 or config.trained_model is not None or options.start == "random"
        model.save(directory, None if is_base else weights.base_digest(layout.export(0)))
        return counts_of(Encoder([model]))

    step = StageExport(stage, layout.variant if stage else "mcl", ema, encoder_fields, seed)
    make_artifact(step, layout.export(stage), (inputs, write), force)
    return layout.export(stage)


def write_step(config: Config, stage: int, variant: str, *, step: int, directory: Path) -> None:
    """Writes the encoder at a saved ``step`` of a training, which may go on, into ``directory``,
    and replaces its content. Writes no manifest. One rank calls it; errors as of ``stage``."""
    layout = RunPaths.of(config, variant)
    checkpoints = layout.train(stage) / "checkpoints"
    state = step_files.load_model_state(checkpoints, step)
    if _options(config, stage).ema_decay is not None and config.export.ema:
        state |= step_files.load_model_state(checkpoints, step, part="ema")
    model = _load_stage(config, layout, stage, state)
    if directory.exists():
        shutil.rmtree(directory)
    model.save(directory)


def _options(config: Config, stage: int) -> TrainConfig:
    """Returns the options of a stage's training: ``base`` for a trained stage 0, else ``train``."""
    return config.train if stage > 0 or config.base is None else config.base


def _load_start(config: Config, layout: RunPaths, stage: int) -> Model:
    """Loads the model that a stage's training starts from; for stage 0 that of ``model``."""
    start = config.model if stage == 0 else config.trained_model
    if start is None:
        return load_towers(layout.export(0))
    fields = {"image_weights": start.image_weights, **start.tower_arguments}
    return load_towers(start.name, start.pretrained, seed=config.seed, **fields)


def _report_context(config: Config, longer: Model) -> None:
    """Logs the length of the stretched context. Without a causal mask it changes the features of
    short texts too; then a warning has the cosines of some with those before."""
    context = longer.config["model_cfg"]["text_cfg"]["context_length"]
    log.info("stage 0: texts have up to %d tokens", context)
    if longer.text_tower.attn_mask is not None:
        return
    shorter = load_towers(config.model.name, config.model.pretrained, seed=config.seed)
    with torch.inference_mode():
        texts = [m.encode_text(m.tokenizer([*_SHORT]), normalize=True) for m in (shorter, longer)]
    log.warning(
        "stage 0: the text tower has no causal mask, so that short texts have other features with "
        "the longer context: cosines with those before are %.4f and above",
        (texts[0] * texts[1]).sum(dim=1).min(),
    )


def _load_stage(config: Config, layout: RunPaths, stage: int, state: dict[str, Tensor]) -> Model:
    """Loads a stage's model with the ``state`` of a checkpoint, and merges LoRA adapters.

    A checkpoint also holds projector and objective, which are not exported.
    """
    model, options = _load_start(config, layout, stage), _options(config, stage)
    directory = layout.train(stage) / "checkpoints"
    model_state = with_prefix(state, f"{MODEL}.{model.part}.")
    if not model_state:
        raise RuntimeError(f"the checkpoint in {directory} holds no part {model.part!r} of a model")
    if options.lora is not None:
        model.lock(**asdict(options.lock))
        add_lora(model, **asdict(options.lora), seed=0)
    try:
        model.exported.load_state_dict(model_state, strict=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"the checkpoint in {directory} does not fit the model ({files.message_of(error)}): "
            "was the model configuration changed after training?"
        ) from error
    if options.lora is not None:
        merge_lora(model)
    return model


# --- all stages ------------------------------------------------------------------------------


def _join(config: Config, variant: str, force: Remake) -> dict[str, Path]:
    if not config.has_stages:
        raise ValueError(
            "num_stages=0 leaves stage 0 alone, and joining takes at least two encoders: export it "
            "with 'mclclip export --stage 0', or train stages with num_stages=1 or more"
        )
    layout = RunPaths.of(config, variant)
    stages = {f"stage_{number}": layout.export(number) for number in range(config.num_stages + 1)}
    inputs = {n: artifacts.read_manifest(p, "export").digest for n, p in stages.items()}
    steps: dict[str, tuple[ExportStep, Callable[[Path], dict[str, Any]]]] = {
        f"concat_{kind}": (Concat(kind), partial(_write_concat, stages, kind))
        for kind in config.export.concat
    }
    if config.export.soup:
        write_soup = partial(_write_soup, config, layout, [*stages.values()], force)
        steps["soup_uniform"] = UniformSoup(), write_soup
    for name, (step, write) in steps.items():
        directory, how = layout.joined(name), force
        joined = artifacts.read_identity(directory).get("inputs", inputs)
        if force is Remake.NOTHING and joined.items() < inputs.items():
            log.info("%s joins fewer stages than the run has now", directory)
            how = Remake.UNFIT
        make_artifact(step, directory, (inputs, write), how)
    return {name: layout.joined(name) for name in steps}


@dataclass(frozen=True)
class Concat(ExportStep):
    """An encoder whose features are those of all stages, one after another."""

    kind = "concat"
    variant: Variant


@dataclass(frozen=True)
class UniformSoup(ExportStep):
    """The mean of the weights of all stages."""

    kind = "soup"


def _write_concat(stages: dict[str, Path], variant: Variant, directory: Path) -> dict[str, Any]:
    record = save_concat([*stages.values()], variant, directory, [*stages])
    return {"num_trunk_blocks": record["num_trunk_blocks"], **record["num_parameters"]}


def _write_soup(
    config: Config, layout: RunPaths, stages: list[Path], force: Remake, directory: Path
) -> dict[str, Any]:
    averaged = soup.save_uniform_soup(stages, directory, force is not Remake.NOTHING)
    counts = {"ingredients": len(stages), "averaged_tensors": averaged}
    if norms := soup.differing_norms(stages):
        model = load_towers(directory)
        images = _images(config, SampleIndex.open(layout.index), model)
        counts["statistics_samples"] = soup.estimate_statistics(model, norms, images)
        log.info("estimated the batch norms of the soup on %d images", counts["statistics_samples"])
        model.save(directory, weights.base_digest(directory))
    return counts


def _images(config: Config, index: SampleIndex, model: Model) -> Iterator[Tensor]:
    """Yields batches [B, C, H, W] of images that the seed draws from the index, at most
    ``soup.STATISTICS_IMAGES`` together."""
    ids = np.setdiff1d(np.arange(len(index)), index.bad_ids(), assume_unique=True)
    order = np.random.default_rng([config.seed, 3]).permutation(ids)
    drawn = order[: soup.STATISTICS_IMAGES].tolist()
    dataset = TarDataset(index, config.data, model.preprocess_val)
    for start in range(0, len(drawn), config.embed.batch_size):
        samples = dataset.__getitems__(drawn[start : start + config.embed.batch_size])
        good = [sample.views[0] for sample in samples if isinstance(sample, Sample)]
        if good:
            yield torch.stack(good)
