"""A model whose text tower is one trained projection of text embeddings that the user brings.

    text_features = W r / |W r|       r [W]: a row of another encoder, such as a language model's

The other encoder is never run: its rows lie on disk (``data.text_rows.TextRows``), which stands in
the place of the tokenizer, so that training, evaluation and export take rows [N, W] wherever other
models take tokens. Since the projection has no bias, the length of a row does not count.

A frozen language model with a trained projection, beside CLIP's image tower: Huang et al.,
"LLM2CLIP" (2024, arXiv:2411.04997); image rows instead of text rows, and the text tower trained:
Zhai et al., "LiT" (2022, arXiv:2111.07991).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mclclip.data.text_rows import TextRows, width_of
from mclclip.models import state_dicts, weights
from mclclip.models.towers import TowerLayout

WIDTH = "rows"
"""The one field of such a model's ``text_cfg``: the width of the rows."""
_LOGIT_SCALE = math.log(1 / 0.07)  # open_clip's default


class RowProjection(nn.Module):
    """The text tower: rows [N, W] -> features [N, D]."""

    layout = TowerLayout(embedding=(), blocks=(), norm=(), projection=("projection",))

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, dim, bias=False)
        nn.init.normal_(self.projection.weight, std=width**-0.5)

    def forward(self, rows: Tensor) -> Tensor:
        """[N, W] -> [N, D], not of unit length."""
        features: Tensor = self.projection(rows.to(self.projection.weight.dtype))
        return features

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Does nothing: there are no activations to compute again."""


class RowClip(nn.Module):
    """An image tower and a ``RowProjection``, with the logit scale (and bias) of a CLIP."""

    def __init__(self, visual: nn.Module, model_cfg: Mapping[str, Any], seed: int) -> None:
        super().__init__()
        self.visual = visual
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.text = RowProjection(model_cfg["text_cfg"][WIDTH], model_cfg["embed_dim"])
        scale = model_cfg.get("init_logit_scale", _LOGIT_SCALE)
        self.logit_scale = nn.Parameter(torch.full([1], float(scale)))
        bias = model_cfg.get("init_logit_bias")
        self.logit_bias = None if bias is None else nn.Parameter(torch.full([1], float(bias)))

    def encode_text(self, rows: Tensor) -> Tensor:
        """Rows [N, W] -> features [N, D], not of unit length."""
        features: Tensor = self.text(rows)
        return features


def build_on_rows(
    build_image_tower: Callable[..., tuple[Any, dict[str, Any]]],
    text_rows: Sequence[str],
    where: str,
    config: Mapping[str, Any],
    file: Path | None,
    directory: Path | None,
    seed: int,
) -> tuple[Any, dict[str, Any], Any]:
    """Builds an image tower beside a projection of rows, as wide as those of ``text_rows``, or as
    the configuration says.

    Loads the weights in ``file``: all of them if they are of such a model, else those of the image
    tower. Returns it with its model config, and the rows in or above ``directory``. ``where`` names
    the model in messages.
    """
    model_cfg, is_whole = config["model_cfg"], WIDTH in config["model_cfg"].get("text_cfg", {})
    width = width_of(text_rows) if text_rows else model_cfg["text_cfg"][WIDTH]
    if is_whole:
        if width != (trained := model_cfg["text_cfg"][WIDTH]):
            raise ValueError(
                f"model.text_rows has rows of width {width}, and the projection of {where} takes "
                f"{trained}: bring rows of the encoder that it was trained with"
            )
        image_only = {name: value for name, value in model_cfg.items() if name != "text_cfg"}
        config = {**config, "model_cfg": image_only}
    tower, image_cfg = build_image_tower(config, None if is_whole else file, seed, where)
    names = ("init_logit_scale", "init_logit_bias")
    logits = {name: model_cfg[name] for name in names if name in model_cfg}
    whole_cfg = {**image_cfg, **logits, "text_cfg": {WIDTH: width}}
    built = RowClip(tower.visual, whole_cfg, seed)
    if is_whole and file is not None:
        state_dicts.fill(built, weights.read_tensors(file), str(file))
    return built, whole_cfg, TextRows.beside(directory, width)
