"""D_R and D_NR on a linear model, where the path is known in closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.figures.adversarial_sets import draw_targets, move_to_targets

EPS = 0.01
IMAGES = torch.tensor([[0.70, 0.455], [0.5, 0.89], [0.3, 0.21], [1.0, 0.0]], dtype=torch.float64)


def run(targets: list[int], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The readout of pixels x says 1 where x1 > x0."""
    weight, bias = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    return move_to_targets(
        nn.Identity().eval(), weight, bias, IMAGES, torch.tensor(targets), **options
    )


@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_a_linear_readout_is_crossed_after_the_known_number_of_steps(batch_size: int) -> None:
    """Each step brings the two pixels 2 eps nearer: ceil(gap / 2 eps) steps."""
    images, steps, reached = run([1, 1, 1, 1], batch_size=batch_size, max_steps=40)
    assert steps.tolist() == [13, 0, 5, 40]  # of .245 / .02, none, .09 / .02, too many
    assert reached.tolist() == [True, True, True, False]
    moved = IMAGES + steps[:, None].double() * EPS * torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(images, moved)
    assert torch.equal(images[1], IMAGES[1])  # says its target already
    far = run([0, 0, 0, 0], eps=0.7)[0]  # pixels stay between 0 and 1
    assert torch.equal(far[1], torch.tensor([1.0, 0.89 - 0.7], dtype=torch.float64))


def test_inputs_and_parameters_are_left_alone() -> None:
    encoder = nn.Linear(2, 2).double().eval()
    before = IMAGES.clone()
    weight, bias = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    targets = torch.tensor([1, 0, 1, 1])
    move_to_targets(encoder, weight, bias, IMAGES, targets, max_steps=2)
    assert torch.equal(IMAGES, before) and not IMAGES.requires_grad
    assert all(p.grad is None for p in encoder.parameters())


def test_targets_are_uniform_and_keyed() -> None:
    labels = torch.arange(4000) % 5
    targets = draw_targets(labels, 5, seed=3)
    assert torch.equal(draw_targets(labels[:10], 5, seed=3), targets[:10])
    assert not torch.equal(draw_targets(labels, 5, seed=4), targets)
    assert (targets.bincount() - 800).abs().max() < 110  # four deviations
    assert 0.16 < (targets == labels).double().mean() < 0.24  # the paper's draw has y too
