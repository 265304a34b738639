"""The sigmoid loss without a mask is open_clip's SigLipLoss, in value and gradient."""

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import pytest
import torch
from open_clip.loss import SigLipLoss
from torch.nn import functional

from mclclip.objectives.sigmoid import Sigmoid
from tests.objective_loops import parts_of


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tile", [1024, 5])
def test_mask_of_ones_is_siglip(dtype: torch.dtype, tolerance: float, tile: int) -> None:
    random = torch.Generator().manual_seed(0)
    image, text = (torch.randn(16, 8, generator=random, dtype=dtype) for _ in range(2))
    scale, bias = (torch.tensor(value, dtype=dtype) for value in (10.0, -10.0))
    inputs = [tensor.requires_grad_() for tensor in (image, text, scale, bias)]
    unit = [functional.normalize(x, dim=-1) for x in (image, text)]
    found = parts_of(
        Sigmoid(tile=tile),
        image_features=unit[0],
        group_ids=torch.full((16, 1), 4),
        sample_id=torch.arange(16),
        text_features=unit[1],
        logit_scale=scale,
        logit_bias=bias,
    )
    expected = SigLipLoss()(*unit, scale, bias)
    torch.testing.assert_close(found["loss"], expected, atol=tolerance, rtol=tolerance)
    assert found["rows_without_negatives"] == 0
    for mine, theirs in zip(
        torch.autograd.grad(found["loss"], inputs, retain_graph=True),
        torch.autograd.grad(expected, inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)
