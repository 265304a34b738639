"""transformers' LLaVA around a tower, with a language model of some thousand random weights.

It reads nothing but torch and transformers, 4.37 or newer, so that it also runs in an environment
without mclclip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

IMAGE_TOKEN = 99


def around(tower: Any, layers: Any) -> Any:
    """LLaVA with this tower and its weights, which reads the states ``layers`` of it."""
    text = transformers.LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=tower.config, text_config=text, vision_feature_layer=layers,
        vision_feature_select_strategy="default", image_token_index=IMAGE_TOKEN,
        image_seq_length=_num_patches(tower.config),
    )  # fmt: skip
    torch.manual_seed(0)
    llava = transformers.LlavaForConditionalGeneration(config).eval()
    _parts(llava).vision_tower.load_state_dict(tower.state_dict())
    return llava


def _parts(llava: Any) -> Any:
    """What holds tower and projector: version 4.37 has them on top."""
    return getattr(llava, "model", llava)


def _num_patches(config: Any) -> int:
    found: int = (config.image_size // config.patch_size) ** 2
    return found


def forward(llava: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels [B, C, H, W], each in a sentence -> what reaches the projector [B, patches, channels],
    and the logits of the next tokens [B, 3 + patches, vocabulary]."""
    # One token stands for an image in version 4.37, and one for each of its patches later.
    patches = _num_patches(llava.config.vision_config) if hasattr(llava, "model") else 1
    tokens = torch.tensor([[1, *[IMAGE_TOKEN] * patches, 5, 6]]).expand(len(pixels), -1)
    read: list[Tensor] = []
    projector = _parts(llava).multi_modal_projector
    hook = projector.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    with torch.no_grad():
        mask = torch.ones_like(tokens)
        logits = llava(input_ids=tokens, attention_mask=mask, pixel_values=pixels).logits
    hook.remove()
    return read[0], logits


def reloaded(llava: Any, folder: str | Path) -> Any:
    """The same model, written to a folder and read again."""
    llava.save_pretrained(str(folder))
    return transformers.LlavaForConditionalGeneration.from_pretrained(str(folder)).eval()
