"""Feature dropout: its network, views, loss and gradients by loops, who moves whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mclclip.data.batches import Batch
from mclclip.models.transforms import PixelFormat
from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.objectives.feature_dropout import (
    Adversary,
    FeatureDropout,
    Options,
    Viewmaker,
    bound,
    keyed_noise,
)
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import ModelWithObjective
from tests import objective_loops as loops

SEED, STEP, EPSILON, TEMPERATURE = 7, 3, 0.05, 0.4


class Encoder(nn.Module):
    """A linear encoder of pictures of four channels, 6 x 7 pixels."""

    # Binary fractions, so that black and white are the same numbers in fp32 and float64.
    look = PixelFormat((6, 7), (0.5, 0.25, 0.5, 0.125), (0.25, 0.5, 0.125, 0.5), channels=4)
    image_size, num_channels, feature_dim, has_logit_bias = (6, 7), 4, 5, False
    first_block = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(0.1 * torch.randn(5, 4 * 6 * 7, dtype=torch.float64))

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        mean, deviation = (torch.tensor(x)[:, None, None] for x in (self.look.mean, self.look.std))
        return mean, deviation

    def forward(self, image: Tensor, **unused: Any) -> dict[str, Tensor]:
        flat = image.flatten(1) @ self.weight.to(image).T
        return {"image_features": functional.normalize(flat, dim=1)}


def trainee_of(**options: Any) -> ModelWithObjective:
    model = Encoder()
    given = {"temperature": TEMPERATURE, "width": 2, "residual_blocks": 1} | options
    setting = ObjectiveInputs(model=model, context=SINGLE, seed=SEED, precision="float64")
    objective = Options(**given).build(setting)
    return ModelWithObjective(model, objective, "float64")  # type: ignore[arg-type]


def dropout(trainee: ModelWithObjective) -> FeatureDropout:
    assert isinstance(trainee.objective, FeatureDropout)
    return trainee.objective


def network(trainee: ModelWithObjective) -> Viewmaker:
    return dropout(trainee).adversary.network


def pixels_of(rows: int = 4) -> tuple[Tensor, Tensor]:
    """Two augmentations of some pictures, with black and white pixels among theirs."""
    rng = torch.Generator().manual_seed(2)
    drawn = 1.4 * torch.rand(2, rows, 4, 6, 7, generator=rng) - 0.2
    first, second = drawn.clamp(0.0, 1.0)
    return first, second


def batch_of() -> Batch:
    rows = 4
    return Batch(
        views=[Encoder.look.normalize(pixels).double() for pixels in pixels_of(rows)],
        group_ids=torch.zeros(rows, 1, dtype=torch.int64),
        sample_id=10 + torch.arange(rows) ** 2,
        step=STEP,
        group_size=rows,
    )


def bits_of(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


# --- values ------------------------------------------------------------------------------------


def by_loops(trainee: ModelWithObjective, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the changed views as pixels, from the papers' formulas."""
    maker, model = network(trainee), trainee.model
    weights = dict(maker.named_parameters())
    mean, deviation = (x.double() for x in model.normalization)
    features: list[list[Tensor]] = []
    changed = []
    for number, view in enumerate(batch.views):
        own = []
        for picture, sample_id in zip(view, batch.sample_id.tolist(), strict=True):
            noise = loops.noise_of(SEED, STEP, number, sample_id, maker.num_noise(6, 7))
            pixels = (picture * deviation + mean).clamp(0, 1)
            own.append(loops.view_of(weights, pixels, noise, EPSILON)[1])
        changed.append(torch.stack(own))
        images = [((image - mean) / deviation).flatten() for image in own]
        raw = [model.weight @ image for image in images]  # type: ignore[operator]
        features.append([feature / feature.norm() for feature in raw])
    every, count = torch.cat([torch.stack(view) for view in features]), len(batch.sample_id)
    scores = (every @ every.T / TEMPERATURE).fill_diagonal_(float("-inf"))
    own = torch.arange(2 * count).roll(count)  # the same picture's other view
    return functional.cross_entropy(scores, own), changed


def test_loss_and_both_gradients_are_those_of_loops() -> None:
    trainee, batch = trainee_of(), batch_of()
    dropout(trainee).adversary.begin(STEP)
    parts = trainee(batch)
    wanted, changed = by_loops(trainee, batch)
    torch.testing.assert_close(parts["loss"], wanted, rtol=1e-12, atol=1e-12)
    both = zip(changed, pixels_of(), strict=True)
    mean = torch.stack([(new - old).abs().mean() for new, old in both]).mean()
    assert float(parts["view_change"]) == pytest.approx(float(mean.detach()), rel=1e-5)
    leaves = [*trainee.model.parameters(), *network(trainee).parameters()]
    found = torch.autograd.grad(parts["loss"], leaves)
    expected = torch.autograd.grad(wanted, leaves)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-11)
        assert right.abs().max() > 1e-6 or right.ndim == 1  # norms take away a bias


def test_views_stay_within_the_budget_and_between_black_and_white() -> None:
    for epsilon in (0.01, 0.05, 0.8):
        objective, batch = dropout(trainee_of(epsilon=epsilon)), batch_of()
        mean, deviation = (x.double() for x in Encoder().normalization)
        for number, view in enumerate(batch.views):
            new = objective.change(view, number, batch.sample_id).detach() * deviation + mean
            assert float(new.min()) >= -1e-6 and float(new.max()) <= 1.0 + 1e-6
            sizes = (new - (view * deviation + mean)).abs().mean(dim=(1, 2, 3))
            assert bool((sizes <= epsilon + 1e-6).all()) and float(sizes.min()) > 0.3 * epsilon
            assert float(new.min()) < 1e-6 and float(new.max()) > 1 - 1e-6  # some are cut


def test_without_a_budget_it_is_nt_xent_to_the_bit() -> None:
    trainee, batch = trainee_of(epsilon=0.0), batch_of()
    for number, view in enumerate(batch.views):
        assert torch.equal(dropout(trainee).change(view, number, batch.sample_id), view)
    parts = trainee(batch)
    setting: Any = ObjectiveInputs(model=trainee.model, context=SINGLE, seed=0, precision="float64")
    plain = parse({"kind": "nt_xent", "temperature": TEMPERATURE}).build(setting)
    wanted = ModelWithObjective(trainee.model, plain, "float64")(batch)
    assert torch.equal(parts["loss"], wanted["loss"]) and float(parts["view_change"]) == 0.0
    parts["loss"].backward()
    assert all(not p.grad.any() for p in network(trainee).parameters() if p.grad is not None)


# --- who moves ---------------------------------------------------------------------------------


def test_neither_step_moves_the_other_player() -> None:
    trainee = trainee_of()
    adversary, engine = dropout(trainee).adversary, torch.optim.SGD(trainee.parameters(), lr=1.0)
    assert not {*map(id, trainee.parameters())} & {*map(id, adversary.network.parameters())}
    encoder, maker = bits_of(trainee), bits_of(adversary.network)
    adversary.begin(STEP)
    trainee(batch_of())["loss"].backward()
    engine.step()
    assert not same(bits_of(trainee), encoder) and same(bits_of(adversary.network), maker)
    encoder = bits_of(trainee)
    adversary.step(lr=0.1)
    assert same(bits_of(trainee), encoder) and not same(bits_of(adversary.network), maker)


def test_its_optimizer_is_adam_upwards_with_a_rate_of_its_own() -> None:
    """Two steps by the formula; the gradient is multiplied by the loss scale, and then clipped."""
    torch.manual_seed(0)
    maker = Viewmaker(1, width=1, residual_blocks=0).double()
    adversary = Adversary(maker, lr=0.02)
    weights = bits_of(maker)
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in (1, 2):
        adversary.zero_grad()
        adversary.begin(step, loss_scale=8.0)
        gradients = [torch.randn_like(weight) for weight in weights]
        for parameter, gradient in zip(maker.parameters(), gradients, strict=True):
            parameter.grad = 8.0 * gradient
        square = sum(float(gradient.square().sum()) for gradient in gradients)
        for _ in range(2):  # asking twice changes nothing
            assert float(adversary.grad_square()) == pytest.approx(square, rel=1e-12)
        adversary.step(lr=123.0, factor=torch.tensor(0.5))
        for number, gradient in enumerate(gradients):
            first, second = moments[number]
            first = 0.9 * first + 0.1 * 0.5 * gradient
            second = 0.999 * second + 0.001 * (0.5 * gradient) ** 2
            moments[number] = first, second
            size = (second / (1 - 0.999**step)).sqrt() + 1e-8
            weights[number] = weights[number] + 0.02 * first / (1 - 0.9**step) / size
    for found, wanted in zip(maker.parameters(), weights, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-10, atol=1e-12)


def test_in_a_sum_the_adversary_climbs_the_whole_loss() -> None:
    """Its gradient is that of both terms, which see the same views."""
    small = {"kind": "feature_dropout", "width": 2, "residual_blocks": 1}
    ifm = {"kind": "ifm", "between": "views", "temperature": 0.5}
    options, model = parse([small | {"weight": 0.25}, ifm | {"weight": 0.75}]), Encoder()
    setting = ObjectiveInputs(model=model, context=SINGLE, seed=SEED, precision="float64")
    trainee = ModelWithObjective(model, options.build(setting), "float64")  # type: ignore[arg-type]
    (adversary,) = trainee.objective.outside()
    assert isinstance(adversary, Adversary)
    weights = list(adversary.network.parameters())
    parts = trainee(batch_of())
    losses = [parts["0_feature_dropout/loss"], parts["1_ifm/loss"]]
    each = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    parts["loss"].backward()
    for weight, one, two in zip(weights, *each, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 0.25 * one + 0.75 * two, rtol=1e-9, atol=1e-12)
    before = bits_of(adversary.network)
    adversary.step(lr=0.0)
    assert not same(bits_of(adversary.network), before)


def test_the_seed_makes_the_network() -> None:
    def made(seed: int) -> list[Tensor]:
        setting: Any = ObjectiveInputs(model=Encoder(), context=SINGLE, seed=seed)
        built: Any = Options(width=2).build(setting)
        return bits_of(built.adversary.network)

    before = torch.random.get_rng_state()
    first = made(5)
    torch.manual_seed(99)
    assert same(first, made(5)) and not same(first, made(6))
    torch.random.set_rng_state(before)


# --- what is refused ---------------------------------------------------------------------------


def test_an_image_that_is_too_small_and_a_single_view_are_refused() -> None:
    small: Any = Encoder()
    small.image_size = (4, 9)
    with pytest.raises(ValueError, match="at least 5 pixels a side, and the model takes 4 x 9"):
        Options().build(ObjectiveInputs(model=small, context=SINGLE, seed=0))


# --- the network ----------------------------------------------------------------------------------


def network_of(channels: int, blocks: int, width: int = 2, seed: int = 0) -> Viewmaker:
    """In float64, with scales and shifts of the norms that are not 1 and 0."""
    torch.manual_seed(seed)
    network = Viewmaker(channels, width, blocks, dtype=torch.float64)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize(("channels", "height", "width", "blocks"), [(4, 6, 7, 2), (1, 5, 5, 0)])
def test_values_and_gradients_are_those_of_loops(
    channels: int, height: int, width: int, blocks: int
) -> None:
    network = network_of(channels, blocks)
    pixels = torch.rand(2, channels, height, width, dtype=torch.float64)
    noise = torch.rand(2, network.num_noise(height, width), dtype=torch.float64)
    found = network(pixels, noise)
    assert found.shape == pixels.shape
    weights = dict(network.named_parameters())
    wanted = torch.stack(
        [loops.viewmaker(weights, *each) for each in zip(pixels, noise, strict=True)]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    direction = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((result * direction).sum(), list(weights.values()))
        for result in (found, wanted)
    ]
    for name, got, expected in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9, msg=name)
        if name.endswith("last.weight"):
            assert got.abs().max() > 0


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 50.0]),
    epsilon=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_the_mean_change_of_an_image_is_within_its_budget(
    seed: int, size: float, epsilon: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    raw = size * torch.randn(3, 4, 5, 6, generator=rng, dtype=torch.float64)
    change = bound(raw, epsilon)
    assert ((change > 0) == ((raw > 0) & (epsilon > 0))).all()
    for image, own in zip(raw.tanh(), change, strict=True):
        mean = float(image.abs().sum()) / image.numel()
        spent = float(own.abs().mean())
        assert spent <= epsilon
        assert spent == pytest.approx(epsilon * mean / (mean + 1e-4), rel=1e-12)


def test_noise_is_that_of_its_key_and_nothing_else() -> None:
    ids = torch.tensor([3, 900, 2**40, 3])
    noise = keyed_noise(11, 5, 1, ids, 9)
    for own, sample_id in zip(noise, ids.tolist(), strict=True):
        assert own.tolist() == loops.noise_of(11, 5, 1, sample_id, 9)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(keyed_noise(11, 5, 1, ids[1:2], 9), noise[1:2])
    assert torch.equal(keyed_noise(11, 5, 1, ids, 4), noise[:, :4])
    for other in ((12, 5, 1), (11, 6, 1), (11, 5, 0)):
        assert not (keyed_noise(*other, ids, 9) == noise).any()


def test_noise_is_uniform() -> None:
    noise = keyed_noise(0, 0, 0, torch.arange(200), 500)
    counts = torch.histc(noise, 20, 0.0, 1.0)
    assert 0.0 <= float(noise.min()) and float(noise.max()) < 1.0
    assert (counts - 5000).abs().max() < 5 * 5000**0.5
    # Neither neighbouring places nor neighbouring samples go together.
    for pair in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([x.flatten() for x in pair]))[0, 1])) < 0.02
