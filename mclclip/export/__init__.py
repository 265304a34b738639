"""Verb: checkpoints -> exported models: one per stage, then the concat and the soup.

The export of a CLIP stage is an ordinary open_clip directory with safetensors; plain
`open_clip.create_model_and_transforms('local-dir:...')` loads it. An image encoder is exported as
`config.json` and safetensors. Later verbs and other people read exports, never checkpoints.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip import checkpoint, files
from mclclip.config import Config, to_tree
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import Sample, TarDataset
from mclclip.export import held_out
from mclclip.models import soup, weights
from mclclip.models.clip import is_without_weights
from mclclip.models.encoder import save_concat
from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora, merge_lora
from mclclip.models.model import Model
from mclclip.models.options import ModelConfig
from mclclip.models.stage_weights import Variant
from mclclip.ranks import collectives
from mclclip.ranks.finiteness import not_finite
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, Force
from mclclip.run.layout import Layout
from mclclip.train.loop import MODEL
from mclclip.train.options import TrainConfig

log = logging.getLogger("mclclip")


def stage(
    config: Config, context: Context, *, stage: int, variant: str = "mcl", force: Force = False
) -> Path:
    """Exports the last checkpoint of a stage, or the given encoder for stage 0.

    Returns the directory; skips a finished export. Raises FileNotFoundError where the training has
    not finished, and RuntimeError where its checkpoint is missing, damaged or of another model.
    """
    return collectives.on_main(lambda: _stage(config, stage, variant, force))


def join(
    config: Config, context: Context, *, variant: str = "mcl", force: Force = False
) -> dict[str, Path]:
    """Joins the exports of stages 0 to N; returns the directories by name.

    The names are `concat_raw`, `concat_stage_norm` and `concat_weighted`, as configured, and
    `soup_uniform`. Raises ValueError where stage 0 is all there is, for joining takes at least two
    encoders, and FileNotFoundError where a stage has no export yet; for `concat_weighted` also the
    errors of `held_out.read`.
    """
    joined = collectives.on_main(lambda: _join(config, variant, force))
    if "weighted" in config.export.concat:
        joined["concat_weighted"] = _weighted(config, context, variant, force)
    return joined


# --- one stage -------------------------------------------------------------------------------


def _stage(config: Config, stage: int, variant: str, force: Force) -> Path:
    layout = Layout.of(config, variant)
    trained = stage > 0 or config.base is not None
    options = config.train if stage > 0 or config.base is None else config.base
    fields: dict[str, Any] = {"stage": stage, "variant": layout.variant if stage else "mcl"}
    if trained:
        inputs = {"train": artifacts.read_manifest(layout.train(stage), "train").digest}
        if options.ema_decay is not None:
            fields["ema"] = config.export.ema
    else:
        fields |= _given(config)
        inputs = {}
        if config.model.pretrained is None and is_without_weights(config.model.name):
            log.warning("stage 0 has random weights: model.pretrained and base are null")
    if stage > 0:
        inputs["base"] = artifacts.read_manifest(layout.export(0), "export").digest

    def write(directory: Path) -> dict[str, Any]:
        model = _base(config, layout, stage)
        if trained:
            averaged = config.export.ema and options.ema_decay is not None
            state = checkpoint.trained_state(layout.train(stage), averaged=averaged)
            _fill(model, state, layout.train(stage), options)
        own = stage == 0 or config.trained_model is not None or options.start == "random"
        model.save(directory, None if own else weights.base_digest(layout.export(0)))
        return {"parameters": sum(p.numel() for p in model.parameters())}

    return written(layout.export(stage), "export", fields, inputs, force, write)


def write_step(config: Config, stage: int, variant: str, *, step: int, directory: Path) -> None:
    """Writes the encoder at a saved step of a training that may not have finished, without a
    manifest, in place of what was in ``directory``. One rank calls it; errors as of ``stage``."""
    layout = Layout.of(config, variant)
    options = config.train if stage > 0 or config.base is None else config.base
    checkpoints = layout.train(stage) / "checkpoints"
    state = checkpoint.load_model_state(checkpoints, step)
    if options.ema_decay is not None and config.export.ema:
        state |= checkpoint.load_model_state(checkpoints, step, part="ema")
    model = _base(config, layout, stage)
    _fill(model, state, layout.train(stage), options)
    if directory.exists():
        shutil.rmtree(directory)
    model.save(directory)


def _given(config: Config) -> dict[str, Any]:
    """Fields of the manifest that determine an encoder which is not trained here."""
    model: ModelConfig = config.model
    fields: dict[str, Any] = {"name": model.name, "pretrained": model.pretrained}
    if not model.text:
        fields["text"] = False
    if isinstance(model.name, str):
        path = Path(model.name.removeprefix("local-dir:"))
        if path.is_dir():  # identified by content, not by path
            fields["name"] = files.digest_file(weights.find_weights(path))
        elif path.is_file():
            fields["name"] = files.digest_json(files.read_json(path))
    if model.pretrained is None:
        fields["seed"] = config.seed  # the weights are random, unless a directory brings them
    elif Path(model.pretrained).is_file():
        fields["pretrained"] = files.digest_file(Path(model.pretrained))
    return fields


def _base(config: Config, layout: Layout, stage: int) -> Model:
    given = config.model if stage == 0 else config.trained_model
    if given is None:
        return load_towers(layout.export(0))
    return load_towers(given.name, given.pretrained, text=given.text, seed=config.seed)


def _fill(
    model: Model, state: dict[str, Tensor], train_directory: Path, options: TrainConfig
) -> None:
    """Loads the ``state`` of a checkpoint of a training into ``model``; merges adapters."""
    directory = train_directory / "checkpoints"
    state = _model_part(state, model.part, directory)
    if options.lora is not None:
        model.lock(**to_tree(options.lock))
        add_lora(model, **to_tree(options.lora), seed=0)
    try:
        model.exported.load_state_dict(state, strict=True)
    except RuntimeError as error:
        cause = " ".join(str(error).split())[:200]
        raise RuntimeError(
            f"the checkpoint in {directory} does not fit the model ({cause}): was the model "
            "configuration changed after training?"
        ) from error
    if options.lora is not None:
        merge_lora(model)


def _model_part(state: dict[str, Tensor], part: str, directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint that an export holds: the model's ``part``, without projector
    and objective."""
    prefix = f"{MODEL}.{part}."
    found = {n.removeprefix(prefix): tensor for n, tensor in state.items() if n.startswith(prefix)}
    if not found:
        raise RuntimeError(f"the checkpoint in {directory} holds no part {part!r} of a model")
    return found


# --- all stages ------------------------------------------------------------------------------


def _join(config: Config, variant: str, force: Force) -> dict[str, Path]:
    if not config.has_stages:
        raise ValueError(
            "num_stages=0 leaves stage 0 alone, and joining takes at least two encoders: export it "
            "with 'mclclip export --stage 0', or train stages with num_stages=1 or more"
        )
    layout = Layout.of(config, variant)
    stages, inputs = _stages(config, layout)
    writers: dict[str, Callable[[Path], dict[str, Any]]] = {
        f"concat_{kind}": partial(_concat, stages, kind)
        for kind in config.export.concat
        if kind != "weighted"
    }
    if config.export.soup:
        writers["soup_uniform"] = partial(_soup, config, layout, [*stages.values()], bool(force))
    joined = {}
    for name, write in writers.items():
        kind = name.partition("_")[0]
        path = layout.joined(name)
        joined[name] = written(path, kind, {"name": name}, inputs, force, write)
    return joined


def _stages(config: Config, layout: Layout) -> tuple[dict[str, Path], dict[str, str]]:
    """The finished exports of all stages and their digests, by name."""
    stages = {f"stage_{number}": layout.export(number) for number in range(config.num_stages + 1)}
    return stages, {n: artifacts.read_manifest(p, "export").digest for n, p in stages.items()}


def _concat(stages: dict[str, Path], variant: Variant, directory: Path) -> dict[str, Any]:
    record = save_concat([*stages.values()], variant, directory, [*stages])
    return {"num_trunk_blocks": record["num_trunk_blocks"], **record["num_parameters"]}


def _weighted(config: Config, context: Context, variant: str, force: Force) -> Path:
    """The concat whose stages are weighted by a fit on held-out pairs, which its manifest names.

    The ranks share the work on features; the first one writes.
    """
    layout, name = Layout.of(config, variant), "concat_weighted"

    def prepare() -> tuple[dict[str, Path], dict[str, Any], held_out.Pairs, bool]:
        (stages, inputs), pairs = _stages(config, layout), held_out.read(config)
        made: dict[str, Any] = {
            "kind": "concat",
            "config": {"name": name, "captions": config.export.weights.captions},
            "inputs": inputs | {"held_out": pairs.digest},
        }
        there = Artifact.open(layout.joined(name), **made, force=force, write=False)
        return stages, made, pairs, there.finished

    stages, made, pairs, finished = collectives.on_main(prepare)
    learned = None if finished else held_out.fit(config, context, stages, pairs)

    def write(directory: Path) -> dict[str, Any]:
        paths = [*stages.values()]
        record = save_concat(paths, "weighted", directory, [*stages], learned)
        counts = {"held_out": pairs.record(), "learned": record["learned"]}
        return {"num_trunk_blocks": record["num_trunk_blocks"], **record["num_parameters"]} | counts

    kind, fields, inputs = made["kind"], made["config"], made["inputs"]
    return collectives.on_main(
        lambda: written(layout.joined(name), kind, fields, inputs, force, write)
    )


def _soup(
    config: Config, layout: Layout, stages: list[Path], force: bool, directory: Path
) -> dict[str, Any]:
    averaged = soup.save_uniform_soup(stages, directory, force)
    counts = {"ingredients": len(stages), "averaged_tensors": averaged}
    if soup.needs_statistics(stages):
        model = load_towers(directory)
        images = _images(config, SampleIndex.open(layout.index), model)
        counts["statistics_samples"] = soup.estimate_statistics(model, images)
        log.info("estimated the batch norms of the soup on %d images", counts["statistics_samples"])
        model.save(directory, weights.base_digest(directory))
    return counts


def _images(config: Config, index: SampleIndex, model: Model) -> Iterator[Tensor]:
    """Yields batches of images, drawn by the seed from the index, to estimate statistics on."""
    ids = np.setdiff1d(np.arange(len(index)), index.bad_ids(), assume_unique=True)
    order = np.random.default_rng([config.seed, 3]).permutation(ids)
    ids = order[: soup.STATISTICS_IMAGES].tolist()
    dataset = TarDataset(
        index,
        transform=model.preprocess_val,
        reads_captions=False,
        max_image_pixels=config.data.max_image_pixels,
        max_open_files=config.data.max_open_files,
        check_pixels=config.data.verify == "full",
        remote=config.data.remote,
    )
    for start in range(0, len(ids), config.embed.batch_size):
        samples = dataset.__getitems__(ids[start : start + config.embed.batch_size])
        good = [sample.views[0] for sample in samples if isinstance(sample, Sample)]
        if good:
            yield torch.stack(good)


def written(
    directory: Path,
    kind: str,
    fields: dict[str, Any],
    inputs: dict[str, str],
    force: Force,
    write: Callable[[Path], dict[str, Any]],
) -> Path:
    """Writes an exported model unless it is finished, and returns its directory.

    ``write`` fills the directory and returns counts for the manifest. Raises RuntimeError, and
    removes the directory, where the weights are not finite.
    """
    artifact = Artifact.open(directory, kind=kind, config=fields, inputs=inputs, force=force)
    if artifact.finished:
        log.info("%s is finished: skipped", directory)
        return directory
    files.remove_leftovers(directory)
    counts = write(directory)
    written = sorted(directory.glob("*.safetensors"))
    tensors = {name: t for path in written for name, t in weights.read_tensors(path).items()}
    if found := not_finite(tensors):
        shutil.rmtree(directory)
        raise RuntimeError(
            f"{directory} is not exported: {len(found)} of {len(tensors)} tensors of its weights "
            f"are not finite, such as {found[0]}. The encoder or training it comes from has "
            "diverged: train it again with a lower lr, in another run directory or with --force"
        )
    digests = {path.name: files.digest_file(path) for path in written}
    if (joined := directory / weights.CONCAT).is_file():  # how stages are joined, and their weights
        digests[joined.name] = files.digest_file(joined)
    config = weights.read_config(directory)
    artifact.finish(
        counts,
        content_digest=files.digest_json([config, digests]),
        records=files.records_of(directory, *weights.files_of(directory)),
    )
    log.info("wrote %s", directory)
    return directory
