"""The model that is trained: an image tower, perhaps a text tower, perhaps a projector.

`mclclip.models.loading.load_towers` makes these. This file does not import open_clip.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.data.text_rows import TextRows
from mclclip.models import towers, weights
from mclclip.models.transforms import Transform, as_planes
from mclclip.util import files

MAX_LOGIT_SCALE = 100.0
"""The largest logit scale in training, unless a training begins with a larger one."""
NO_TEXT = (
    "the model is an image encoder without a text tower: take a CLIP model for what needs texts, "
    "such as zero-shot classification and retrieval"
)


def unit(features: Tensor) -> Tensor:
    """Scales rows [..., D] to unit length, x / max(|x|, 1e-12), in fp32 (float64 stays float64)."""
    if features.dtype != torch.float64:
        features = features.float()
    return functional.normalize(features, dim=-1, eps=1e-12)


class Model(nn.Module):
    """Towers with their transforms and locks; the image tower can be split into trunk and tail.

    exported     the module that an export holds; its `visual` is the image tower. It is stored in
                 the attribute `part`: `clip` if there is a text tower, else `tower`, and the names
                 of its parameters begin with that. A CLIP's `logit_scale` has shape [1], because
                 FSDP and DeepSpeed refuse 0-dimensional parameters
    config       content of the export's JSON file
    layout       the layout of the image tower, or the reason why it has none
    transforms   of training and of validation: image -> [C, H, W]
    tokenizer    of the text tower: list of N strings -> int64 [N, context], or rows [N, W] where
                 these stand for texts (``TextRows``); None: no text tower
    projector    widths of linear layers on top of an image tower alone; the objective gets their
                 output, while `encode_image`, evaluation and exports use the tower

    num_frozen_blocks   how many first blocks of the image tower run without a graph
    first_block         the block with which `encode_image` starts; if it is not 0, `encode_image`
                        takes that block's input, such as stored rows, in the place of images
    memory_format       how images and hidden values lie in memory; results differ by rounding alone
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
        self.part = "clip" if self.reads_texts else "tower"
        setattr(self, self.part, exported)
        # The largest values of parameters, by name; the optimizer sets larger ones back to them.
        self.upper_bounds: dict[str, float] = {}
        if self.reads_texts:
            start, bound = self.clip.logit_scale, math.log(MAX_LOGIT_SCALE)
            bound = bound if start.is_meta else max(bound, start.item())
            self.upper_bounds["clip.logit_scale"] = bound
        self.tokenizer = tokenizer if self.reads_texts else _refuse_texts
        self.config = copy.deepcopy(dict(config))
        self.embed_dim = int(self.config["model_cfg"]["embed_dim"])
        self.projector = build_projector(self.embed_dim, projector)
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
        """The module whose state dict an export holds: open_clip's CLIP, or an image tower."""
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
        """Mean and standard deviation of pixels between 0 and 1, float32 [C, 1, 1] or [1, 1, 1].

        Both transforms return (pixels - mean) / deviation.
        """
        settings = self.config["preprocess_cfg"]
        return as_planes(settings["mean"], settings["std"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with parameters of its own. It shares the tokenizer and the transforms, which have
        no state that changes: a tokenizer's tables take half a second to copy."""
        shared = (self.tokenizer, self.preprocess_train, self.preprocess_val)
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo |= {id(part): part for part in shared}
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    # --- layouts -----------------------------------------------------------------------------

    @property
    def layout(self) -> towers.ImageLayout:
        """Layout of the image tower. Raises ValueError, with the reason, if it has none."""
        if isinstance(self._layout, str):
            raise ValueError(self._layout)
        return self._layout

    @property
    def text_layout(self) -> towers.TowerLayout:
        """Layout of the text tower. Raises ValueError if its blocks are not found."""
        return towers.text_layout(self.text_tower)

    @property
    def num_blocks(self) -> int:
        """Number of the image tower's blocks, as its layout counts them."""
        return len(self.layout.blocks)

    def layers_above(self, name: str) -> int:
        """Returns how many layers lie above a parameter in its tower, for layer-wise decay.

        `name` is for example "clip.visual.proj"; at the top it is 0. Raises ValueError for towers
        without a layout.
        """
        tower, _, rest = self.tensor_names(name)[1].partition(".")
        if tower == "image":
            return self.layout.layers_above(rest)
        return self.text_layout.layers_above(rest) if tower == "text" else 0

    def tensor_names(self, name: str) -> tuple[str, str]:
        """Returns the two names by which options find a parameter.

        The first is that of the tensor in an export, such as "visual.proj" for "clip.visual.proj";
        an adapter's is "visual.proj.lora_a". The second begins with the tower: "image.proj", or
        "text.ln_final.bias" for "ln_final.bias". Parameters of no tower have one name, twice.
        """
        inside = name.removeprefix(f"{self.part}.")
        inside = re.sub(r"\.parametrizations\.(\w+)\.(0\.)?", r".\1.", inside)
        if name.startswith(f"{self.part}.visual."):
            return inside, f"image.{inside.removeprefix('visual.')}"
        if not name.startswith(f"{self.part}.") or inside.startswith("logit_"):
            return inside, inside
        return inside, f"text.{inside.removeprefix('text.')}"

    def blocks(self) -> list[nn.Module]:
        """Returns the modules of all towers' blocks, which are sharded or compiled one by one.

        A tower without a layout contributes none.
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
        """Computes an objective's features, by name, of images and of tokens or text features.

        Returns `image_features` [b, F] (F: `feature_dim`) for images and `text_features` [b, D] for
        texts, of unit length in fp32 or float64; with a text tower also `logit_scale`, and
        `logit_bias` if the model has one. Raises ValueError for tokens without a text tower.
        """
        output: dict[str, Tensor] = {}
        if self.reads_texts:
            output["logit_scale"] = self.logit_scale()
            if self.has_logit_bias:
                output["logit_bias"] = self.clip.logit_bias.reshape(())
        if image is not None:
            output["image_features"] = unit(self.projector(self.encode_image(image)))
        if text_features is not None:
            output["text_features"] = unit(text_features)
        elif text is not None:
            output["text_features"] = self.encode_text(text, normalize=True)
        return output

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """[B, C, H, W] -> [B, D], with `normalize` of unit length. Frozen blocks have no graph.

        Pictures may have another size than `image_size`: positions are then resized (bicubic).
        """
        frozen = self.num_frozen_blocks
        if self.first_block:
            whole = self.first_block > self.num_blocks  # then `images` are features already
            features = images if whole else self.encode_tail(images, self.first_block)
        elif frozen and not images.requires_grad:
            with torch.no_grad():
                hidden = self.encode_trunk(images, frozen)
            features = self.encode_tail(hidden, frozen)
        elif self._recompute or tuple(images.shape[-2:]) != towers.pair(self.image_size):
            features = self.encode_tail(images, 0)
        else:
            output = self.visual(towers.arrange(images, self.memory_format))
            # Towers with output_tokens return (features, tokens).
            features = output[0] if isinstance(output, tuple) else output
        return unit(features) if normalize else features

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        """[B, context] int64, or text rows [B, W] -> [B, D], with `normalize` of unit length.

        Raises ValueError if there is no text tower.
        """
        if not self.reads_texts:
            raise ValueError(NO_TEXT)
        features: Tensor = self.clip.encode_text(tokens)
        return unit(features) if normalize else features

    def empty_texts(self, number: int) -> Tensor:
        """Returns a tensor in the shape and the type that `encode_text` takes for ``number`` texts:
        tokens int64 [number, context], or text rows [number, W]."""
        if isinstance(self.tokenizer, TextRows):
            return torch.zeros(number, self.tokenizer.width)
        length = int(getattr(self.tokenizer, "context_length", 77))
        return torch.zeros(number, length, dtype=torch.int64)

    def encode_trunk(self, images: Tensor, num_trunk_blocks: int) -> Tensor:
        """[B, C, H, W] -> output of the first `num_trunk_blocks` blocks; for 0 the images."""
        images = towers.arrange(images, self.memory_format)
        return self.layout.run_trunk(self.visual, images, num_trunk_blocks)

    def encode_tail(self, hidden: Tensor, num_trunk_blocks: int, project: bool = True) -> Tensor:
        """Runs the blocks after the first `num_trunk_blocks` on the output of `encode_trunk`.

        Returns features [B, D], not of unit length; with `project=False` those before the
        projection, [B, width]. Raises ValueError if these do not exist, since the attention pool is
        the projection.
        """
        hidden = towers.arrange(hidden, self.memory_format)
        return self.layout.run_tail(self.visual, hidden, num_trunk_blocks, project, self._recompute)

    def encode_pooled(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> features before the projection, [B, width]; raises as `encode_tail`."""
        return self.encode_tail(images, 0, project=False)

    def trunk_digest(self, num_trunk_blocks: int) -> str:
        """Returns a digest of everything but the images that the output of `encode_trunk` depends
        on: the tensors of these blocks in fp32, the architecture, and the preprocessing."""
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
        """Returns the multiplier of cosines, 0-dimensional; 1 without a text tower."""
        if not self.reads_texts:
            return torch.ones(())
        scale: Tensor = self.clip.logit_scale
        return scale.reshape(()).exp()

    @property
    def has_logit_bias(self) -> bool:
        """True if the model has a logit bias, because its configuration has `init_logit_bias`."""
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
        """Makes these parts trainable, freezes all others, and returns the trainable names.

        image_blocks      the last n blocks (an open_clip ResNet counts its stem and its residual
                          blocks: 17 in an RN50); "all" adds the layers before the first block
        image_norm        the final norm, and the batch norms of trained blocks; frozen batch norms
                          keep their running statistics
        image_projection  the projection, and poolings that have weights
        text              the text tower's last `text_blocks` blocks, its final norm and projection;
                          "all" adds the embedding
        logit_bias        the bias, if the model has one; a softmax does not depend on it

        A projector is always trained. Without a text tower the options of texts and logits have no
        effect. Raises ValueError for more blocks than there are, and for towers without a layout.
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
        """Sets `num_frozen_blocks` and eval modes by what requires gradients.

        Returns the names of trainable parameters. Call it after a change of `requires_grad`, unless
        `lock` made it.
        """
        trained = [n for n, p in self.visual.named_parameters() if p.requires_grad]
        self.num_frozen_blocks = self.layout.count_without(trained)
        self.train(self.training)
        return sorted(name for name, p in self.named_parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> Self:
        """Sets training mode; modules whose parameters are all frozen stay in eval mode."""
        super().train(mode)
        if mode:
            for module in self.modules():
                trained = [p.requires_grad for p in module.parameters()]
                if trained and not any(trained):
                    module.eval()
            if self.num_frozen_blocks:  # also their modules without parameters, such as dropout
                trunk = self.layout.trunk(self.num_frozen_blocks)
                for name, module in self.visual.named_modules():
                    if towers.belongs(name, trunk):
                        module.eval()
        return self

    def drop_patches(self, share: float) -> None:
        """Makes the image tower drop this share of the patches in training; 0 leaves it as it is.

        Exports are not affected, since the dropout has no weights and is in no configuration. Call
        it after locks and adapters. Raises ValueError unless the tower is open_clip's own vision
        transformer, and if its first blocks are frozen, since these always see whole pictures.
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
        self.visual.patch_dropout = towers.PatchDropout(share).train(self.visual.training)

    def set_grad_checkpointing(self, enabled: bool = True) -> None:
        """Recomputes the blocks of all towers in the backward pass instead of keeping activations.

        Gradients stay the same, bit for bit. Raises ValueError if blocks of the image tower have
        batch norms, since their running statistics would count every batch twice.
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
        """Makes torch compile every block when it first runs; parameters keep their names."""
        from torch._dynamo import config  # seconds to import

        # torch stops compiling a function after `recompile_limit` variants. All blocks of a class
        # are one function, with variants for tower, precision, batch size, and use of gradients.
        config.recompile_limit = max(config.recompile_limit, 32)
        for block in self.blocks():
            block.compile(backend=backend)

    def save(self, directory: Path, base_digest: str | None = None) -> None:
        """Writes a directory that `mclclip.load_model` reads: configuration and safetensors.

        If there is a text tower, plain open_clip loads it as `local-dir:PATH`; the logit scale is
        written 0-dimensional, as in open_clip's models. A projector is left out. `base_digest` is
        `weights.base_digest` of the model that this one was fine-tuned from; None records the
        model's own, since it is a base itself.
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


def _refuse_texts(texts: object) -> Tensor:
    """Stands for the tokenizer of a model without a text tower; raises ValueError."""
    raise ValueError(NO_TEXT)


def build_projector(dim: int, widths: Sequence[int]) -> nn.Module:
    """Builds linear layers of these widths, with a batch norm and a ReLU between them.

    With two layers it is the projector of SimCLR's code; section 4.2 of the paper (Chen et al.,
    2020) has no batch norm. Without widths it is the identity.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise([dim, *widths])):
        if number:
            layers += [nn.BatchNorm1d(before), nn.ReLU()]
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)
