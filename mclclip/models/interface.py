"""The protocol of a model, as training, planning and exporting use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from mclclip.models.towers import ImageLayout


@runtime_checkable
class Model(Protocol):
    """A model with an image tower and perhaps a text tower: `ClipModel` or `ImageEncoder`.

    It is an `nn.Module` too, of which only the needed methods are listed here.
    """

    embed_dim: int
    """D, width of the features of `encode_image`, also after an export."""
    feature_dim: int
    """Width of the features that an objective gets; differs from D with a projector."""
    image_size: int | tuple[int, int]
    """Pixels of an image's side, or height and width."""
    num_channels: int
    """Channels of an image, C."""
    reads_texts: bool
    """Whether there is a text tower."""
    preprocess_train: Callable[[Any], Tensor]
    """PIL image -> [C, H, W] with augmentation."""
    preprocess_val: Callable[[Any], Tensor]
    """PIL image -> [C, H, W]."""
    num_frozen_blocks: int
    """Number of first image blocks that are frozen; they run without a graph."""

    @property
    def part(self) -> str:
        """The attribute that holds `exported`; it begins the names of its parameters."""
        ...

    @property
    def tokenizer(self) -> Callable[..., Tensor]:
        """List of N strings -> int64 [N, context]; it raises where there are no texts."""
        ...

    @property
    def layout(self) -> ImageLayout:
        """Layout of the image tower. Raises ValueError for a tower without one."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the image tower."""
        ...

    @property
    def pooled_dim(self) -> int | None:
        """Width of `encode_tail`'s features without the projection; None where there are none."""
        ...

    @property
    def exported(self) -> nn.Module:
        """The part whose state dict an export holds."""
        ...

    @property
    def has_logit_bias(self) -> bool:
        """Whether there is a logit bias, which a sigmoid loss reads."""
        ...

    @property
    def upper_bounds(self) -> Mapping[str, float]:
        """Upper bounds of parameters by name, which the optimizer enforces."""
        ...

    def __call__(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        text_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Features for an objective, by name: `image_features`, `text_features`, `logit_scale`,
        and `logit_bias` where there is one."""
        ...

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """[B, C, H, W] -> [B, D], raw or unit length."""
        ...

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """[B, context] int64 -> [B, D], raw or unit length; ValueError without a text tower."""
        ...

    def encode_trunk(self, images: Tensor, num_trunk_blocks: int) -> Tensor:
        """[B, C, H, W] -> output of the first blocks."""
        ...

    def encode_tail(self, hidden: Tensor, num_trunk_blocks: int, project: bool = True) -> Tensor:
        """Output of `encode_trunk` -> raw features [B, D]; pooled ones without the projection."""
        ...

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
        """Makes exactly the named parts trainable; returns the names of trainable parameters."""
        ...

    def update_frozen(self) -> list[str]:
        """Updates the state after a change of `requires_grad`; returns the trainable names."""
        ...

    def layers_above(self, name: str) -> int:
        """Number of layers above a parameter in its tower, for layer-wise decay."""
        ...

    def blocks(self) -> list[nn.Module]:
        """Modules that are sharded or compiled one by one."""
        ...

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Has every block compiled by torch when it first runs."""
        ...

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Recomputes blocks in the backward pass; ValueError where they have batch norms."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by name."""
        ...

    def save(self, directory: Path, base_digest: str | None = None) -> None:
        """Writes a directory that `mclclip.load_model` reads: configuration and safetensors."""
        ...


def save_export(model: Model, directory: Path, base_digest: str | None = None) -> None:
    """Writes a model as a directory that `mclclip.load_model` reads; see `ClipModel.save`."""
    model.save(Path(directory), base_digest)
