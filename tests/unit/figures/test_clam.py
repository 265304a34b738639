"""Heat maps of a convolution in closed form; views; tokens; gates."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.figures.clam import View, clam, draw_views, layer_with_map

SIZE = 8
WHOLE = View(0, 0, SIZE, SIZE)


class Encoder(nn.Module):
    """A 1x1 convolution and the mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 5, 1).double()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer(images).mean(dim=(2, 3))
        return features


class Tokens(nn.Module):
    """The same with a class token before the pixels', whose output is the features."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.layer = encoder, nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.encoder.layer(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([torch.zeros_like(pixels[:, :1]), pixels], dim=1)
        return torch.as_tensor(self.layer(tokens)[:, 1:].mean(dim=1))


def picture(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, SIZE, SIZE, generator=generator, dtype=torch.float64)


def closed_form(encoder: Encoder, anchor: Tensor, positive: Tensor, gate: Tensor) -> Tensor:
    """relu(sum_c alpha_c A_c), with alpha = the cosine's gradient by the features over h w."""
    with torch.no_grad():
        activations = encoder.layer(anchor[None])[0]
        f, u = activations.mean(dim=(1, 2)) * gate, encoder(positive[None])[0] * gate
        v, u = f / f.norm(), u / u.norm()
        alpha = gate * (u - (u @ v) * v) / f.norm() / SIZE**2
        return (alpha[:, None, None] * activations).sum(dim=0).relu()


@pytest.mark.parametrize("gated", [False, True])
def test_one_view_is_grad_cam_in_closed_form(gated: bool) -> None:
    encoder, anchor, positive = Encoder(), picture(1), picture(2)
    gate = torch.linspace(0.0, 1.0, 5, dtype=torch.float64) if gated else None
    heat, similarity = clam(encoder, encoder.layer, anchor, positive, [WHOLE], gate)
    chosen = torch.ones(5, dtype=torch.float64) if gate is None else gate
    torch.testing.assert_close(heat, closed_form(encoder, anchor, positive, chosen))
    assert heat.max() > 0.0
    with torch.no_grad():
        cosine = functional.cosine_similarity(
            encoder(anchor[None]) * chosen, encoder(positive[None]) * chosen
        )
    assert similarity == pytest.approx(float(cosine))
    assert all(p.grad is None for p in encoder.parameters())


def test_tokens_are_laid_out_as_the_image() -> None:
    encoder, anchor, positive = Encoder(), picture(1), picture(2)
    tokens = Tokens(encoder)
    expected = clam(encoder, encoder.layer, anchor, positive, [WHOLE])[0]
    torch.testing.assert_close(clam(tokens, tokens.layer, anchor, positive, [WHOLE])[0], expected)


def test_a_mirrored_view_is_laid_back_where_it_was() -> None:
    encoder, anchor, positive = Encoder(), picture(1), picture(2)
    straight = clam(encoder, encoder.layer, anchor, positive, [WHOLE])[0]
    mirrored = clam(encoder, encoder.layer, anchor, positive, [View(0, 0, SIZE, SIZE, True)])[0]
    torch.testing.assert_close(mirrored, straight)


def test_pixels_that_no_view_sees_are_cold_and_others_have_the_mean() -> None:
    encoder, anchor, positive = Encoder(), picture(1), picture(2)
    part = View(2, 1, 6, 5, brightness=1.1)

    def heat(*views: View) -> Tensor:
        return clam(encoder, encoder.layer, anchor, positive, views)[0]

    seen = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    seen[2:6, 1:5] = True
    alone = heat(part)
    assert (alone[~seen] == 0.0).all() and alone[seen].max() > 0.0
    # Each of two views has half a share in the mean of their similarities.
    both = heat(WHOLE, part)
    torch.testing.assert_close(both[~seen], heat(WHOLE)[~seen] / 2)
    torch.testing.assert_close(both[seen], (heat(WHOLE)[seen] + alone[seen]) / 4)


def test_views_are_those_of_the_paper() -> None:
    anchor = torch.zeros(3, 40, 60)
    views = draw_views(anchor, 300, seed=1)
    assert draw_views(anchor, 300, seed=1) == views
    assert {view.brightness for view in views} == {1.0, 1.1, 0.9}
    assert 100 < sum(view.flipped for view in views) < 200
    for view in views:
        assert 0 <= view.top < view.bottom <= 40 and 0 <= view.left < view.right <= 60
        share = (view.bottom - view.top) * (view.right - view.left) / 2400
        assert 0.19 < share <= 1.0
    assert views[0].of(anchor).shape == anchor.shape


def test_a_layer_without_places_is_refused() -> None:
    anchor = picture(1)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4)).double()
    with pytest.raises(ValueError, match=r"the layer gives \[1, 4\], wanted"):
        clam(flat, flat[1], anchor, anchor, [WHOLE])


class Blocks(nn.Module):
    """Three blocks over the tokens of 2 x 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        tokens = functional.unfold(images, 2, stride=2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return tokens.mean(dim=1)


def test_the_layer_is_the_last_with_a_map() -> None:
    """Outputs of 8 x 8, 4 x 4, 2 x 2 and 1 x 1 places; blocks over tokens; none that is run."""
    image = torch.zeros(3, SIZE, SIZE)
    layers = [nn.Conv2d(3, 2, 1), *(nn.Conv2d(2, 2, 2, stride=2) for _ in range(3))]
    encoder = nn.Sequential(*layers, nn.Flatten())
    assert layer_with_map(encoder, layers, image) is layers[1]
    assert layer_with_map(encoder, layers[2:], image) is layers[2]
    tokens = Blocks()
    assert layer_with_map(tokens, [*tokens.blocks, nn.Linear(2, 2)], image) is tokens.blocks[1]
    assert layer_with_map(tokens, [tokens.blocks[2]], image) is tokens.blocks[2]
    with pytest.raises(ValueError, match="runs none of its layers"):
        layer_with_map(encoder, [*tokens.blocks], image)
