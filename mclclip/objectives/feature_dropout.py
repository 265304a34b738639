"""Feature dropout: NT-Xent between views that an adversary changes to make the loss larger.

The adversary is a network m that changes each view x, with noise u of its own, by at most epsilon
of a pixel in the mean. The encoder f moves down and the adversary up along the same loss,

    min over f, max over m of  NT-Xent( f(x + m(x, u)), f(y + m(y, u')) )

A pixel lies between 0 and 1. The change is made to what the augmentation gives, before it is
normalised, and the sum is cut to [0, 1]. In the authors' code that is the picture itself: theirs is
an augmentation of ``kind: none``.

Source: Tamkin et al., "Feature Dropout: Revisiting the Role of Augmentations in Contrastive
Learning" (2022), with the adversary of "Viewmaker Networks: Learning Views for Unsupervised
Representation Learning" (Tamkin, Wu and Goodman, 2021, section 3). Its layers are those of style
transfer (Johnson, Alahi and Fei-Fei, 2016), with a channel of noise beside the image and one more
before every residual block.

Inputs: two views of every image; ``group_ids`` [b, 1] and ``sample_id`` [b]. Captions are not read.
In a list it stands first, because the other objectives see the changed views.

Use it where it is not known which augmentations are right, or where a model should learn features
that another one hides. It is a baseline of MCL's Table 2. It costs a second network, and gradients
of the pixels.

Relations: without a budget (``epsilon: 0``) it is ``nt_xent``. ``ifm`` has an adversary too, which
changes features and needs no network.

Departures from the authors' code. Both players move along the gradient of one forward pass, where
theirs runs a second one for the adversary, after the encoder has moved. The loss is NT-Xent in both
directions with MCL's mask; theirs has one direction, and a view among its own negatives. Noise is
keyed by the sample, so that neither ranks nor resuming change it. Images of any size keep it; the
paper's are multiples of four pixels.

Its slow references are ``nt_xent`` and ``viewmaker`` in tests/objective_loops.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    Reads,
)
from mclclip.objectives.contrast import (
    AnyTemperature,
    Between,
    ContrastOptions,
)
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks import collectives
from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.ranks.process_group import not_compiled
from mclclip.util.options import STRICT
from mclclip.util.randomness import mix_tensors

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SMALLEST_SIDE = 5  # of an image, in pixels: the first layer mirrors four at each border
_KERNEL = 9  # of the first and the last layer
_NOISE_BITS = 24  # fp32 holds so many


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """SimCLR's loss with MCL's mask, between views that an adversary changes."""

    kind: Literal["feature_dropout"] = "feature_dropout"
    """Which objective."""
    temperature: AnyTemperature = 0.5
    epsilon: NonNegativeFloat = 0.05
    """Largest mean change of an image's pixels, which lie between 0 and 1; 0: none."""
    adversary_lr: PositiveFloat = 1e-3
    """Learning rate of the adversary's Adam in all steps: neither warm-up nor decay touch it."""
    width: PositiveInt = 32
    """Channels of the adversary's first layer; later ones have twice and four times as many."""
    residual_blocks: NonNegativeInt = 3
    """Residual blocks of the adversary, each with noise of its own."""

    @property
    def between(self) -> Between:
        """Views: captions are not read."""
        return "views"

    @property
    def reads(self) -> Reads:
        """Returns groups, and two views with their pixels."""
        return replace(super().reads, changes_pixels=True)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """The loss and a new adversary, which is the same on every rank.

        Raises ValueError for images that are too small for it.
        """
        network = self._network(inputs)
        if not inputs.shapes_only:  # tensors without values stay where they are made
            network.to(inputs.context.device)
        return FeatureDropout(self, network, inputs)

    def _network(self, inputs: ObjectiveInputs) -> Viewmaker:
        model: Any = inputs.model
        size = model.image_size
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < _SMALLEST_SIDE:
            raise ValueError(
                f"objective.kind=feature_dropout changes images of at least {_SMALLEST_SIDE} "
                f"pixels a side, and the model takes {height} x {width}: set a larger image_size"
            )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(inputs.seed)
            shape = model.num_channels, self.width, self.residual_blocks
            return Viewmaker(*shape, dtype=inputs.dtype)


class Adversary:
    """The network that changes views, whole on every rank, and its optimizer.

    It is `UnwrappedParameters`. The optimizer is Adam along the mean gradient of all ranks,
    upwards: the network makes the loss larger that the model makes smaller. Its learning rate is
    its own; where gradients are clipped, its gradient is clipped with the model's, by one factor.
    ``seed`` is that of the noise.
    """

    def __init__(self, network: Viewmaker, lr: float, seed: int = 0) -> None:
        self.network, self.seed = network, seed
        self._now, self._averaged = 0, False
        self._loss_scale: Tensor | float = 1.0
        self.optimizer = torch.optim.Adam(network.parameters(), lr=lr, maximize=True)
        for weight in network.parameters():  # before the first step, for a state to be loaded into
            moments = {name: torch.zeros_like(weight) for name in _MOMENTS}
            self.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Takes note of the step, on which the noise depends, and of the factor of the loss."""
        self._now, self._loss_scale = step, loss_scale

    @not_compiled
    def noise(self, view: int, sample_id: Tensor, size: Sequence[int]) -> Tensor:
        """[b, n] for the network, of this step's images of a height and width, as view ``view``."""
        count = self.network.num_noise(*size)
        return keyed_noise(self.seed, self._now, view, sample_id, count)

    def zero_grad(self) -> None:
        """Drops the gradient."""
        self.optimizer.zero_grad()
        self._averaged = False

    def grad_square(self) -> Tensor:
        """The sum of squares of the mean gradient, float64, 0-dimensional."""
        gradient = self._flat().double()
        return gradient.square().sum()

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """One step of Adam upwards, along ``factor`` times the gradient; ``lr`` is the model's."""
        self._flat()
        for gradient in self._gradients():
            gradient.mul_(factor)
        self.optimizer.step()

    def _gradients(self) -> list[Tensor]:
        return [w.grad for w in self.network.parameters() if w.grad is not None]

    def _flat(self) -> Tensor:
        """All gradients as one vector; the first call of a step averages them over the ranks."""
        gradients = self._gradients()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if not self._averaged:
            divisor = collectives.world_size() * self._loss_scale
            flat = collectives.all_reduce_sum(flat) / divisor
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
                gradient.copy_(part.view_as(gradient))
            self._averaged = True
        return flat

    def state_dict(self) -> dict[str, Tensor]:
        """``adversary.weights.NAME``, Adam's moments ``adversary.MOMENT.NAME``, and the number of
        its steps."""
        state = {}
        for name, weight in self.network.named_parameters():
            moments = self.optimizer.state[weight]
            state[f"adversary.weights.{name}"] = weight.detach()
            state |= {f"adversary.{moment}.{name}": moments[moment] for moment in _MOMENTS}
            state["adversary.steps"] = moments["step"]  # that of all
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what ``state_dict`` gave."""
        for name, weight in self.network.named_parameters():
            moments = self.optimizer.state[weight]
            weight.copy_(state[f"adversary.weights.{name}"])
            for moment in _MOMENTS:
                moments[moment].copy_(state[f"adversary.{moment}.{name}"])
            moments["step"].copy_(state["adversary.steps"])


class FeatureDropout(Objective):
    """A loss between two views, each of which the adversary has changed by noise of its own.

    ``mean`` and ``deviation`` are of pixels, [C, 1, 1]: views are (pixels - mean) / deviation.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, options: Options, network: Viewmaker, inputs: ObjectiveInputs) -> None:
        super().__init__()
        self.loss = InfoNCE("views", options.new_temperature(inputs))
        self.adversary = Adversary(network, options.adversary_lr, inputs.seed)
        self.epsilon = options.epsilon
        for name, value in zip(("mean", "deviation"), inputs.model.normalization, strict=True):
            self.register_buffer(name, value, persistent=False)

    def outside(self) -> Sequence[UnwrappedParameters]:
        """The adversary."""
        return [self.adversary]

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of the changed views, and ``view_change``: [b], the mean change
        of a sample's pixels. Raises ValueError for another number of views than two."""
        if len(batch.views) != 2:
            raise ValueError(f"feature_dropout changes two views, and got {len(batch.views)}")
        changed = copy.copy(batch)
        changed.views = [
            self.changed(view, number, batch.sample_id) for number, view in enumerate(batch.views)
        ]
        changes = [
            ((new.detach() - old) * self.deviation).abs().mean(dim=(1, 2, 3))
            for new, old in zip(changed.views, batch.views, strict=True)
        ]
        return super().features(model, changed, features) | {
            "view_change": torch.stack(changes).mean(dim=0)
        }

    def changed(self, view: Tensor, number: int, sample_id: Tensor) -> Tensor:
        """[b, C, H, W] -> the same as the adversary changes it in this step, as view ``number``.

        An unchanged pixel keeps its bits.
        """
        mean, deviation = self.mean.to(view), self.deviation.to(view)
        pixels = (view * deviation + mean).clamp(0.0, 1.0)
        noise = self.adversary.noise(number, sample_id, view.shape[-2:]).to(view.dtype)
        raw = self.adversary.network(pixels, noise).to(view.dtype)
        changes = bounded(raw, self.epsilon)
        # In fp32, as the transforms compute them, so that they cut nothing that is unchanged.
        black, white = ((value - self.mean) / self.deviation for value in (0.0, 1.0))
        return torch.clamp(view + changes / deviation, black.to(view), white.to(view))

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Returns the parts of the loss of the features, and ``view_change``, the mean over this
        rank's samples; see ``Contrast.forward``."""
        parts: dict[str, Tensor] = self.loss(features, batch)
        return parts | {"view_change": features["view_change"].detach().mean()}

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the chance of the loss of the features."""
        return self.loss.chance(features, batch, parts)


# --- the network ---------------------------------------------------------------------------------


class Viewmaker(nn.Module):
    """Pixels [b, C, H, W] and noise [b, `num_noise`] -> [b, C, H, W], not yet `bounded`.

    width            channels of the first layer; twice as many at half the size, and again
    residual_blocks  at a quarter of the size; each gets a channel of noise of its own
    """

    def __init__(
        self,
        num_channels: int,
        width: int = 32,
        residual_blocks: int = 3,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.residual_blocks = residual_blocks
        inner = 4 * width
        self.down = nn.Sequential(
            _Layer(num_channels + 1, width, _KERNEL, dtype),
            _Layer(width, 2 * width, 3, dtype, stride=2),
            _Layer(2 * width, inner, 3, dtype, stride=2),
        )
        channels = [inner + number for number in range(1, residual_blocks + 1)]
        self.blocks = nn.ModuleList(_Residual(number, dtype) for number in channels)
        self.to_half = _Layer(inner + residual_blocks, 2 * width, 3, dtype)
        self.to_whole = _Layer(2 * width, width, 3, dtype)
        self.last = MirroredConv2d(width, num_channels, _KERNEL, dtype=dtype)

    def num_noise(self, height: int, width: int) -> int:
        """Numbers of noise for an image of this size."""
        return sum(high * wide for high, wide in self._noise_sizes(height, width))

    def _noise_sizes(self, height: int, width: int) -> Iterator[tuple[int, int]]:
        yield height, width
        for _ in range(self.residual_blocks):
            yield -(-height // 4), -(-width // 4)

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """See above; the sides are at least `_SMALLEST_SIDE`."""
        height, width = pixels.shape[-2:]
        sizes = list(self._noise_sizes(height, width))
        parts = torch.split(noise, [high * wide for high, wide in sizes], dim=1)
        first, *others = (
            part.reshape(-1, 1, *size) for part, size in zip(parts, sizes, strict=True)
        )
        hidden = self.down(torch.cat([pixels, first], dim=1))
        for block, channel in zip(self.blocks, others, strict=True):
            hidden = block(torch.cat([hidden, channel], dim=1))
        half = (height + 1) // 2, (width + 1) // 2
        hidden = self.to_half(functional.interpolate(hidden, size=half, mode="nearest"))
        hidden = functional.interpolate(hidden, size=(height, width), mode="nearest")
        changes: Tensor = self.last(self.to_whole(hidden))
        return changes


def bounded(raw: Tensor, epsilon: float) -> Tensor:
    """Changes of pixels whose mean size is at most ``epsilon`` in each image.

    tanh(raw) epsilon / (mean |tanh(raw)| + 1e-4), [b, C, H, W]: a mean just below ``epsilon``
    wherever the tanh is not small.
    """
    changes = torch.tanh(raw)
    means = changes.abs().mean(dim=(1, 2, 3), keepdim=True)
    return changes * (epsilon / (means + 1e-4))


def keyed_noise(seed: int, step: int, view: int, sample_id: Tensor, count: int) -> Tensor:
    """float32 [b, count], uniform in [0, 1): a function of (seed, step, view, sample_id, position).

    It is drawn where ``sample_id`` [b] lies, and is the same on every device.
    """
    step_word, view_word = (torch.full_like(sample_id[:1], word) for word in (step, view))
    positions = torch.arange(count, device=sample_id.device)
    bits = mix_tensors(seed, step_word, view_word, sample_id[:, None], positions)
    high = (bits >> (64 - _NOISE_BITS)) & ((1 << _NOISE_BITS) - 1)
    return high.to(torch.float32) / (1 << _NOISE_BITS)


class MirroredConv2d(nn.Conv2d):
    """A convolution over an image that is mirrored at its borders.

    As torch's reflection padding, whose gradient on a GPU differs from run to run.
    """

    def forward(self, input: Tensor) -> Tensor:
        border = self.kernel_size[0] // 2
        for axis in (-2, -1):
            size = input.shape[axis]
            before = input.narrow(axis, 1, border).flip(axis)
            after = input.narrow(axis, size - 1 - border, border).flip(axis)
            input = torch.cat([before, input, after], dim=axis)
        return super().forward(input)


class _Layer(nn.Sequential):
    """Convolution, instance norm, ReLU: [b, C, H, W] -> [b, D, H / stride, W / stride], rounded
    up."""

    def __init__(
        self, before: int, after: int, kernel: int, dtype: torch.dtype, stride: int = 1
    ) -> None:
        convolution = MirroredConv2d(before, after, kernel, stride, dtype=dtype)
        norm = nn.InstanceNorm2d(after, affine=True, dtype=dtype)
        super().__init__(convolution, norm, nn.ReLU())


class _Residual(nn.Module):
    """Two convolutions, whose result is added to their input."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _Layer(channels, channels, 3, dtype),
            MirroredConv2d(channels, channels, 3, dtype=dtype),
            nn.InstanceNorm2d(channels, affine=True, dtype=dtype),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.layers(hidden)
        return result
