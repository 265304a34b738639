"""Base class of all models: an image tower with freezing and the trunk/tail split."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip import files
from mclclip.models import towers

Transform = Callable[[Any], Tensor]


def unit(features: Tensor) -> Tensor:
    """[..., D] -> x / max(|x|, 1e-12), in fp32 (float64 stays float64)."""
    if features.dtype != torch.float64:
        features = features.float()
    return functional.normalize(features, dim=-1, eps=1e-12)


class ImageModel(nn.Module):
    """An image tower with its transforms, freezing and the trunk/tail split.

    `exported` is the module that an export holds; its `visual` is the image tower. It is stored
    under the attribute that `part` names, so the names of its parameters begin with `part`.
    `config` is the content of the export's JSON file. `layout` is the image tower's, or the reason
    why it has none. `transforms`: train, validation. `first_block`: where `encode_image` starts; if
    it is not 0, it is given that block's input, such as rows of a cache, in the place of images.
    """

    part: str
    reads_texts: bool

    def __init__(
        self,
        exported: nn.Module,
        config: Mapping[str, Any],
        layout: towers.ImageLayout | str,
        transforms: tuple[Transform, Transform],
    ) -> None:
        super().__init__()
        setattr(self, self.part, exported)
        self.config = copy.deepcopy(dict(config))
        self.embed_dim = int(self.config["model_cfg"]["embed_dim"])
        height, width = pair(self.visual.image_size)
        self.image_size: int | tuple[int, int] = height if height == width else (height, width)
        self.num_channels: int = getattr(self.visual, "num_channels", 3)
        self.preprocess_train, self.preprocess_val = transforms
        self._layout = layout
        self.num_frozen_blocks = 0
        self.first_block = 0
        self._recompute = False
        # Parameters that open_clip never trains (sine-cosine positions) stay fixed with every lock.
        self._fixed = {n for n, p in self.exported.named_parameters() if not p.requires_grad}

    @property
    def exported(self) -> Any:
        """The module whose state dict an export holds."""
        return getattr(self, self.part)

    @property
    def visual(self) -> Any:
        """The image tower."""
        return self.exported.visual

    @property
    def layout(self) -> towers.ImageLayout:
        """Layout of the image tower. Raises ValueError, with the reason, where it has none."""
        if isinstance(self._layout, str):
            raise ValueError(self._layout)
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the image tower, as its layout counts them."""
        return self.layout.num_blocks

    @property
    def pooled_dim(self) -> int | None:
        """Width of the features before the projection; None where there are none."""
        return self.layout.pooled_dim(self.visual)

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of pixels, float32 [C, 1, 1] or [1, 1, 1].

        Both transforms give images as (pixels - mean) / deviation, with pixels between 0 and 1.
        """
        settings = self.config["preprocess_cfg"]
        mean, deviation = (
            torch.tensor(settings[name], dtype=torch.float32).reshape(-1, 1, 1)
            for name in ("mean", "std")
        )
        return mean, deviation

    def tower_layouts(self, text: bool) -> list[tuple[nn.Module, towers.Layout]]:
        """The image tower with its layout, and the text tower if `text` and there is one."""
        return [(self.visual, self.layout)]

    # --- features ----------------------------------------------------------------------------

    def encode_trunk(self, images: Tensor, num_trunk_blocks: int) -> Tensor:
        """[B, C, H, W] -> output of the first `num_trunk_blocks` blocks (0: the images)."""
        self._check_split(num_trunk_blocks)
        return self.layout.run_trunk(self.visual, images, num_trunk_blocks)

    def encode_tail(self, hidden: Tensor, num_trunk_blocks: int, project: bool = True) -> Tensor:
        """Output of `encode_trunk` for the same number -> raw features [B, D].

        With `project=False`: [B, width], pooled and normed but not projected; ValueError for towers
        whose attention pool is their projection.
        """
        self._check_split(num_trunk_blocks)
        return self.layout.run_tail(self.visual, hidden, num_trunk_blocks, project, self._recompute)

    def _check_split(self, num_trunk_blocks: int) -> None:
        if not 0 <= num_trunk_blocks <= self.num_blocks:
            raise ValueError(
                f"num_trunk_blocks is {num_trunk_blocks}, but the image tower has "
                f"{self.layout.counted}: give 0 to {self.num_blocks}"
            )

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """[B, C, H, W] -> [B, D], raw or (`normalize`) unit length. A frozen trunk has no graph."""
        frozen = self.num_frozen_blocks
        if self.first_block:
            features = self.encode_tail(images, self.first_block)
        elif frozen and not images.requires_grad:
            with torch.no_grad():
                hidden = self.encode_trunk(images, frozen)
            features = self.encode_tail(hidden, frozen)
        elif self._recompute:
            features = self.encode_tail(images, 0)
        else:
            output = self.visual(images)
            # Towers with output_tokens give (features, tokens).
            features = output[0] if isinstance(output, tuple) else output
        return unit(features) if normalize else features

    def trunk_digest(self, num_trunk_blocks: int) -> str:
        """Digest of all that the output of `encode_trunk` depends on beside the images: the tensors
        of these blocks, in fp32, the image tower's architecture, and how pixels are made."""
        self._check_split(num_trunk_blocks)
        parts, found = self.layout.trunk(num_trunk_blocks), hashlib.sha256()
        model = {k: v for k, v in self.config["model_cfg"].items() if k != "text_cfg"}
        found.update(files.digest_json([model, self.config["preprocess_cfg"]]).encode())
        for name, tensor in sorted(self.visual.state_dict().items()):
            if towers.belongs(name, parts):
                values = tensor.detach().float().cpu().contiguous().numpy()
                found.update(f"{name} {values.shape}".encode())
                found.update(values.data)
        return found.hexdigest()

    # --- training ----------------------------------------------------------------------------

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Recomputes the blocks in the backward pass instead of keeping their activations.

        Gradients stay the same bit for bit. Raises ValueError where blocks have batch norms, whose
        running statistics would count every batch twice.
        """
        blocks = self.layout.block_modules(self.visual) if enabled else []
        if any(isinstance(m, _BatchNorm) for block in blocks for m in block.modules()):
            raise ValueError(
                f"gradient checkpointing is on, but recomputing the blocks of a "
                f"{type(self.visual).__name__} would count every batch twice in its batch norms: "
                "turn it off"
            )
        self._recompute = enabled

    def blocks(self) -> list[nn.Module]:
        """The modules of the blocks, which are sharded or compiled one by one.

        Towers without a layout have none.
        """
        return [] if isinstance(self._layout, str) else self.layout.block_modules(self.visual)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Has every block compiled by torch when it first runs; names stay as they are."""
        from torch._dynamo import config  # seconds to import

        # torch stops compiling a function after a number of variants. All blocks of a class are one
        # function, with variants for tower, precision, batch size, with gradient and without.
        config.recompile_limit = max(config.recompile_limit, 32)
        for block in self.blocks():
            block.compile(backend=backend)

    def _lock_image(
        self, image_blocks: int | Literal["all"], image_norm: bool, image_projection: bool
    ) -> None:
        layout = self.layout
        number = number_of(layout, image_blocks, "image_blocks", "image tower")
        parts = layout.last(number) + (layout.embedding if image_blocks == "all" else ())
        parts += (layout.norm if image_norm else ()) + (
            layout.projection if image_projection else ()
        )
        norms = set() if image_norm else self._batch_norm_parameters()
        for name, parameter in self.visual.named_parameters():
            trained = towers.belongs(name, parts) and name not in norms
            parameter.requires_grad_(trained and f"visual.{name}" not in self._fixed)

    def _batch_norm_parameters(self) -> set[str]:
        norms = ((n, m) for n, m in self.visual.named_modules() if isinstance(m, _BatchNorm))
        return {f"{name}.{p}" for name, norm in norms for p, _ in norm.named_parameters()}

    def update_frozen(self) -> list[str]:
        """Updates the frozen blocks and eval modes; returns the names of trainable parameters.

        Call it after changing `requires_grad` in another way than by `lock`.
        """
        trained = [n for n, p in self.visual.named_parameters() if p.requires_grad]
        self.num_frozen_blocks = self.layout.count_without(trained)
        self.train(self.training)
        return sorted(name for name, p in self.named_parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> Self:
        """`nn.Module.train`, but modules whose parameters are all frozen stay in eval mode."""
        super().train(mode)
        if mode:
            for module in self.modules():
                trained = [p.requires_grad for p in module.parameters()]
                if trained and not any(trained):
                    module.eval()
            if self.num_frozen_blocks:  # modules without parameters too, such as patch dropout
                trunk = self.layout.trunk(self.num_frozen_blocks)
                for name, module in self.visual.named_modules():
                    if towers.belongs(name, trunk):
                        module.eval()
        return self

    def layers_above(self, name: str) -> int:
        """Number of layers above the parameter `name` in its tower; 0 at the top.

        For layer-wise learning-rate decay. Raises ValueError for towers without a layout.
        """
        inside = name.removeprefix(f"{self.part}.visual.")
        return 0 if inside == name else self.layout.layers_above(inside)


def number_of(layout: towers.Layout, wanted: int | Literal["all"], option: str, what: str) -> int:
    """``wanted`` as a number of blocks. Raises ValueError for more than the tower has."""
    number = layout.num_blocks if wanted == "all" else wanted
    if not 0 <= number <= layout.num_blocks:
        raise ValueError(
            f"{option} is {wanted}, but the {what} has {layout.counted}: give 0 to "
            f"{layout.num_blocks}, or 'all'"
        )
    return number


def pair(size: Any) -> tuple[int, int]:
    """Height and width of a size that may be one number."""
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (size, size)
