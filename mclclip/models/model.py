"""The model that is trained: an image tower, a text tower or none, a projector or none.

Nothing here imports open_clip; `mclclip.models.loading.load_towers` makes these.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.models import towers, weights
from mclclip.models.transforms import Transform
from mclclip.util import files

MAX_LOGIT_SCALE = 100.0
NO_TEXT = (
    "the model is an image encoder without a text tower: take a CLIP model for what needs texts, "
    "such as zero-shot classification and retrieval"
)


def unit(features: Tensor) -> Tensor:
    """[..., D] -> x / max(|x|, 1e-12), in fp32 (float64 stays float64)."""
    if features.dtype != torch.float64:
        features = features.float()
    return functional.normalize(features, dim=-1, eps=1e-12)


class Model(nn.Module):
    """Towers with their transforms, locks, and the split of the image tower into trunk and tail.

    exported     the module that an export holds; its `visual` is the image tower. It is stored as
                 `clip` where there is a text tower and as `tower` where there is none (`part`), so
                 the names of its parameters begin with that. A CLIP's `logit_scale` has shape [1],
                 because FSDP and DeepSpeed refuse 0-dimensional parameters.
    config       content of the export's JSON file
    layout       the image tower's, or the reason why it has none
    transforms   of training and of validation: image -> [C, H, W]
    tokenizer    of the text tower: list of N strings -> int64 [N, context]; None: no text tower
    projector    widths of linear layers on top of an image tower alone; the objective gets their
                 output, while `encode_image`, evaluation and exports use the tower

    `num_frozen_blocks` first blocks of the image tower run without a graph. `first_block`: where
    `encode_image` starts; if it is not 0, it is given that block's input, such as rows of a cache,
    in the place of images. `memory_format`: how images and hidden values lie in memory, which
    changes results by rounding alone.
    """

    clip: Any
    tower: Any

    def __init__(
        self,
        exported: nn.Module,
        config: Mapping[str, Any],
        layout: towers.ImageLayout | str,
        transforms: tuple[Transform, Transform],
        tokenizer: Any = None,
        projector: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.reads_texts = tokenizer is not None
        # Upper bounds of parameters by name, which the optimizer enforces.
        self.upper_bounds = (
            {"clip.logit_scale": math.log(MAX_LOGIT_SCALE)} if self.reads_texts else {}
        )
        self.part = "clip" if self.reads_texts else "tower"
        setattr(self, self.part, exported)
        self.tokenizer = tokenizer if self.reads_texts else _refuse_texts
        self.config = copy.deepcopy(dict(config))
        self.embed_dim = int(self.config["model_cfg"]["embed_dim"])
        self.projector = projector_of(self.embed_dim, projector)
        self.feature_dim = projector[-1] if projector else self.embed_dim
        height, width = towers.pair(self.visual.image_size)
        self.image_size: int | tuple[int, int] = height if height == width else (height, width)
        self.num_channels: int = getattr(self.visual, "num_channels", 3)
        self.preprocess_train, self.preprocess_val = transforms
        self._layout = layout
        self.num_frozen_blocks = 0
        self.first_block = 0
        self._recompute = False
        self.memory_format = towers.choose_memory_format(self.visual)
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
    def text_tower(self) -> Any:
        """The text tower; older models have its parts in the CLIP module itself."""
        return getattr(self.clip, "text", self.clip)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image: C, H, W."""
        return (self.num_channels, *towers.pair(self.image_size))

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

    # --- layouts -----------------------------------------------------------------------------

    @property
    def layout(self) -> towers.ImageLayout:
        """RunPaths of the image tower. Raises ValueError, with the reason, where it has none."""
        if isinstance(self._layout, str):
            raise ValueError(self._layout)
        return self._layout

    @property
    def text_layout(self) -> towers.TowerLayout:
        """RunPaths of the text tower. Raises ValueError where its blocks are not found."""
        return towers.text_layout(self.text_tower)

    @property
    def num_blocks(self) -> int:
        """Blocks of the image tower, as its layout counts them."""
        return len(self.layout.blocks)

    def layers_above(self, name: str) -> int:
        """Number of layers above the parameter `name` in its tower; 0 at the top.

        For layer-wise learning-rate decay. Raises ValueError for towers without a layout.
        """
        inside = name.removeprefix(f"{self.part}.")
        if inside == name or inside.startswith("logit_"):
            return 0
        if inside.startswith("visual."):
            return self.layout.layers_above(inside.removeprefix("visual."))
        return self.text_layout.layers_above(inside.removeprefix("text."))

    def blocks(self) -> list[nn.Module]:
        """The modules of all towers' blocks, which are sharded or compiled one by one.

        Towers without a layout have none.
        """
        modules: list[nn.Module] = []
        with suppress(ValueError):
            modules += self.layout.block_modules(self.visual)
        with suppress(ValueError):
            modules += self.text_layout.block_modules(self.text_tower) if self.reads_texts else []
        return modules

    # --- features ----------------------------------------------------------------------------

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | None = None,
        text_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Images and tokens (or ready text features) -> features for an objective, by name.

        Returns `image_features` [b, F] (F: `feature_dim`) and `text_features` [b, D], unit length
        in fp32 or float64, where the input was given; with a text tower also `logit_scale`, and
        `logit_bias` where the model has one. Raises ValueError for texts without a text tower.
        """
        output: dict[str, Tensor] = {}
        if self.reads_texts:
            output["logit_scale"] = self.logit_scale()
            if self.has_logit_bias:
                output["logit_bias"] = self.clip.logit_bias.reshape(())
        elif text is not None or text_features is not None:
            raise ValueError(NO_TEXT)
        if image is not None:
            output["image_features"] = unit(self.projector(self.encode_image(image)))
        if text_features is not None:
            output["text_features"] = unit(text_features)
        elif text is not None:
            output["text_features"] = self.encode_text(text, normalize=True)
        return output

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """[B, C, H, W] -> [B, D], raw or (`normalize`) unit length. A frozen trunk has no graph."""
        frozen = self.num_frozen_blocks
        if self.first_block:
            whole = self.first_block > self.num_blocks  # the images are features already
            features = images if whole else self.encode_tail(images, self.first_block)
        elif frozen and not images.requires_grad:
            with torch.no_grad():
                hidden = self.encode_trunk(images, frozen)
            features = self.encode_tail(hidden, frozen)
        elif self._recompute:
            features = self.encode_tail(images, 0)
        else:
            output = self.visual(towers.arrange(images, self.memory_format))
            # Towers with output_tokens give (features, tokens).
            features = output[0] if isinstance(output, tuple) else output
        return unit(features) if normalize else features

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """[B, context] int64 -> [B, D], raw or (`normalize`) unit length.

        Raises ValueError without a text tower.
        """
        if not self.reads_texts:
            raise ValueError(NO_TEXT)
        features: Tensor = self.clip.encode_text(tokens)
        return unit(features) if normalize else features

    def encode_trunk(self, images: Tensor, num_trunk_blocks: int) -> Tensor:
        """[B, C, H, W] -> output of the first `num_trunk_blocks` blocks (0: the images)."""
        images = towers.arrange(images, self.memory_format)
        return self.layout.run_trunk(self.visual, images, num_trunk_blocks)

    def encode_tail(self, hidden: Tensor, num_trunk_blocks: int, project: bool = True) -> Tensor:
        """Output of `encode_trunk` for the same number -> raw features [B, D].

        With `project=False`: [B, width], pooled and normed but not projected; ValueError for towers
        whose attention pool is their projection.
        """
        hidden = towers.arrange(hidden, self.memory_format)
        return self.layout.run_tail(self.visual, hidden, num_trunk_blocks, project, self._recompute)

    def encode_pooled(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, width], features before the projection; ValueError as above."""
        return self.encode_tail(images, 0, project=False)

    def trunk_digest(self, num_trunk_blocks: int) -> str:
        """Digest of all that the output of `encode_trunk` depends on beside the images: the tensors
        of these blocks, in fp32, the image tower's architecture, and how pixels are made."""
        self.layout.check_number(num_trunk_blocks, "num_trunk_blocks", "image")
        parts, digest = self.layout.trunk(num_trunk_blocks), hashlib.sha256()
        model = {k: v for k, v in self.config["model_cfg"].items() if k != "text_cfg"}
        digest.update(files.digest_json([model, self.config["preprocess_cfg"]]).encode())
        for name, tensor in sorted(self.visual.state_dict().items()):
            if towers.belongs(name, parts):
                values = tensor.detach().float().cpu().contiguous().numpy()
                digest.update(f"{name} {values.shape}".encode())
                digest.update(values.data)
        return digest.hexdigest()

    def logit_scale(self) -> Tensor:
        """The multiplier of cosines, 0-dimensional, at most 100; 1 without a text tower.

        The cap does not change the gradient: OpenAI's logit scale is ln 100, whose exponential in
        fp32 is just above 100, and a cap without gradient would keep it there for ever.
        """
        if not self.reads_texts:
            return torch.ones(())
        scale: Tensor = self.clip.logit_scale.reshape(()).exp()
        return scale + (scale.clamp(max=MAX_LOGIT_SCALE) - scale).detach()

    @property
    def has_logit_bias(self) -> bool:
        """True if there is a logit bias: the configuration names `init_logit_bias`."""
        return getattr(self.exported, "logit_bias", None) is not None

    # --- training ----------------------------------------------------------------------------

    def lock(
        self,
        image_blocks: int | Literal["all"] = 0,
        image_norm: bool = False,
        image_projection: bool = False,
        text: bool = False,
        logit_scale: bool = False,
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
        shifts all logits by the same amount. A projector is always trained; without a text tower
        texts and logits have nothing to train. Raises ValueError for more blocks than there are,
        and for towers without a layout.
        """
        whole_text = text_blocks == "all" or not (text and self.reads_texts)
        text_parts: tuple[str, ...] = ()
        if not whole_text:
            text_parts = self.text_layout.last(text_blocks, "text_blocks", "text")
            text_parts += self.text_layout.norm + self.text_layout.projection
        layout = self.layout
        image_parts = layout.last(image_blocks, "image_blocks", "image")
        image_parts += layout.embedding if image_blocks == "all" else ()
        image_parts += layout.norm if image_norm else ()
        image_parts += layout.projection if image_projection else ()
        fixed = self._fixed | {
            f"visual.{name}.{parameter}"
            for name, module in self.visual.named_modules()
            if isinstance(module, _BatchNorm) and not image_norm
            for parameter, _ in module.named_parameters()
        }
        for name, parameter in self.exported.named_parameters():
            if name.startswith("visual."):
                trained = towers.belongs(name.removeprefix("visual."), image_parts)
            elif name.startswith("logit_"):
                trained = logit_bias if name == "logit_bias" else logit_scale
            else:
                inside = towers.belongs(name.removeprefix("text."), text_parts)
                trained = text and (whole_text or inside)
            parameter.requires_grad_(trained and name not in fixed)
        return self.update_frozen()

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

    def drop_patches(self, share: float) -> None:
        """Makes the image tower drop this share of the patches in training; 0 leaves it as it is.

        Its module has no weights and is in no configuration, so exports know nothing of it. Call it
        after locks and adapters. Raises ValueError for a tower other than open_clip's own vision
        transformer, and where frozen blocks, which run as in evaluation, come before all trained
        ones.
        """
        if not share:
            return
        if not hasattr(self.visual, "patch_dropout"):
            raise ValueError(
                f"patch_dropout is {share}, and the image tower is a {type(self.visual).__name__}: "
                "patches are dropped in open_clip's own vision transformers alone; leave it out"
            )
        if self.num_frozen_blocks:
            raise ValueError(
                f"patch_dropout is {share}, but the first {self.num_frozen_blocks} of "
                f"{self.num_blocks} blocks of the image tower are locked and see whole pictures: "
                "set lock.image_blocks=all, or leave patch_dropout out"
            )
        self.visual.patch_dropout = PatchDropout(share).train(self.visual.training)

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Recomputes the blocks of all towers in the backward pass instead of keeping activations.

        Gradients stay the same bit for bit. Raises ValueError where blocks of the image tower have
        batch norms, whose running statistics would count every batch twice.
        """
        blocks = self.layout.block_modules(self.visual) if enabled else []
        if any(isinstance(m, _BatchNorm) for block in blocks for m in block.modules()):
            raise ValueError(
                f"gradient checkpointing is on, but recomputing the blocks of a "
                f"{type(self.visual).__name__} would count every batch twice in its batch norms: "
                "turn it off"
            )
        self._recompute = enabled
        if not self.reads_texts:
            return
        if self.text_tower is self.clip:
            self.clip.transformer.grad_checkpointing = enabled
        else:
            self.text_tower.set_grad_checkpointing(enabled)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Makes torch compile every block when it first runs; names stay as they are."""
        from torch._dynamo import config  # seconds to import

        # torch stops compiling a function after a number of variants. All blocks of a class are one
        # function, with variants for tower, precision, batch size, with gradient and without.
        config.recompile_limit = max(config.recompile_limit, 32)
        for block in self.blocks():
            block.compile(backend=backend)

    def save(self, directory: Path, base_digest: str | None = None) -> None:
        """Writes a directory that `mclclip.load_model` reads: configuration and safetensors.

        With a text tower plain open_clip loads it as `local-dir:`; the logit scale is written
        0-dimensional, as open_clip's models have it. A projector is left out. `base_digest` names
        the base it was fine-tuned from (`weights.base_digest` of its export); None: it is a base
        itself.
        """
        directory = Path(directory)
        tensors = {name: tensor.detach() for name, tensor in self.exported.state_dict().items()}
        for name in ("logit_scale", "logit_bias"):
            if name in tensors:
                tensors[name] = tensors[name].reshape(())
        if hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(str(directory))
        base = {"base_digest": base_digest or weights.digest_tensors(tensors)}
        weights.write_model(directory, self.config | base, tensors)


class PatchDropout(nn.Module):
    """Tokens [b, 1 + n, D] -> [b, 1 + k, D], k = max(1, int(n (1 - share))); as they are in eval.

    Source: Li et al., "Scaling Language-Image Pre-training via Masking" (FLIP, 2022), section 3.
    The class token and the positions of the patches that stay are kept, as in open_clip's
    PatchDropout, whose draws these are on a CPU; its indices lie in main memory, and a GPU would
    wait for them at every step.

    The first token is the class token. Patches are drawn for each picture from torch's global
    generator of the device, which every training step seeds, and gradient caching replays.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens with their positions added -> those that are kept, in the order of their draws."""
        if not self.training:
            return tokens
        first, patches = tokens[:, :1], tokens[:, 1:]
        batch, num = patches.shape[:2]
        keys = torch.randn(batch, num, device=tokens.device)
        drawn = keys.topk(max(1, int(num * (1 - self.share))), dim=1).indices
        rows = torch.arange(batch, device=tokens.device)[:, None]
        return torch.cat([first, patches[rows, drawn]], dim=1)


def _refuse_texts(texts: object) -> Tensor:
    """The tokenizer of a model without a text tower: raises ValueError."""
    raise ValueError(NO_TEXT)


def projector_of(dim: int, widths: Sequence[int]) -> nn.Module:
    """Linear layers of these widths with a batch norm and a ReLU between them.

    With two layers it is the projector of SimCLR's code; section 4.2 of the paper (Chen et al.,
    2020) has no batch norm. Without widths it is the identity.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise([dim, *widths])):
        if number:
            layers += [nn.BatchNorm1d(before), nn.ReLU()]
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)
