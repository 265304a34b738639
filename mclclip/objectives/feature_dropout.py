"""Feature dropout: NT-Xent between views that an adversary changes to make the loss larger.

The adversary is a network m that changes each view x, given noise u, by at most epsilon of a pixel
on average. The encoder f moves down and the adversary up along the same loss,

    min over f, max over m of  NT-Xent( f(x + m(x, u)), f(y + m(y, u')) )

A pixel lies between 0 and 1. The change is added to the augmented picture before it is normalized,
and the sum is clamped to [0, 1]. In the authors' code the picture is not augmented at all, which is
an augmentation of ``kind: none``.

Source: Tamkin et al., "Feature Dropout: Revisiting the Role of Augmentations in Contrastive
Learning" (2022), arXiv:2212.08378. The adversary is that of Tamkin, Wu and Goodman, "Viewmaker
Networks: Learning Views for Unsupervised Representation Learning" (ICLR 2021), arXiv:2010.07432,
section 3. Its layers are those of a style transfer network (Johnson, Alahi and Fei-Fei, "Perceptual
Losses for Real-Time Style Transfer and Super-Resolution", ECCV 2016, arXiv:1603.08155), with a
channel of noise beside the image and one more before every residual block.

Inputs: two views of every image; ``group_ids`` [b, 1] and ``sample_id`` [b]. Captions are not read.
In a list it stands first, because the other objectives see the changed views.

Use it if it is not known which augmentations are right, or if a model should learn features that
another one hides. It is a baseline in MCL's Table 2. It costs a second network, and gradients of
the pixels.

Relations: without a budget (``epsilon: 0``) it is ``nt_xent``. ``ifm`` has an adversary too, which
changes features and needs no network.

Departures from the authors' code. Both players move along the gradient of one forward pass; theirs
runs a second one for the adversary, after the encoder has moved. The loss is NT-Xent in both
directions with MCL's mask; theirs has one direction, and a view is among its own negatives. Noise
is drawn from the sample's id, so that neither ranks nor resuming change it. Images keep any size;
the paper's are multiples of four pixels.

Example: ``train.objective={kind: feature_dropout, epsilon: 0.05}``.

Its slow references are ``nt_xent`` and ``viewmaker`` in tests/objective_loops.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import BatchFields, Features, Objective, ObjectiveInputs, Reads
from mclclip.objectives.contrast import AnyTemperature, Between, ContrastOptions
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks import collectives
from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.ranks.process_group import not_compiled
from mclclip.util.options import STRICT
from mclclip.util.randomness import mix_tensors

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SMALLEST_SIDE = 5  # pixels of an image: the first layer mirrors four at each border
_KERNEL = 9  # of the first and the last layer
_NOISE_BITS = 24  # bits of a number below 1 that fp32 holds exactly


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ContrastOptions):
    """SimCLR's loss with MCL's mask, between views that an adversary changes."""

    kind: Literal["feature_dropout"] = "feature_dropout"
    """Which objective."""
    between: ClassVar[Between] = "views"
    temperature: AnyTemperature = 0.5
    epsilon: NonNegativeFloat = 0.05
    """Largest mean change of an image's pixels, which lie between 0 and 1; 0: no change."""
    adversary_lr: PositiveFloat = 1e-3
    """Learning rate of the adversary's Adam, the same at all steps."""
    width: PositiveInt = 32
    """Channels of the adversary's first layer; the next two have twice and four times as many."""
    residual_blocks: NonNegativeInt = 3
    """Residual blocks of the adversary, each with a channel of noise."""

    @property
    def reads(self) -> Reads:
        """Reads groups, and two views, whose pixels it changes."""
        return replace(super().reads, changes_pixels=True)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        """Returns the loss with a new adversary, the same on every rank.

        Raises ValueError for images that are too small for the adversary.
        """
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
            network = Viewmaker(*shape, dtype=inputs.dtype)
        if not inputs.shapes_only:  # a plan's tensors have no values to move
            network.to(inputs.context.device)
        return FeatureDropout(self, network, inputs)


class Adversary:
    """The network that changes views, whole on every rank, with its optimizer
    (`UnwrappedParameters`).

    The optimizer is Adam with a learning rate of its own. It moves upwards along the mean gradient
    of all ranks, so that the network makes larger what the model makes smaller. If gradients are
    clipped, the network's is clipped together with the model's, by one factor. The noise depends on
    ``seed``.
    """

    def __init__(self, network: Viewmaker, lr: float, seed: int = 0) -> None:
        self.network, self.seed = network, seed
        self._step, self._averaged = 0, False
        self._loss_scale: Tensor | float = 1.0
        self.optimizer = torch.optim.Adam(network.parameters(), lr=lr, maximize=True)
        for weight in network.parameters():  # so that a state can be loaded before a step
            moments = {name: torch.zeros_like(weight) for name in _MOMENTS}
            self.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Remembers the step, which the noise depends on, and the factor of the step's loss."""
        self._step, self._loss_scale = step, loss_scale

    @not_compiled
    def noise(self, view: int, sample_id: Tensor, size: Sequence[int]) -> Tensor:
        """Returns the noise [b, n] for this step's images of ``size`` (height, width); ``view`` is
        0 or 1."""
        count = self.network.num_noise(*size)
        return keyed_noise(self.seed, self._step, view, sample_id, count)

    def zero_grad(self) -> None:
        """Deletes the gradient."""
        self.optimizer.zero_grad()
        self._averaged = False

    def grad_square(self) -> Tensor:
        """Returns the sum of squares of the mean gradient, a float64 scalar."""
        return self._average_gradients().double().square().sum()

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """Makes one step of Adam upwards, along ``factor`` times the gradient; ``lr``, the model's,
        is not used."""
        self._average_gradients()
        for gradient in self._gradients():
            gradient.mul_(factor)
        self.optimizer.step()

    def _gradients(self) -> list[Tensor]:
        return [w.grad for w in self.network.parameters() if w.grad is not None]

    def _average_gradients(self) -> Tensor:
        """Averages the gradients over the ranks, once in a step; returns them as one vector."""
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
        """Returns the weights, such as ``adversary.weights.last.bias``, Adam's moments, such as
        ``adversary.exp_avg.last.bias``, and the number of its steps."""
        state = {}
        for name, weight in self.network.named_parameters():
            moments = self.optimizer.state[weight]
            state[f"adversary.weights.{name}"] = weight.detach()
            state |= {f"adversary.{moment}.{name}": moments[moment] for moment in _MOMENTS}
            state["adversary.steps"] = moments["step"]  # the same for all weights
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what ``state_dict`` returned."""
        for name, weight in self.network.named_parameters():
            moments = self.optimizer.state[weight]
            weight.copy_(state[f"adversary.weights.{name}"])
            for moment in _MOMENTS:
                moments[moment].copy_(state[f"adversary.{moment}.{name}"])
            moments["step"].copy_(state["adversary.steps"])


class FeatureDropout(Objective):
    """NT-Xent between two views, each of which the adversary has changed with noise of its own.

    Views are (pixels - mean) / deviation, with ``mean`` and ``deviation`` [C, 1, 1].
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, options: Options, network: Viewmaker, inputs: ObjectiveInputs) -> None:
        super().__init__()
        self.loss = InfoNCE("views", **options.how(inputs))
        self.adversary = Adversary(network, options.adversary_lr, inputs.seed)
        self.epsilon = options.epsilon
        for name, value in zip(("mean", "deviation"), inputs.model.normalization, strict=True):
            self.register_buffer(name, value, persistent=False)

    def outside(self) -> Sequence[UnwrappedParameters]:
        """Returns the adversary."""
        return [self.adversary]

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        """Adds the model's features of the changed views, and ``view_change`` [b], the mean change
        of a sample's pixels."""
        changed = copy.copy(batch)
        changed.views = [
            self.change(view, number, batch.sample_id) for number, view in enumerate(batch.views)
        ]
        changes = [
            ((new.detach() - old) * self.deviation).abs().mean(dim=(1, 2, 3))
            for new, old in zip(changed.views, batch.views, strict=True)
        ]
        return super().features(model, changed, features) | {
            "view_change": torch.stack(changes).mean(dim=0)
        }

    def change(self, view: Tensor, number: int, sample_id: Tensor) -> Tensor:
        """Returns a view, [b, C, H, W], as the adversary changes it at this step. ``number`` is 0
        for the first view and 1 for the second, and chooses the noise. Unchanged pixels keep their
        bits."""
        mean, deviation = self.mean.to(view), self.deviation.to(view)
        pixels = (view * deviation + mean).clamp(0.0, 1.0)
        noise = self.adversary.noise(number, sample_id, view.shape[-2:]).to(view.dtype)
        raw = self.adversary.network(pixels, noise).to(view.dtype)
        changes = bound(raw, self.epsilon)
        # In fp32, as transforms compute them, so that clamping moves no unchanged pixel.
        black, white = ((value - self.mean) / self.deviation for value in (0.0, 1.0))
        return torch.clamp(view + changes / deviation, black.to(view), white.to(view))

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        """Returns the parts of NT-Xent (``Contrast.forward``), and ``view_change``, the mean over
        this rank's samples."""
        parts: dict[str, Tensor] = self.loss(features, batch)
        return parts | {"view_change": features["view_change"].detach().mean()}

    def chance(self, features: Features, batch: BatchFields, parts: Features) -> Tensor:
        """Returns the chance of NT-Xent."""
        return self.loss.chance(features, batch, parts)


# --- the network ---------------------------------------------------------------------------------


class Viewmaker(nn.Module):
    """Computes changes [b, C, H, W] from pixels [b, C, H, W] and noise [b, `num_noise`]; `bound`
    then limits their size.

    width            channels of the first layer; there are twice as many at half the size, and
                     four times as many at a quarter
    residual_blocks  number of residual blocks, at a quarter of the size; each gets a channel of
                     noise
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
            _layer(num_channels + 1, width, _KERNEL, dtype),
            _layer(width, 2 * width, 3, dtype, stride=2),
            _layer(2 * width, inner, 3, dtype, stride=2),
        )
        channels = [inner + number for number in range(1, residual_blocks + 1)]
        self.blocks = nn.ModuleList(_Residual(number, dtype) for number in channels)
        self.to_half = _layer(inner + residual_blocks, 2 * width, 3, dtype)
        self.to_whole = _layer(2 * width, width, 3, dtype)
        self.last = MirroredConv2d(width, num_channels, _KERNEL, dtype=dtype)

    def num_noise(self, height: int, width: int) -> int:
        """Returns how many numbers of noise an image of this size needs."""
        return sum(high * wide for high, wide in self._noise_sizes(height, width))

    def _noise_sizes(self, height: int, width: int) -> Iterator[tuple[int, int]]:
        yield height, width
        for _ in range(self.residual_blocks):
            yield -(-height // 4), -(-width // 4)

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """Returns the changes; sides of images are at least `_SMALLEST_SIDE` pixels."""
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


def bound(raw: Tensor, epsilon: float) -> Tensor:
    """Returns changes of pixels, [b, C, H, W], of at most ``epsilon`` on average in each image.

    They are tanh(raw) epsilon / (mean |tanh(raw)| + 1e-4), whose mean size is just below
    ``epsilon`` if the tanh is not small everywhere.
    """
    changes = torch.tanh(raw)
    means = changes.abs().mean(dim=(1, 2, 3), keepdim=True)
    return changes * (epsilon / (means + 1e-4))


def keyed_noise(seed: int, step: int, view: int, sample_id: Tensor, count: int) -> Tensor:
    """Returns noise, float32 [b, count], uniform in [0, 1).

    It is a function of seed, step, view, sample id and position, the same on every device.
    """
    step_word, view_word = (torch.full_like(sample_id[:1], word) for word in (step, view))
    positions = torch.arange(count, device=sample_id.device)
    bits = mix_tensors(seed, step_word, view_word, sample_id[:, None], positions)
    high = (bits >> (64 - _NOISE_BITS)) & ((1 << _NOISE_BITS) - 1)
    return high.to(torch.float32) / (1 << _NOISE_BITS)


class MirroredConv2d(nn.Conv2d):
    """A convolution over an image that is mirrored at its borders.

    torch's reflection padding computes the same, but its gradient on a GPU differs from run to run.
    """

    def forward(self, input: Tensor) -> Tensor:
        border = self.kernel_size[0] // 2
        for axis in (-2, -1):
            size = input.shape[axis]
            before = input.narrow(axis, 1, border).flip(axis)
            after = input.narrow(axis, size - 1 - border, border).flip(axis)
            input = torch.cat([before, input, after], dim=axis)
        return super().forward(input)


def _layer(
    before: int, after: int, kernel: int, dtype: torch.dtype, stride: int = 1
) -> nn.Sequential:
    """Returns convolution, instance norm and ReLU: [b, C, H, W] -> [b, D, H / stride, W / stride],
    sizes rounded up."""
    convolution = MirroredConv2d(before, after, kernel, stride, dtype=dtype)
    return nn.Sequential(convolution, nn.InstanceNorm2d(after, affine=True, dtype=dtype), nn.ReLU())


class _Residual(nn.Module):
    """Two convolutions whose result is added to their input."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _layer(channels, channels, 3, dtype),
            MirroredConv2d(channels, channels, 3, dtype=dtype),
            nn.InstanceNorm2d(channels, affine=True, dtype=dtype),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.layers(hidden)
        return result
