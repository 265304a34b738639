"""The CLIP model that is trained: open_clip's module with freezing and the trunk/tail split.

Nothing here imports open_clip; `mclclip.models.clip` builds these.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.models import towers

MAX_LOGIT_SCALE = 100.0


def unit(features: Tensor) -> Tensor:
    """[..., D] -> unit length in fp32 (float64 stays float64); algorithms: x / max(|x|, 1e-12)."""
    if features.dtype != torch.float64:
        features = features.float()
    return functional.normalize(features, dim=-1, eps=1e-12)


class ClipModel(nn.Module):
    """An open_clip model with its tokenizer and transforms, freezing and the trunk/tail split.

    `clip` is the open_clip module; its `logit_scale` has shape [1], because FSDP and DeepSpeed
    refuse 0-dimensional parameters. `config` is what `open_clip_config.json` holds. `layout` says
    what the image tower consists of, or why that is not known. `transforms`: train, validation.
    """

    def __init__(
        self,
        clip: Any,
        tokenizer: Any,
        config: Mapping[str, Any],
        layout: towers.TowerLayout | str,
        transforms: tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]],
    ) -> None:
        super().__init__()
        self.clip: Any = clip
        self.tokenizer = tokenizer
        self.config = copy.deepcopy(dict(config))
        self.embed_dim = int(self.config["model_cfg"]["embed_dim"])
        height, width = _pair(self.clip.visual.image_size)
        self.image_size: int | tuple[int, int] = height if height == width else (height, width)
        self.preprocess_train, self.preprocess_val = transforms
        self._layout = layout
        self.num_frozen_blocks = 0
        # What open_clip never trains (fixed sine-cosine positions) stays fixed under every lock.
        self._fixed = {n for n, p in self.clip.named_parameters() if not p.requires_grad}

    @property
    def layout(self) -> towers.TowerLayout:
        """What the image tower consists of; ValueError for towers that are not understood."""
        if isinstance(self._layout, str):
            raise ValueError(self._layout)
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the image tower: transformer blocks, or a ResNet's stem and residual blocks."""
        return self.layout.num_blocks

    def encode_trunk(self, images: Tensor, num_trunk_blocks: int) -> Tensor:
        """[B, 3, H, W] -> what the first `num_trunk_blocks` blocks give (0: the images)."""
        self._check_split(num_trunk_blocks)
        return towers.run_trunk(self.clip.visual, self.layout, images, num_trunk_blocks)

    def encode_tail(self, hidden: Tensor, num_trunk_blocks: int, project: bool = True) -> Tensor:
        """What `encode_trunk` gave for the same number -> raw features [B, D].

        With `project=False`: [B, width], pooled and normed but not projected (no ResNet).
        """
        self._check_split(num_trunk_blocks)
        visual = self.clip.visual
        return towers.run_tail(visual, self.layout, hidden, num_trunk_blocks, project)

    def _check_split(self, num_trunk_blocks: int) -> None:
        if not 0 <= num_trunk_blocks <= self.num_blocks:
            raise ValueError(
                f"num_trunk_blocks is {num_trunk_blocks}, but the image tower has "
                f"{self.layout.counted}: give 0 to {self.num_blocks}"
            )

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """[B, 3, H, W] -> [B, D], raw or (`normalize`) unit length. A frozen trunk has no graph."""
        frozen = self.num_frozen_blocks
        if frozen and not images.requires_grad:
            with torch.no_grad():
                hidden = self.encode_trunk(images, frozen)
            features = self.encode_tail(hidden, frozen)
        else:
            output = self.clip.visual(images)
            # Towers with output_tokens give (features, tokens).
            features = output[0] if isinstance(output, tuple) else output
        return unit(features) if normalize else features

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """[B, context] int64 -> [B, D], raw or (`normalize`) unit length."""
        features: Tensor = self.clip.encode_text(tokens)
        return unit(features) if normalize else features

    def logit_scale(self) -> Tensor:
        """The multiplier of cosines, 0-dimensional, at most 100.

        The cap passes the gradient: OpenAI's weights sit at ln 100, which in fp32 exponentiates to
        just above 100, and a cap without gradient would hold them there for ever.
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
        the input was given, and `logit_scale`.
        """
        output = {"logit_scale": self.logit_scale()}
        if image is not None:
            output["image_features"] = self.encode_image(image, normalize=True)
        if text_features is not None:
            output["text_features"] = unit(text_features)
        elif text is not None:
            output["text_features"] = self.encode_text(text, normalize=True)
        return output

    @property
    def upper_bounds(self) -> dict[str, float]:
        """Largest values of parameters, which the optimizer keeps: the logit scale stays <= 100."""
        return {"clip.logit_scale": math.log(MAX_LOGIT_SCALE)}

    def layers_above(self, name: str) -> int:
        """Layers above that of the parameter `name` in its own tower; 0 at the top.

        For layer-wise learning-rate decay. Raises ValueError for towers that are not understood.
        """
        inside = name.removeprefix("clip.")
        if inside.startswith("visual."):
            return self.layout.layers_above(inside.removeprefix("visual."))
        if inside.startswith("logit_"):
            return 0
        inside = inside if self._text is self.clip else inside.removeprefix("text.")
        return towers.text_layout(self._text).layers_above(inside)

    @property
    def _text(self) -> Any:
        """The text tower; older models have its parts in the CLIP module itself."""
        return getattr(self.clip, "text", self.clip)

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Recomputes the blocks of both towers in the backward instead of keeping activations.

        Gradients stay the same bit for bit. Raises ValueError for a ResNet, whose batch norms would
        count every batch twice.
        """
        resnet = isinstance(self._layout, towers.TowerLayout) and self._layout.kind == "resnet"
        if enabled and resnet:
            raise ValueError(
                "gradient checkpointing is on, but recomputing the blocks of a ResNet would count "
                "every batch twice in its batch norms: turn it off"
            )
        self.clip.set_grad_checkpointing(enabled)

    def blocks(self) -> list[nn.Module]:
        """The blocks of both towers: what is sharded or compiled one by one.

        Transformer blocks and the layers of a ResNet; towers that are not understood have none.
        """
        return towers.block_modules(self.clip.visual) + towers.block_modules(self._text)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Has every block compiled by torch when it first runs; names stay as they are."""
        from torch._dynamo import config  # seconds to import

        # Blocks of one kind share their code and with it the number of variants that torch compiles
        # before it gives up: towers, precisions, batch sizes, with gradient and without.
        config.recompile_limit = max(config.recompile_limit, 32)
        for block in self.blocks():
            block.compile(backend=backend)

    def lock(
        self,
        image_blocks: int | Literal["all"],
        image_norm: bool,
        image_projection: bool,
        text: bool,
        logit_scale: bool,
    ) -> list[str]:
        """Makes exactly the named parts trainable, freezes the rest, returns the trainable names.

        `image_blocks`: the last n blocks (ResNet: of the stem and the residual blocks, 17 of an
        RN50); "all" adds what lies before the first block. `image_norm`: the final norm (ResNet:
        the batch norms of trained blocks; frozen ones keep their running statistics).
        `image_projection`: the projection (ResNet: the attention pool). `text`: the whole text
        tower. A logit bias is never trained: it shifts all logits alike, which a softmax does not
        see. Raises ValueError for more blocks than there are, and for towers that are not
        understood.
        """
        parts = self._image_parts(image_blocks, image_norm, image_projection)
        norms = self._batch_norm_parameters() if not image_norm else set()
        for name, parameter in self.clip.named_parameters():
            if name.startswith("visual."):
                inside = name.removeprefix("visual.")
                trained = towers.belongs(inside, parts) and inside not in norms
            elif name.startswith("logit_"):
                trained = logit_scale and name == "logit_scale"
            else:
                trained = text
            parameter.requires_grad_(trained and name not in self._fixed)
        return self.update_frozen()

    def update_frozen(self) -> list[str]:
        """Takes note of what is trainable now and returns its names.

        For a caller who changed it in another way than by `lock`.
        """
        self.num_frozen_blocks = self._count_frozen_blocks()
        self.train(self.training)
        return sorted(name for name, p in self.named_parameters() if p.requires_grad)

    def _image_parts(
        self, image_blocks: int | Literal["all"], norm: bool, projection: bool
    ) -> tuple[str, ...]:
        layout = self.layout
        number = layout.num_blocks if image_blocks == "all" else image_blocks
        if not 0 <= number <= layout.num_blocks:
            raise ValueError(
                f"image_blocks is {image_blocks}, but the image tower has {layout.counted}: give "
                f"0 to {layout.num_blocks}, or 'all'"
            )
        parts = layout.embedding if image_blocks == "all" else ()
        for block in layout.blocks[layout.num_blocks - number :]:
            parts += block
        return parts + (layout.norm if norm else ()) + (layout.projection if projection else ())

    def _batch_norm_parameters(self) -> set[str]:
        modules = self.clip.visual.named_modules()
        norms = ((n, m) for n, m in modules if isinstance(m, _BatchNorm))
        return {f"{name}.{p}" for name, norm in norms for p, _ in norm.named_parameters()}

    def _count_frozen_blocks(self) -> int:
        layout = self.layout
        trained = [n for n, p in self.clip.visual.named_parameters() if p.requires_grad]
        count = 0
        while count < layout.num_blocks and not any(
            towers.belongs(name, layout.trunk(count + 1)) for name in trained
        ):
            count += 1
        return count

    def train(self, mode: bool = True) -> "ClipModel":
        """As `nn.Module.train`, but modules whose parameters are all frozen stay in eval mode."""
        super().train(mode)
        if mode:
            for module in self.modules():
                trained = [p.requires_grad for p in module.parameters()]
                if trained and not any(trained):
                    module.eval()
            if self.num_frozen_blocks and hasattr(self.clip.visual, "patch_dropout"):
                self.clip.visual.patch_dropout.eval()  # part of the frozen trunk
        return self


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (size, size)
