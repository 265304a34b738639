"""An encoder's image half as a vision tower for LLaVA.

LLaVA reads the tokens of a single state, that before the last block (`vision_feature_layer=-2`). A
plain ViT is written as transformers' `CLIPVisionModel`, under the names of its version 4, which
LLaVA's own code pins; version 5 reads them too, but writes names without the prefix, and version 4
then fills every tensor at random, with a warning only. A joined encoder is a `StagesVisionModel`
(`models/transformers_stages.py`), whose stages LLaVA reads in one of two ways:

- one by one, in transformers 5: with `vision_feature_layer=[0, 1, 2]` its LLaVA reads the states of
  three stages, and joins their channels;
- joined, as the state -2: transformers 4.37 and LLaVA's own code read one state alone. The
  projector's width is the tower's `hidden_size`, which must be told then: `num_stages * width`.

transformers 4.37 does not follow the `auto_map` of a tower in LLaVA's configuration: every process
loads the tower's code first (`AutoConfig.from_pretrained(TOWER, trust_remote_code=True)`). LLaVA's
own code loads a tower by `CLIPVisionModel`, which fills a joined one at random, with a warning
only; that line of its `clip_encoder.py` must be `AutoModel.from_pretrained(TOWER,
trust_remote_code=True, hidden_size=...)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mclclip import files
from mclclip.export import certificate, stages_layout, transformers_layout
from mclclip.export.certificate import Certificate
from mclclip.export.image_pixels import add_processor
from mclclip.export.target import Material, Source
from mclclip.models import config_check, transformers_encoder, weights
from mclclip.models.model import Model, unit
from mclclip.run import artifacts
from mclclip.run.layout import Layout

_PREFIX = "vision_model."


def write(source: Source, out: Path) -> None:
    """Writes the tower. Raises ValueError for towers other than open_clip's plain ViT, and where it
    has one block, before which there is no state."""
    config_check.library()
    if source.stages[0].num_blocks < 2:
        raise ValueError(
            f"{source.directory} has one block, and LLaVA reads the state before the last block: "
            "convert a model of two blocks or more"
        )
    if source.is_concat:
        described = stages_layout.vision_configuration(source)
        stages_layout.write_folder(source, out, described, stages_layout.vision_tensors(source))
    else:
        _write_single(source, out)
    add_processor(out)


def _write_single(source: Source, out: Path) -> None:
    model = source.single("transformers' CLIPModel")
    found = transformers_layout.tensors(weights.read_tensors(source.weights))
    whole = transformers_layout.config(model.config["model_cfg"], found)
    described = whole["vision_config"] | {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "torch_dtype": "float32",
    }
    look = transformers_layout.preprocessor(model.config["preprocess_cfg"])
    for name, tree in ((transformers_encoder.CONFIG, described),
                       (transformers_encoder.PREPROCESSOR, look)):  # fmt: skip
        files.write_bytes(out / name, json.dumps(tree, indent=2).encode())
    kept = {name: tensor.float() for name, tensor in found.items() if name.startswith(_PREFIX)}
    weights.write_tensors(out / transformers_layout.WEIGHTS, kept)


class _Own:
    """The state before the last block of every stage, by our own code."""

    def __init__(self, stages: list[Model]) -> None:
        self.stages = stages

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, S, tokens, width], every token at unit length."""
        states = [stage.encode_trunk(images, stage.num_blocks - 1) for stage in self.stages]
        return unit(torch.stack(states, dim=1))


class _Other:
    """The same by a model of transformers, asked as its LLaVA asks it."""

    def __init__(self, model: Any, layers: list[int]) -> None:
        self.model, self.layers = model.eval(), layers

    @torch.no_grad()
    def encode_image(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, S, tokens, width], every token at unit length."""
        found = self.model(images, output_hidden_states=True, return_dict=True).hidden_states
        return unit(torch.stack([found[layer] for layer in self.layers], dim=1))


def certify(source: Source, out: Path, material: Material) -> list[Certificate]:
    """The states that LLaVA reads, in transformers; a note says how many trained blocks they
    see."""
    transformers = config_check.library()
    if source.is_concat:
        other = _Other(stages_layout.load(out), [*range(len(source.stages))])
        what = "StagesVisionModel"
    else:
        with transformers_encoder.silent(transformers):
            model, found = transformers.CLIPVisionModel.from_pretrained(
                str(out), output_loading_info=True, local_files_only=True
            )
        if missing := [name for name in found["missing_keys"] if "position_ids" not in name]:
            raise ValueError(f"transformers finds no {missing[0]} in the weights of the tower")
        other, what = _Other(model, [-2]), "CLIPVisionModel"
    pixels = {n: source.encoder.preprocess_val(image) for n, image in material.images.items()}
    runtime = f"transformers {transformers.__version__}, {what}, tokens before the last block"
    notes = [_seen(source)]
    if source.encoder.stage_weights:
        notes.append(
            "LLaVA joins the states of the stages as they are: the learned weights of the stages "
            "are of the features alone, and its projector learns weights of its own"
        )
    return [certificate.compare_images(_Own(source.stages), other, runtime, pixels, notes=notes)]


def _seen(source: Source) -> str:
    """How many trained blocks the state before the last block sees, in a sentence."""
    num_blocks, trained = source.stages[0].num_blocks, _trained_blocks(source)
    if trained is None:
        return (
            "LLaVA reads the state before the last block. Whether it sees a trained block is not "
            "known, since the base is not in the run directory of the export"
        )
    if trained == 0:
        return (
            f"no block differs from the base's (of {num_blocks}): with this tower LLaVA sees what "
            "it sees with the base"
        )
    if trained == 1:
        return (
            "LLaVA reads the state before the last block, which is the base's: it sees none of the "
            f"{trained} trained blocks (of {num_blocks}). Train more blocks (lock.image_blocks)"
        )
    return (
        f"LLaVA reads the state before the last block: it sees {trained - 1} of the {trained} "
        f"trained blocks (of {num_blocks})"
    )


def _trained_blocks(source: Source) -> int | None:
    """Number of last blocks that differ from the base's, or among the stages; None if unknown."""
    num_blocks = source.stages[0].num_blocks
    if source.encoder.variant is not None:
        return num_blocks - source.encoder.num_trunk_blocks
    base = _base_tensors(source)
    if base is None:
        return None
    own = source.stages[0].exported.state_dict()
    differing = {
        name.removeprefix("visual.")
        for name, tensor in own.items()
        if name.startswith("visual.")
        and (name not in base or not weights.same_bits(tensor.cpu(), base[name]))
    }
    return num_blocks - source.stages[0].layout.count_without(differing)


def _base_tensors(source: Source) -> dict[str, Tensor] | None:
    """The weights of the base in the run directory, if the export was made from them."""
    if source.run_dir is None:
        return None
    base = Layout(source.run_dir).export(0)
    if not artifacts.is_finished(base):
        return None
    if weights.base_digest(source.directory) != weights.base_digest(base):
        return None
    return weights.read_tensors(weights.find_weights(base))
