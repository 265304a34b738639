"""Several stages of a CLIP, joined, as a model of Hugging Face transformers.

    StagesVisionModel   the image half: `pooler_output` is the joined feature
    StagesModel         both halves, with `get_image_features`, `get_text_features`, `logit_scale`

All stages have the blocks of open_clip's ViT. Their first `num_trunk_blocks` blocks are equal, so
they are stored and run once. `hidden_states` has one state for each stage (that before the stage's
last block), then these joined, then the last states joined. LLaVA can read them in two ways, by its
option `vision_feature_layer`:

    [0, 1, 2]   transformers 5 concatenates these states. Its projector takes `hidden_size` channels
                of each
    -2          transformers 4.37 and LLaVA's own code read a single state: that of all stages,
                joined. Their projector takes `hidden_size` channels in all, so this must then be
                `num_stages` times `width`: `from_pretrained(..., hidden_size=...)`, or in
                config.json

Importing this module registers both with AutoConfig and AutoModel, and the second with the class of
the pipeline for zero-shot classification. Exports have a copy of this file beside their weights,
which `trust_remote_code=True` runs; it needs torch and transformers (4.37 or newer), and nothing of
mclclip.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForZeroShotImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput


class _Sizes(PretrainedConfig):  # type: ignore[misc]
    """A configuration that has the fields in ``sizes``, a mapping of names to defaults."""

    sizes: ClassVar[dict[str, Any]] = {}

    def __init__(self, **kwargs: Any) -> None:
        for name, default in self.sizes.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)


class StagesVisionConfig(_Sizes):
    """Configuration of the image half.

    num_stages, num_trunk_blocks   number of towers, and of the first blocks that they share
    variant      `raw` joins features as they are, `stage_norm` scales each to unit length first
    width        width of a tower's blocks
    hidden_size  what LLaVA's projector reads: `width`, or `num_stages` times `width`
    """

    model_type = "mclclip_stages_vision"
    base_config_key = "vision_config"
    sizes: ClassVar[dict[str, Any]] = dict(
        num_stages=1, num_trunk_blocks=0, variant="raw", width=None,
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=8, num_channels=3, hidden_act="gelu", layer_norm_eps=1e-5,
        projection_dim=32,
    )  # fmt: skip

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = kwargs.get("width") or self.hidden_size


class StagesTextConfig(_Sizes):
    """Configuration of the text half; `num_towers` is 1 if all stages share their text tower."""

    model_type = "mclclip_stages_text"
    base_config_key = "text_config"
    sizes: ClassVar[dict[str, Any]] = dict(
        num_towers=1, hidden_size=32, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, vocab_size=49408, max_position_embeddings=77, hidden_act="gelu",
        layer_norm_eps=1e-5, projection_dim=32,
    )  # fmt: skip


class StagesConfig(PretrainedConfig):  # type: ignore[misc]
    """Configuration of a joined CLIP: those of its image half and its text half."""

    model_type = "mclclip_stages"
    sub_configs = {"vision_config": StagesVisionConfig, "text_config": StagesTextConfig}  # noqa: RUF012

    def __init__(
        self,
        vision_config: dict[str, Any] | StagesVisionConfig | None = None,
        text_config: dict[str, Any] | StagesTextConfig | None = None,
        logit_scale_init_value: float = 2.6592,
        **kwargs: Any,
    ) -> None:
        self.vision_config = _of(StagesVisionConfig, vision_config)
        self.text_config = _of(StagesTextConfig, text_config)
        self.logit_scale_init_value = logit_scale_init_value
        self.projection_dim = self.vision_config.projection_dim * self.vision_config.num_stages
        super().__init__(**kwargs)


def _of(kind: type[Any], config: Any) -> Any:
    if isinstance(config, kind):
        return config
    return kind(**(config or {}))


def unit(features: Tensor) -> Tensor:
    """Scales rows [..., D] to unit length, in fp32."""
    return functional.normalize(features.float(), dim=-1, eps=1e-12)


def _join(features: Any) -> Tensor:
    """Concatenates S features [B, D] -> [B, S*D] of unit length."""
    return unit(torch.cat([feature.float() for feature in features], dim=-1))


class Block(nn.Module):
    """A block of CLIP's transformers: attention and MLP, each after a layer norm."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        eps = config.layer_norm_eps
        self.num_heads, self.activation = config.num_attention_heads, config.hidden_act
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc = nn.Linear(width, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, width)

    def forward(self, hidden: Tensor, causal: bool = False) -> Tensor:
        """[B, tokens, width] -> the same shape."""
        batch, tokens, width = hidden.shape
        heads = (batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = (
            self.in_proj(self.ln_1(hidden)).reshape(heads).permute(2, 0, 3, 1, 4).unbind()
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        hidden = hidden + self.out_proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        inner = self.c_fc(self.ln_2(hidden))
        quick = self.activation == "quick_gelu"
        inner = inner * torch.sigmoid(1.702 * inner) if quick else functional.gelu(inner)
        output: Tensor = hidden + self.c_proj(inner)
        return output


class Trunk(nn.Module):
    """The embedding of the patches, and the first `num_blocks` blocks."""

    def __init__(self, config: StagesVisionConfig, num_blocks: int) -> None:
        super().__init__()
        width, patch = config.width, config.patch_size
        self.conv1 = nn.Conv2d(config.num_channels, width, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        places = (config.image_size // patch) ** 2 + 1
        self.positional_embedding = nn.Parameter(torch.zeros(places, width))
        self.ln_pre = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.blocks = nn.ModuleList([Block(config, width) for _ in range(num_blocks)])

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """[B, C, H, W] -> the states [B, tokens, width] before each block, and after the last."""
        patches = self.conv1(pixels.to(self.conv1.weight.dtype)).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(patches.shape[0], 1, -1)
        hidden = torch.cat([first, patches], dim=1) + self.positional_embedding
        states = [self.ln_pre(hidden)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states


class Tail(nn.Module):
    """The last blocks of one stage, its final norm and its projection.

    If stages share no blocks, it also has the embedding and all blocks, as a `Trunk`.
    """

    def __init__(self, config: StagesVisionConfig) -> None:
        super().__init__()
        num_blocks = config.num_hidden_layers - config.num_trunk_blocks
        width, eps = config.width, config.layer_norm_eps
        if config.num_trunk_blocks:
            self.blocks = nn.ModuleList([Block(config, width) for _ in range(num_blocks)])
        else:
            self.trunk = Trunk(config, num_blocks)
        self.ln_post = nn.LayerNorm(width, eps=eps)
        self.proj = nn.Linear(width, config.projection_dim, bias=False)

    def forward(self, hidden: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the stage on the trunk's last state `hidden` and the state `before` its last block.

        If stages share no blocks, `hidden` has pixels and `before` is None. Returns the state
        before the last block, the last state [B, tokens, width], and the feature [B, D].
        """
        if before is None:
            states = self.trunk(hidden)
        else:
            states = [before, hidden]
            for block in self.blocks:
                states.append(block(states[-1]))
        return states[-2], states[-1], self.proj(self.ln_post(states[-1][:, 0]))


class TextTower(nn.Module):
    """CLIP's text tower; it reads the feature at the largest token id, which ends a text."""

    def __init__(self, config: StagesTextConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.token_embedding = nn.Embedding(config.vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.zeros(config.max_position_embeddings, width))
        layers = range(config.num_hidden_layers)
        self.blocks = nn.ModuleList([Block(config, width) for _ in layers])
        self.ln_final = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.proj = nn.Linear(width, config.projection_dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, context] int64 -> [B, D]."""
        hidden = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, causal=True)
        ends = tokens.argmax(dim=-1)
        feature: Tensor = self.proj(self.ln_final(hidden[torch.arange(tokens.shape[0]), ends]))
        return feature


class _Loaded(PreTrainedModel):  # type: ignore[misc]
    """Settings that transformers needs of a model class, and how it draws weights without files."""

    main_input_name = "pixel_values"
    supports_gradient_checkpointing = False
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class StagesVisionModel(_Loaded):
    """The image half of a joined CLIP: all stages' image towers."""

    config_class = StagesVisionConfig

    def __init__(self, config: StagesVisionConfig) -> None:
        super().__init__(config)
        joined = config.num_stages * config.width
        if config.hidden_size not in (config.width, joined):
            raise ValueError(
                f"hidden_size is {config.hidden_size}, wanted {config.width}, or {joined} where "
                f"the states of all {config.num_stages} stages are read as one"
            )
        if config.num_trunk_blocks:
            self.trunk = Trunk(config, config.num_trunk_blocks)
        self.stages = nn.ModuleList([Tail(config) for _ in range(config.num_stages)])
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: Any = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs all stages on pixels [B, C, H, W].

        pooler_output      the joined feature [B, S*D], of unit length
        hidden_states      for each stage the state before its last block [B, tokens, width]; then
                           these joined [B, tokens, S*width], so that -2 means the same as in a
                           single CLIP; then the last states joined
        last_hidden_state  the last states joined [B, tokens, S*width]

        States are always returned, since they cost little. `kwargs` are not read.
        """
        hidden, before = pixel_values, None
        if self.config.num_trunk_blocks:
            *_, before, hidden = self.trunk(pixel_values)
        penultimate, last, features = zip(
            *(stage(hidden, before) for stage in self.stages), strict=True
        )
        if self.config.variant != "raw":
            features = tuple(unit(feature) for feature in features)
        joined = _join(features)
        states = (*penultimate, torch.cat(penultimate, dim=-1), torch.cat(last, dim=-1))
        output = BaseModelOutputWithPooling(
            last_hidden_state=states[-1], pooler_output=joined, hidden_states=states
        )
        return output if return_dict is not False else output.to_tuple()


class StagesModel(_Loaded):
    """A joined CLIP: all stages' image towers, the text towers, and the logit scale."""

    config_class = StagesConfig

    def __init__(self, config: StagesConfig) -> None:
        super().__init__(config)
        self.vision_model = StagesVisionModel(config.vision_config)
        towers = [TextTower(config.text_config) for _ in range(config.text_config.num_towers)]
        self.text_towers = nn.ModuleList(towers)
        self.logit_scale = nn.Parameter(torch.tensor(config.logit_scale_init_value))
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> Tensor:
        """[B, C, H, W] -> joined image features [B, S*D] of unit length."""
        features: Tensor = self.vision_model(pixel_values).pooler_output
        return features

    def get_text_features(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """[B, context] int64 -> joined text features [B, S*D] of unit length.

        Texts need no mask, since features are read at their ends and attention is causal.
        """
        rows = [unit(tower(input_ids)) for tower in self.text_towers]
        repeats = self.config.vision_config.num_stages // len(rows)
        return _join(rows * repeats)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns transformers' `CLIPOutput`: `image_embeds` [B, S*D] for pixels, `text_embeds`
        [N, S*D] for tokens, and for both `logits_per_image` [B, N] and `logits_per_text`."""
        results: dict[str, Tensor] = {}
        if pixel_values is not None:
            results["image_embeds"] = self.get_image_features(pixel_values)
        if input_ids is not None:
            results["text_embeds"] = self.get_text_features(input_ids)
        if len(results) == 2:
            cosines = results["image_embeds"] @ results["text_embeds"].T
            results["logits_per_image"] = self.logit_scale.exp() * cosines
            results["logits_per_text"] = results["logits_per_image"].T
        output = CLIPOutput(**results)
        return output if return_dict is not False else output.to_tuple()


for _config, _model in ((StagesVisionConfig, StagesVisionModel), (StagesConfig, StagesModel)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
AutoModelForZeroShotImageClassification.register(StagesConfig, StagesModel, exist_ok=True)
