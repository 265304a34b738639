"""Figure: CLAM, heat maps of where in an image an encoder finds what it shares with another one.

An encoder runs. Source: SimLAP (Wu et al., 2024), appendix E and Fig. 6: Grad-CAM (Selvaraju et
al., 2017) of the mean similarity between a positive image and augmented views of the anchor (crops,
flips, and brightness times 1.0, 1.1 or 0.9), Eq. 6. The paper does not say how the maps of crops
become one: here each view's map is laid back over its part of the anchor, and every pixel has the
mean of the views that saw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mclclip.data.decode import as_picture
from mclclip.figures import drawing
from mclclip.figures.gates import unlike_pairs
from mclclip.figures.inputs import EXPORTS, ClassGates, Figure, Inputs, PixelEncoder

PAIRS, VIEWS, MAP_SIZE = 2, 16, 32
_BRIGHTNESS = (1.0, 1.1, 0.9)
_PLACES = 16  # of a map that is fine enough


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """Where an anchor of one class is like a picture of two classes.

    The positive is half a sample of the anchor's class y1 and half a sample of y2, side by side. A
    stage with gates has a map in all dimensions, and one through the gates of each of the two
    classes; the classes are the pairs whose gates are least and most alike. Other stages have the
    first map alone, for pairs of an attribute's values that are drawn by the seed. The paper names
    neither the number of views (16 here) nor how the two pictures are fused.
    """
    data: dict[str, list[dict[str, Any]]] = {}
    rows: list[list[NDArray[Any]]] = []
    titles, heat = [], {}
    for stage in inputs.stages:
        gates = inputs.gates.get(stage.name)
        pairs = _class_pairs(inputs, gates)
        encoder = inputs.encoder(stage, gates) if pairs else None
        if encoder is None:
            continue
        data[stage.name] = []
        for number, (classes, codes, pair) in enumerate(pairs):
            drawn = _anchor_and_pair(inputs, codes, pair, number)
            if drawn is None:
                continue
            anchor, one, other = encoder.pixels(inputs.run.images(drawn))
            positive = _side_by_side(one, other)
            maps = heat_maps(encoder, anchor, positive, gates, pair, inputs.config.seed + number)
            row = [
                as_picture(pixels.permute(1, 2, 0).cpu().numpy()) for pixels in (anchor, positive)
            ]
            for one_map in maps.values():
                heat[len(rows), len(row)] = one_map["heat"]
                row.append(row[0])
            similar = ", ".join(f"{m['similarity']:.2f}" for m in maps.values())
            titles.append(f"{stage.name}: {classes}; similarity {similar}")
            rows.append(row)
            keys = inputs.run.index.keys(drawn)
            entry = {"classes": classes, "anchor": keys[0], "positive": keys[1:]}
            data[stage.name].append(entry | maps)
    if not rows:
        return None
    columns = ["anchor", "positive", "all", "gates of y1", "gates of y2"][: max(map(len, rows))]
    drawing.sheet(path, "what an anchor shares with a positive", rows, titles, columns, heat)
    return data


def _class_pairs(
    inputs: Inputs, gates: ClassGates | None
) -> list[tuple[str, NDArray[np.integer], Sequence[int]]]:
    """Names of two classes, the codes [N] of all samples, and the two classes' codes."""
    if gates is not None:
        unlike = unlike_pairs(gates.of_classes(), PAIRS).tolist()
        return [(gates.title(pair), gates.codes, pair) for pair in unlike]
    pairs: list[tuple[str, NDArray[np.integer], Sequence[int]]] = []
    for attribute in inputs.attributes:
        codes, names = inputs.run.index.attribute(attribute)
        drawn = np.random.default_rng([inputs.config.seed, 9]).permutation(len(names))
        for pair in drawn[: len(drawn) // 2 * 2].reshape(-1, 2)[:PAIRS].tolist():
            title = " and ".join(names[code] for code in pair)
            pairs.append((f"{attribute} {title}", codes, pair))
    return pairs


def _anchor_and_pair(
    inputs: Inputs, codes: NDArray[np.integer], pair: Sequence[int], number: int
) -> list[int] | None:
    """Ids of two samples of the first class and one of the second; None where there are none."""
    random, ids = np.random.default_rng([inputs.config.seed, 10, number]), inputs.ids
    own, other = (random.permutation(ids[codes[ids] == code]) for code in pair)
    if len(own) < 2 or not len(other):
        return None
    return [int(own[0]), int(own[1]), int(other[0])]


def _side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """Two images [C, H, W] as the halves of one of this size, each at half its width."""
    both = torch.cat([left, right], dim=2)[None]
    size = (left.shape[1], left.shape[2])
    return functional.interpolate(both, size, mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)


def heat_maps(
    encoder: PixelEncoder,
    anchor: Tensor,
    positive: Tensor,
    gates: ClassGates | None,
    pair: Sequence[int],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Heat and similarity in all dimensions, and through the gates of each class of the pair."""
    layer = layer_with_map(encoder, encoder.model.blocks(), anchor)
    whole = View(0, 0, anchor.shape[1], anchor.shape[2])
    views = [whole, *draw_views(anchor, VIEWS - 1, seed)]
    spaces: dict[str, Tensor | None] = {"all": None}
    if gates is not None:
        own = torch.from_numpy(gates.of_classes()).to(anchor.device)
        spaces |= {f"gates of y{n}": own[code] for n, code in enumerate(pair, start=1)}
    maps = {}
    for name, gate in spaces.items():
        heat, similarity = clam(encoder, layer, anchor, positive, views, gate)
        height, width = (min(MAP_SIZE, length) for length in heat.shape)
        small = functional.adaptive_avg_pool2d(heat[None], (height, width))[0]
        maps[name] = {"similarity": similarity, "heat": small.cpu().tolist()}
    return maps


# --- the method -------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A part of an image: rows and columns ``top`` to ``bottom`` and ``left`` to ``right``,
    mirrored where ``flipped``, times ``brightness``, resized to the size of the image."""

    top: int
    left: int
    bottom: int
    right: int
    flipped: bool = False
    brightness: float = 1.0

    def of(self, image: Tensor) -> Tensor:
        """[C, H, W] -> the view, [C, H, W]."""
        part = image[:, self.top : self.bottom, self.left : self.right]
        part = part.flip(2) if self.flipped else part
        return _resized(part, image.shape[1], image.shape[2]) * self.brightness

    def lay_back(self, values: Tensor, total: Tensor, seen: Tensor) -> None:
        """Adds the map ``values`` [h, w] of the view to its part of ``total`` [H, W], and 1 to that
        of ``seen``."""
        values = values.flip(1) if self.flipped else values
        part = slice(self.top, self.bottom), slice(self.left, self.right)
        height, width = self.bottom - self.top, self.right - self.left
        total[part] += _resized(values[None], height, width)[0]
        seen[part] += 1


def draw_views(image: Tensor, count: int, seed: int) -> list[View]:
    """Random views of an image [C, H, W]: crops of a fifth to all of its area, of its proportions,
    half of them mirrored, with one of three brightnesses. They depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    height, width = image.shape[1:]
    views = []
    for area, down, across, flip, bright in torch.rand(count, 5, generator=generator).tolist():
        side = math.sqrt(0.2 + 0.8 * area)
        rows, columns = (max(1, round(side * size)) for size in (height, width))
        top, left = round(down * (height - rows)), round(across * (width - columns))
        brightness = _BRIGHTNESS[int(bright * len(_BRIGHTNESS))]
        views.append(View(top, left, top + rows, left + columns, flip < 0.5, brightness))
    return views


def clam(
    encoder: Callable[[Tensor], Tensor],
    layer: nn.Module,
    anchor: Tensor,
    positive: Tensor,
    views: Sequence[View],
    gate: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Grad-CAM of the mean cosine between the positive and the views of the anchor: a heat map
    [H, W] of the anchor's pixels, at least 0, and this similarity.

    encoder    images [n, C, H, W] -> features [n, D], differentiable; in eval mode
    layer      its last convolution, with an output [n, c, h, w], or last block, with tokens
               [n, T, c]: the largest square of tokens at the end is taken for the image. Where
               the features are of a class token, take the last block's first norm: behind the
               block no other token counts any more, and the map is 0
    anchor     [C, H, W]
    positive   [C, H, W]
    views      of the anchor; the map is about pixels that a view sees, and 0 elsewhere
    gate       [D], multiplies the features of both sides (None: all dimensions count alike)

    Parameters keep their gradients. Raises ValueError where the layer's output has another shape.
    """
    images = torch.stack([view.of(anchor) for view in views])
    open_gate = torch.ones(()) if gate is None else gate.detach()
    with torch.no_grad():
        wanted = encoder(positive[None]) * open_gate
    with torch.enable_grad(), _kept(layer) as outputs:
        features = encoder(images.requires_grad_()) * open_gate
        similarity = functional.cosine_similarity(features, wanted, dim=1).mean()
        (gradient,) = torch.autograd.grad(similarity, outputs[0])
    channels = _as_images(gradient).mean(dim=(2, 3), keepdim=True)
    maps = (channels * _as_images(outputs[0].detach())).sum(dim=1).relu()
    total, seen = (anchor.new_zeros(anchor.shape[1:]) for _ in range(2))
    for view, values in zip(views, maps, strict=True):
        view.lay_back(values, total, seen)
    return total / seen.clamp_min(1.0), float(similarity.detach())


def layer_with_map(
    encoder: Callable[[Tensor], Tensor], layers: Sequence[nn.Module], image: Tensor
) -> nn.Module:
    """The one of the ``layers``, in their order, whose output ``clam`` can make the best map of.

    Layers that the encoder does not run, such as a text tower's, are passed over.
    Of convolutions it is the last one whose output for the image [C, H, W] has at least 4 x 4
    places; where none has, the one with the most. Of blocks over tokens it is the last but one,
    behind which the last one still mixes the tokens, so that a class token depends on the others.
    Raises ValueError where no layer is run.
    """
    with ExitStack() as stack:
        outputs = [stack.enter_context(_kept(layer)) for layer in layers]
        with torch.no_grad():
            encoder(image[None])
    run = [(layer, own[0]) for layer, own in zip(layers, outputs, strict=True) if own]
    if not run:
        raise ValueError("the encoder runs none of its layers by themselves: there is no map")
    maps = [(layer, output.shape[2:].numel()) for layer, output in run if output.ndim == 4]
    if not maps:
        return run[-2:][0][0]
    enough = [layer for layer, places in maps if places >= _PLACES]
    return enough[-1] if enough else max(maps, key=lambda each: each[1])[0]


@contextmanager
def _kept(layer: nn.Module) -> Iterator[list[Tensor]]:
    """The layer's outputs inside, as tensors of the graph."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, given: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handle = layer.register_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


def _as_images(values: Tensor) -> Tensor:
    """[n, c, h, w], or tokens [n, T, c], of which the last square is the image -> [n, c, h, w]."""
    if values.ndim == 4:
        return values
    if values.ndim != 3:
        raise ValueError(f"the layer gives {list(values.shape)}, wanted [n, c, h, w] or [n, T, c]")
    side = math.isqrt(values.shape[1])
    tokens = values[:, -side * side :].transpose(1, 2)
    return tokens.reshape(len(values), -1, side, side)


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    """[C, h, w] -> [C, height, width], bilinear; the image itself where it has this size."""
    if image.shape[1:] == (height, width):
        return image
    size = (height, width)
    return functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]


FIGURE = Figure(
    draw,
    f"attributes in data.sources.NAME.attributes or an objective with gates, and {EXPORTS}",
    encoder=True,
)
