"""An encoder's image half as a vision tower for LLaVA.

LLaVA reads the tokens of a single state, that before the last block (`vision_feature_layer=-2`). A
plain ViT is written as transformers' `CLIPVisionModel`, under the names of its version 4, which
LLaVA's own code pins; version 5 reads them too, but writes names without the prefix, and version 4
then fills every tensor at random, with a warning only. A joined encoder is a `StagesVisionModel`
(`export/transformers_stages.py`), whose stages LLaVA reads in one of two ways:

- one by one, in transformers 5: with `vision_feature_layer=[0, 1, 2]` its LLaVA reads the states of
  three stages, and joins their channels;
- joined, as the state -2: transformers 4.37 and LLaVA's own code read one state alone. The
  projector's width is the tower's `hidden_size`, which must be given then: `num_stages * width`.

transformers 4.37 does not follow the `auto_map` of a tower in LLaVA's configuration: every process
loads the tower's code first (`AutoConfig.from_pretrained(TOWER, trust_remote_code=True)`). LLaVA's
own code loads a tower by `CLIPVisionModel`, which fills a joined one at random, with a warning
only; that line of its `clip_encoder.py` must be `AutoModel.from_pretrained(TOWER,
trust_remote_code=True, hidden_size=...)`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from mclclip.export import certificate
from mclclip.export.certificate import Certificate, Probes
from mclclip.export.targets import ExportTarget, Source, hf
from mclclip.models import config_check, transformers_layout, weights
from mclclip.models.model import unit
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths


def write(source: Source, out: Path) -> None:
    """Writes the tower. Raises ValueError for towers other than open_clip's plain ViT, and where it
    has one block, before which there is no state."""
    config_check.library()
    if source.encoder.stages[0].num_blocks < 2:
        raise ValueError(
            f"{source.directory} has one block, and LLaVA reads the state before the last block: "
            "convert a model of two blocks or more"
        )
    if source.is_concat:
        config, tensors = hf.joined_layout(source.encoder)
        hf.write_model(source, out, *hf.joined_tower_layout(config, tensors))
        return
    config, tensors = transformers_layout.clip(source.single("transformers' CLIPModel"))
    tower = config["vision_config"] | {
        "architectures": ["CLIPVisionModel"],
        "model_type": "clip_vision_model",
        "torch_dtype": "float32",
    }
    vision = {name: t for name, t in tensors.items() if name.startswith("vision_model.")}
    hf.write_model(source, out, tower, vision)


def certify(source: Source, out: Path, probes: Probes) -> list[Certificate]:
    """The states that LLaVA reads, in transformers; a note says how many trained blocks they
    see. A state is [B, S, tokens, width], with every token at unit length."""
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
    def states(images: Tensor) -> Tensor:  # as its LLaVA asks for them
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
    """A sentence on how many trained blocks the state before the last block sees. The trained
    blocks begin with the first that differs among the stages, or from the base in the run."""
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
