"""Writes an encoder's image half as a vision tower for LLaVA.

LLaVA reads the tokens of a single state, that before the last block (`vision_feature_layer=-2`). A
plain ViT becomes transformers' `CLIPVisionModel`, with the tensors' names of version 4, which
LLaVA's own code requires. (Version 5 reads these names too, but writes others, and version 4 would
then draw every tensor at random, with only a warning.) A joined encoder becomes a
`StagesVisionModel` (`export/transformers_stages.py`), which LLaVA can read in two ways:

- one stage after the other, in transformers 5: with `vision_feature_layer=[0, 1, 2]` its LLaVA
  reads the states of three stages, and joins their channels;
- all stages joined, as the state -2: transformers 4.37 and LLaVA's own code read only one state.
  The projector's width is the tower's `hidden_size`, which must then be `num_stages * width`.

transformers 4.37 ignores the `auto_map` of a tower in LLaVA's configuration: every process has to
load the tower's code first (`AutoConfig.from_pretrained(TOWER, trust_remote_code=True)`). LLaVA's
own code loads towers by `CLIPVisionModel`, which would draw a joined one at random, with only a
warning; that line of its `clip_encoder.py` must be `AutoModel.from_pretrained(TOWER,
trust_remote_code=True, hidden_size=...)`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from mclclip.data.text_rows import TextRows
from mclclip.export import certificate
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Source, hf
from mclclip.models import config_check, transformers_layout, weights
from mclclip.models.loading import load_towers
from mclclip.models.model import Model, unit
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths


def write(source: Source, out: Path) -> None:
    """Writes the tower. Raises ValueError for towers other than open_clip's plain ViT."""
    config_check.library()
    if source.is_concat:
        config, tensors = hf.joined_layout(source.encoder)
        hf.write_model(source, out, *hf.joined_tower_layout(config, tensors))
        return
    model = source.single("transformers' CLIPModel", rows=True)
    if isinstance(model.tokenizer, TextRows):
        model = _with_a_text_tower(model)
    config, tensors = transformers_layout.clip(model)
    tower = config["vision_config"] | {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "torch_dtype": "float32",
    }
    vision = {name: t for name, t in tensors.items() if name.startswith("vision_model.")}
    hf.write_model(source, out, tower, vision)


def _with_a_text_tower(model: Model) -> Model:
    """Returns the image tower of a model beside a text tower with random weights, which the layout
    of a `CLIPModel` has and LLaVA does not read."""
    text_cfg = {"context_length": 1, "vocab_size": 2, "width": 8, "heads": 1, "layers": 1}
    model_cfg = {**model.config["model_cfg"], "text_cfg": text_cfg}
    whole = load_towers({**model.config, "model_cfg": model_cfg})
    whole.visual.load_state_dict(model.visual.state_dict())
    return whole


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """Compares the states that LLaVA reads, in transformers.

    A state is [B, S, tokens, width], with every token at unit length. A note of the certificate
    says how many trained blocks the states depend on.
    """
    transformers = config_check.library()
    if source.is_concat:
        model, layers = hf.load_stages(out), [*range(len(source.encoder.stages))]
    else:
        model, layers = hf.load(transformers.CLIPVisionModel, out), [-2]

    @torch.no_grad()
    def exported_states(images: Tensor) -> Tensor:
        stages = source.encoder.stages
        states = [stage.encode_trunk(images, stage.num_blocks - 1) for stage in stages]
        return unit(torch.stack(states, dim=1))

    @torch.no_grad()
    def states(images: Tensor) -> Tensor:  # as LLaVA reads them
        hidden = model(images, output_hidden_states=True, return_dict=True).hidden_states
        return unit(torch.stack([hidden[layer] for layer in layers], dim=1))

    ours, theirs = (
        SimpleNamespace(encode_image=encode, preprocess_val=source.encoder.preprocess_val)
        for encode in (exported_states, states)
    )
    what = f"{type(model).__name__}, tokens before the last block"
    runtime = f"transformers {transformers.__version__}, {what}"
    notes = [trained_blocks_seen(source)]
    return [certificate.compare(ours, theirs, runtime, probes, notes=notes)]


def trained_blocks_seen(source: Source) -> str:
    """Returns a sentence on how many trained blocks the state before the last block depends on.

    Trained blocks begin with the first that differs among the stages of a joined encoder, or from
    stage 0 of the run.
    """
    model = source.encoder.stages[0]
    num_blocks = model.num_blocks
    if source.is_concat:
        trained = num_blocks - source.encoder.num_trunk_blocks
    else:
        folder = None if source.run_dir is None else RunPaths(source.run_dir).export(0)
        if (
            folder is None
            or not artifacts.is_finished(folder)
            or weights.base_digest(source.directory) != weights.base_digest(folder)
        ):
            return (
                "LLaVA reads the state before the last block. Whether it sees a trained block is "
                "not known, since the base is not in the run directory of the export"
            )
        base = weights.read_tensors(weights.find_weights(folder))
        differing = {
            name.removeprefix("visual.")
            for name, tensor in model.exported.state_dict().items()
            if name.startswith("visual.")
            and (name not in base or not weights.same_bits(tensor.cpu(), base[name]))
        }
        trained = num_blocks - model.layout.count_without(differing)
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


TARGET = ExportTarget(write, certify, card={"library_name": "transformers"})
