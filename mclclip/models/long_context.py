"""A longer context for a text tower: its positional embeddings stretched, the first 20 kept.

Source: Zhang et al., "Long-CLIP: Unlocking the Long-Text Capability of CLIP" (2024), section 3.1.
Captions of CLIP's training are short, so its first 20 positions are trained well and stay as they
are; the others are stretched to four times as many by linear interpolation. A context of 77 tokens
becomes 248. In a causal tower no token sees those after it, so a text that ends within 20 tokens
keeps its features. A tower without a causal mask sees the padding too, and its features change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEPT, _RATIO = 20, 4
_LONGEST = 248  # of 77 tokens: a context that was stretched already is none to be stretched
_DEFAULT = 77  # open_clip's context where a config names none


def longer_config(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Model config whose text tower has a context of 20 + 4 (L - 20) tokens in the place of L.

    Raises ValueError for a model without a text tower, for a text tower of Hugging Face or with a
    class token (``embed_cls``), and for a context of 20 tokens or less or of more than 77, which a
    stretched one has.
    """
    text = dict(model_cfg.get("text_cfg") or {})
    length, reason = text.get("context_length", _DEFAULT), ""
    if not text:
        reason = "the model has no text tower"
    elif text.get("hf_model_name"):
        reason = f"the text tower is {text['hf_model_name']} of Hugging Face"
    elif text.get("embed_cls"):
        reason = "the text tower has a class token after the text (embed_cls)"
    elif length <= _KEPT:
        reason = f"the text tower has a context of {length} tokens, wanted more than {_KEPT}"
    elif (longer := _KEPT + _RATIO * (length - _KEPT)) > _LONGEST:
        reason = (
            f"the context of {length} tokens would become {longer}, wanted {_LONGEST} at most (it "
            "may have been stretched before)"
        )
    if reason:
        raise ValueError(
            f"long_context=true stretches the positions after the first {_KEPT} of open_clip's own "
            f"text towers, and {reason}: set long_context=false, or take another model"
        )
    text["context_length"] = _KEPT + _RATIO * (length - _KEPT)
    return {**model_cfg, "text_cfg": text}


def stretched(positions: Tensor) -> Tensor:
    """Positional embeddings [L, D] -> [20 + 4 (L - 20), D].

    Row 20 + 4 i + j is (1 - j/4) p_{20+i} + (j/4) p_{21+i}, j = 0 to 3. There is no row after the
    last one, p_{L-1}, where p_{L-1} + (j/4) (p_{L-1} - p_{L-2}) goes on in a straight line.
    """
    rows, steps = positions[_KEPT:], positions[_KEPT - 1 :].diff(dim=0)
    steps = torch.cat([steps[1:], steps[-1:]])
    quarters = [rows + j / _RATIO * steps for j in range(_RATIO)]
    return torch.cat([positions[:_KEPT], torch.stack(quarters, dim=1).flatten(0, 1)])


def stretch(clip: Any) -> None:
    """Stretches the context of open_clip's module in place: positions, causal mask and lengths.

    ``longer_config`` must have taken its config.
    """
    tower = getattr(clip, "text", clip)  # of a CustomTextCLIP, or the CLIP itself
    tower.positional_embedding.data = stretched(tower.positional_embedding.data)
    length = len(tower.positional_embedding)
    if tower.attn_mask is not None:
        tower.attn_mask = tower.attn_mask.new_full((length, length), -float("inf")).triu_(1)
    for module in (clip, tower):
        module.context_length = length
    if hasattr(tower, "num_pos"):
        tower.num_pos = length
