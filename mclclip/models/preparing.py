"""Prepares a loaded model for a training: what is trained, adapters, and stored rows that stand for
frozen blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.data.row_store import IMAGE_ROWS, StoredRows
from mclclip.models.image_size import allow_image_size
from mclclip.models.lora import add_lora
from mclclip.models.model import Model
from mclclip.models.parameters import freeze
from mclclip.models.patterns import ParameterConfig
from mclclip.run.artifacts import read_manifest, verb_of


def prepare_model(
    model: Model,
    *,
    lock: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    seed: int,
    precision: str,
    grad_checkpointing: bool,
    patch_dropout: float = 0.0,
    parameters: Sequence[ParameterConfig] = (),
    image_sizes: Sequence[int] = (),
) -> None:
    """Prepares a model for training, in place.

    lock                 arguments of `Model.lock`: which parts are trained
    lora                 arguments of `add_lora` (None: no adapters), which are drawn by ``seed``
    precision            "float64" converts the model; other precisions are autocast's
    grad_checkpointing   blocks run again in the backward pass instead of keeping activations
    patch_dropout        share of the patches that the image tower drops
    parameters           patterns of names; those with an `lr_scale` of 0 are frozen (`freeze`)
    image_sizes          heights and widths of pictures that it is trained on beside its own

    Raises ValueError for what the towers do not allow.
    """
    for size in image_sizes:
        allow_image_size(model.visual, size)
    model.lock(**lock)
    if lora is not None:
        add_lora(model, **lora, seed=seed)
    freeze(model, parameters)
    model.drop_patches(patch_dropout)
    if precision == "float64" and next(model.parameters()).dtype != torch.float64:
        model.double()  # `plan` converts before, since its tensors without values cannot be here
    model.train()
    if grad_checkpointing:
        model.set_grad_checkpointing(True)


def refuse_folded_norms(model: Model) -> None:
    """Raises ValueError if a batch norm is trained whose statistics were folded into weights.

    Such a norm has mean 0, variance 1 and a bias other than 0 (a new norm has bias 0), so it only
    adds its bias. In training it would normalise by each batch, which the later layers have never
    seen, and the training would start from noise. It is not frozen silently, because
    ``lock.image_norm`` says what is trained.
    """
    folded = []
    for name, norm in model.visual.named_modules():
        if isinstance(norm, _BatchNorm) and norm.training and norm.affine:
            mean, variance = norm.running_mean, norm.running_var
            if mean is None or variance is None:
                continue
            if not mean.any() and torch.all(variance == 1) and norm.bias.any():
                folded.append(name)
    if folded:
        raise ValueError(
            f"lock.image_norm is true, but {len(folded)} batch norms that it trains, such as "
            f"{folded[0]}, have mean 0 and variance 1: they were folded into the weights, and "
            "would normalise by each batch instead. Set lock.image_norm=false"
        )


def start_from_rows(model: Model, rows: StoredRows) -> None:
    """Makes a model take stored rows (`StoredRows.of_images`) in the place of images.

    Rows of kind `IMAGE_ROWS` are outputs of the frozen first blocks: the image tower then starts
    behind these blocks. Other rows are embeddings, and the whole image tower is skipped. Raises
    RuntimeError if other weights made the rows, and ValueError if a model in training mode trains
    blocks that made them.
    """
    manifest = read_manifest(rows.directory, rows.kind)
    if rows.kind != IMAGE_ROWS:
        model.first_block = model.num_blocks + 1
        return
    blocks, again = manifest.config["blocks"], f"run 'mclclip {verb_of(IMAGE_ROWS)} --force'"
    if model.trunk_digest(blocks) != manifest.inputs["trunk"]:
        raise RuntimeError(
            f"{rows.directory} was made by other weights than the first {blocks} blocks of this "
            f"model, or from other pixels: {again}"
        )
    if model.training and blocks > model.num_frozen_blocks:
        raise ValueError(
            f"the image rows have passed {blocks} blocks, and train.lock freezes "
            f"{model.num_frozen_blocks}: lower train.lock.image_blocks, or {again}"
        )
    model.first_block = blocks
