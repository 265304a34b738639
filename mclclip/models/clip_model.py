"""The CLIP model that is trained: open_clip's module with freezing and the trunk/tail split.

Nothing here imports open_clip; `mclclip.models.clip` builds these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from mclclip.models import towers, weights
from mclclip.models.image_model import ImageModel, Transform, number_of, unit

MAX_LOGIT_SCALE = 100.0


class ClipModel(ImageModel):
    """An open_clip model with its tokenizer and transforms, freezing and the trunk/tail split.

    `clip` is the open_clip module; its `logit_scale` has shape [1], because FSDP and DeepSpeed
    refuse 0-dimensional parameters. `config` is the content of `open_clip_config.json`. `layout` is
    the image tower's, or the reason why it has none. `transforms`: train, validation.
    """

    part = "clip"
    reads_texts = True
    clip: Any

    def __init__(
        self,
        clip: Any,
        tokenizer: Any,
        config: Mapping[str, Any],
        layout: towers.ImageLayout | str,
        transforms: tuple[Transform, Transform],
    ) -> None:
        super().__init__(clip, config, layout, transforms)
        self.tokenizer = tokenizer
        self.feature_dim = self.embed_dim

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """[B, context] int64 -> [B, D], raw or (`normalize`) unit length."""
        features: Tensor = self.clip.encode_text(tokens)
        return unit(features) if normalize else features

    def logit_scale(self) -> Tensor:
        """The multiplier of cosines, 0-dimensional, at most 100.

        The cap does not change the gradient: OpenAI's logit scale is ln 100, whose exponential in
        fp32 is just above 100, and a cap without gradient would keep it there for ever.
        """
        scale: Tensor = self.clip.logit_scale.reshape(()).exp()
        return scale + (scale.clamp(max=MAX_LOGIT_SCALE) - scale).detach()

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        text_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Images and tokens (or ready text features) -> features for an objective.

        Returns `image_features` and `text_features` [b, D], unit length in fp32 or float64, where
        the input was given, `logit_scale`, and `logit_bias` where the model has one.
        """
        output = {"logit_scale": self.logit_scale()}
        if self.has_logit_bias:
            output["logit_bias"] = self.clip.logit_bias.reshape(())
        if image is not None:
            output["image_features"] = self.encode_image(image, normalize=True)
        if text_features is not None:
            output["text_features"] = unit(text_features)
        elif text is not None:
            output["text_features"] = self.encode_text(text, normalize=True)
        return output

    @property
    def has_logit_bias(self) -> bool:
        """Whether the model has a logit bias: its configuration names `init_logit_bias`."""
        return getattr(self.clip, "logit_bias", None) is not None

    @property
    def upper_bounds(self) -> dict[str, float]:
        """Upper bounds of parameters, which the optimizer enforces: the logit scale is <= 100."""
        return {"clip.logit_scale": math.log(MAX_LOGIT_SCALE)}

    def layers_above(self, name: str) -> int:
        """Number of layers above the parameter `name` in its tower; 0 at the top.

        For layer-wise learning-rate decay. Raises ValueError for towers without a layout.
        """
        inside = name.removeprefix("clip.")
        if inside.startswith(("visual.", "logit_")):
            return super().layers_above(name)
        return self.text_layout.layers_above(self._in_text(inside))

    @property
    def text_tower(self) -> Any:
        """The text tower; older models have its parts in the CLIP module itself."""
        return getattr(self.clip, "text", self.clip)

    @property
    def text_layout(self) -> towers.Layout:
        """Layout of the text tower. Raises ValueError where its blocks are not found."""
        return towers.text_layout(self.text_tower)

    def tower_layouts(self, text: bool) -> list[tuple[nn.Module, towers.Layout]]:
        """The image tower with its layout, and with `text` also the text tower with its layout."""
        return super().tower_layouts(text) + ([(self.text_tower, self.text_layout)] if text else [])

    def _in_text(self, name: str) -> str:
        """A parameter's name in the text tower, by its name in the CLIP module."""
        return name if self.text_tower is self.clip else name.removeprefix("text.")

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Recomputes the blocks of both towers in the backward pass instead of keeping activations.

        Gradients stay the same bit for bit. Raises ValueError where blocks of the image tower have
        batch norms, whose running statistics would count every batch twice.
        """
        super().set_grad_checkpointing(enabled)
        text = self.text_tower
        if text is self.clip:
            text.transformer.grad_checkpointing = enabled
        else:
            text.set_grad_checkpointing(enabled)

    def blocks(self) -> list[nn.Module]:
        """The modules of both towers' blocks, which are sharded or compiled one by one.

        Towers without a layout have none.
        """
        try:
            text = self.text_layout.block_modules(self.text_tower)
        except ValueError:
            text = []
        return super().blocks() + text

    def lock(
        self,
        image_blocks: int | Literal["all"],
        image_norm: bool,
        image_projection: bool,
        text: bool,
        logit_scale: bool,
        text_blocks: int | Literal["all"] = "all",
        logit_bias: bool = False,
    ) -> list[str]:
        """Makes exactly the named parts trainable, freezes the rest, returns the trainable names.

        `image_blocks`: the last n blocks (an open_clip ResNet counts its stem and its residual
        blocks: 17 in an RN50); "all" adds the layers before the first block. `image_norm`: the
        final norm and the batch norms of trained blocks; frozen ones keep their running statistics.
        `image_projection`: the projection, and poolings that have weights. `text`: the text tower's
        last `text_blocks` blocks with its final norm and projection; "all" adds the embedding.
        `logit_bias`: the bias, where the model has one; it has no effect on a softmax, since it
        shifts all logits by the same amount. Raises ValueError for more blocks than there are, and
        for towers without a layout.
        """
        text_parts = self._text_parts(text_blocks) if text and text_blocks != "all" else None
        self._lock_image(image_blocks, image_norm, image_projection)
        for name, parameter in self.clip.named_parameters():
            if name.startswith("visual."):
                continue
            if name.startswith("logit_"):
                trained = logit_bias if name == "logit_bias" else logit_scale
            else:
                trained = text and (
                    text_parts is None or towers.belongs(self._in_text(name), text_parts)
                )
            parameter.requires_grad_(trained and name not in self._fixed)
        return self.update_frozen()

    def _text_parts(self, text_blocks: int) -> tuple[str, ...]:
        layout = self.text_layout
        number = number_of(layout, text_blocks, "text_blocks", "text tower")
        return layout.last(number) + layout.norm + layout.projection

    def save(self, directory: Path, base_digest: str | None = None) -> None:
        """Writes the model as an open_clip directory, which plain open_clip loads as `local-dir:`.

        `base_digest` names the base it was fine-tuned from (`weights.base_digest` of its export);
        None: it is a base itself. The logit scale is written 0-dimensional, as open_clip's models
        have it.
        """
        tensors = {name: tensor.detach() for name, tensor in self.clip.state_dict().items()}
        for name in ("logit_scale", "logit_bias"):
            if name in tensors:
                tensors[name] = tensors[name].reshape(())
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(str(directory))
        base = {"base_digest": base_digest or weights.digest_tensors(tensors)}
        weights.write_model(Path(directory), self.config | base, tensors)
