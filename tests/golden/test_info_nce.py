"""InfoNCE without a mask is open_clip's ClipLoss, in value and gradient."""

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.info_nce import InfoNCE
from tests.objective_loops import parts_of


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(16, 8, generator=generator, dtype=dtype) for _ in range(2))
    scale = torch.tensor(1 / 0.07, dtype=dtype)
    return [tensor.requires_grad_() for tensor in (image, text, scale)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("tile", [1024, 5])
def test_mask_of_ones_is_clip_loss(dtype: torch.dtype, tolerance: float, tile: int) -> None:
    image, text, scale = inputs(dtype)
    group_ids, ids = torch.full((16, 1), 4), torch.arange(16)
    unit = (functional.normalize(image, dim=-1), functional.normalize(text, dim=-1))
    found = parts_of(
        InfoNCE(tile=tile),
        image_features=unit[0],
        text_features=unit[1],
        logit_scale=scale,
        group_ids=group_ids,
        sample_id=ids,
    )
    expected = open_clip.ClipLoss()(*unit, scale)
    torch.testing.assert_close(found["loss"], expected, atol=tolerance, rtol=tolerance)
    assert found["rows_without_negatives"] == 0
    for mine, theirs in zip(
        torch.autograd.grad(found["loss"], (image, text, scale), retain_graph=True),
        torch.autograd.grad(expected, (image, text, scale)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
