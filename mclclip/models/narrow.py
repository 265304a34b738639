"""Makes of a model one whose features are the first numbers of its own, such as 64 of 512.

The projections of both towers lose their last columns, so that what is left is an ordinary model of
its architecture. It is useful where these first numbers were trained to stand alone, which
``widths`` of an objective does (Kusupati et al., "Matryoshka Representation Learning", 2022,
arXiv:2205.13147, section 3).
"""

from __future__ import annotations

import copy

import torch

from mclclip.models import clip, towers
from mclclip.models.encoder import Encoder
from mclclip.models.model import Model
from mclclip.models.row_projection import WIDTH

_TEXTS = ("a photo of a dog", "two red cups on a table")
_CLOSE = 1e-4  # of the largest number of a feature


def narrow_encoder(encoder: Encoder, width: int) -> Encoder:
    """Returns an encoder whose stages have features of ``width`` numbers. Raises the errors of
    ``narrow``."""
    return encoder.with_stages([narrow(stage, width) for stage in encoder.stages])


def narrow(model: Model, width: int) -> Model:
    """Returns a model whose features are the first ``width`` numbers of the model's.

    Raises ValueError for a width that is not from 1 to D, and for a model whose features do not
    come from projections alone, as without a text tower or where a pooling ends the tower.
    """
    if not 0 < width <= model.embed_dim:
        raise ValueError(
            f"width={width} is of features of {model.embed_dim} numbers: wanted 1 to "
            f"{model.embed_dim}"
        )
    refusal = f"features cannot be cut to width={width}"
    if not model.reads_texts:
        raise ValueError(f"{refusal}: an image encoder without a text tower has no projection")
    if WIDTH in model.config["model_cfg"]["text_cfg"]:
        raise ValueError(f"{refusal}: the model reads rows of text embeddings, and has to be whole")
    config = copy.deepcopy(model.config)
    config["model_cfg"]["embed_dim"] = width
    exported = clip.build(config, seed=0, random_text=True)
    tensors = model.exported.state_dict()
    narrower = {
        name: tensors[name][tuple(slice(size) for size in tensor.shape)]
        for name, tensor in exported.state_dict().items()
        if name in tensors and tensors[name].ndim == tensor.ndim
    }
    transforms = model.preprocess_train, model.preprocess_val
    layout = clip.layout_of(exported.visual)
    try:
        exported.load_state_dict(narrower, strict=True)
        narrow_model = Model(exported, config, layout, transforms, model.tokenizer).eval()
        are_equal = _first_numbers_are_equal(model, narrow_model, width)
    except RuntimeError:  # of tensors that are larger than the model's, or are no part of it
        are_equal = False
    if not are_equal:
        raise ValueError(f"{refusal}: more than a projection depends on their width")
    return narrow_model


@torch.no_grad()
def _first_numbers_are_equal(model: Model, narrow_model: Model, width: int) -> bool:
    """Compares features of some noise and some texts."""
    size, random = towers.pair(model.image_size), torch.Generator().manual_seed(0)
    pixels = torch.randn(2, model.num_channels, *size, generator=random)
    tokens = model.tokenizer([*_TEXTS])
    wide, cut = ((m.encode_image(pixels), m.encode_text(tokens)) for m in (model, narrow_model))
    return all(
        few.shape[1] == width
        and bool((whole[:, :width] - few).abs().max() <= _CLOSE * whole.abs().max())
        for whole, few in zip(wide, cut, strict=True)
    )
