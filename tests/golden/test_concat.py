"""The joined encoder against the separate exports, loaded and run by plain open_clip."""

from pathlib import Path

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.models.encoder import Encoder, load_model, save_concat
from mclclip.models.loading import load_towers
from mclclip.models.options import Variant
from tests.unit.models.conftest import CONFIGS
from tests.unit.models.stages import save_stages

IMAGES = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TEXTS = ["a red square", "two blue dots", "nothing", "left of it"]


def plain_features(directory: Path) -> tuple[Tensor, Tensor]:
    """Raw image and text features of one export."""
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{directory}")
    tokens = open_clip.get_tokenizer(f"local-dir:{directory}")(TEXTS)
    with torch.no_grad():
        return model.eval().encode_image(IMAGES), model.encode_text(tokens)


def joined_by_hand(stages: list[Path], variant: Variant) -> tuple[Tensor, Tensor]:
    pairs = [plain_features(stage) for stage in stages]
    images = [image for image, _ in pairs]
    if variant == "stage_norm":
        images = [functional.normalize(image, dim=-1) for image in images]
    texts = [functional.normalize(text, dim=-1) for _, text in pairs]
    image, text = torch.cat(images, dim=-1), torch.cat(texts, dim=-1)
    return functional.normalize(image, dim=-1), functional.normalize(text, dim=-1)


@pytest.mark.parametrize(
    ("config", "image_blocks", "text", "trunk", "variant"),
    [
        ("tiny_vit", 1, True, 2, "stage_norm"),
        ("tiny_vit", 3, False, 0, "raw"),
        ("tiny_resnet", 2, False, 3, "raw"),
    ],
)
def test_concat_is_the_concatenation_of_the_exports(
    config: str, image_blocks: int, text: bool, trunk: int, variant: Variant, tmp_path: Path
) -> None:
    model = load_towers(CONFIGS / f"{config}.json", seed=2)
    stages = save_stages(model, tmp_path, 2, image_blocks=image_blocks, text=text)
    record = save_concat(stages, variant, tmp_path / "concat")
    assert (record["num_trunk_blocks"], record["shared_text"]) == (trunk, not text)
    encoder = load_model(tmp_path / "concat")
    assert isinstance(encoder, Encoder)
    image, text_feature = joined_by_hand(stages, variant)
    found_image = encoder.encode_image(IMAGES)
    found_text = encoder.encode_text(encoder.tokenizer(TEXTS))
    torch.testing.assert_close(found_image, image, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_text, text_feature, atol=1e-5, rtol=0)
    similarity = found_image @ found_text.T
    torch.testing.assert_close(similarity, image @ text_feature.T, atol=1e-5, rtol=0)
