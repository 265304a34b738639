"""Figure: readouts of robust and of non-robust features of an encoder. An encoder runs.

Source: IFM (Robinson et al., 2021), section 4.3 and Fig. 8, after Ilyas et al. (2019). Every image
is moved by small FGSM steps until a linear readout of the encoder says another class t: with the
true label y it belongs to the robust set D_R, with t to the non-robust set D_NR. Readouts are then
fitted to each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mclclip.eval import logistic
from mclclip.figures import drawing
from mclclip.figures.inputs import EXPORTS, Figure, Inputs, PixelEncoder
from mclclip.randomness import mix

MOVED, TESTED = 1_000, 500
_STRENGTH = 1.0  # of the readouts' L2 penalty


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """Accuracy of linear readouts of each stage that are trained on the samples as they are (D), on
    robust (D_R) and on non-robust features (D_NR), by attribute.

    At most ``MOVED`` samples are moved and ``TESTED`` others tested as they are, both drawn from
    the index by the seed. A stage's sets are made with its own encoder and readout.
    """
    data: dict[str, dict[str, Any]] = {}
    bars: dict[str, dict[str, float]] = {}
    for stage in inputs.stages:
        encoder = inputs.encoder(stage) if inputs.attributes else None
        if encoder is None:
            continue
        for attribute in inputs.attributes:
            entry = readouts(inputs, encoder, attribute)
            if entry is None:
                continue
            data.setdefault(attribute, {})[stage.name] = entry
            for kind, value in entry["accuracy_percent"].items():
                if value is not None:
                    bars.setdefault(f"{attribute}\n{kind}", {})[stage.name] = value
    if not data:
        return None
    drawing.bars(path, "readouts of D, robust D_R, non-robust D_NR", bars)
    return data


def readouts(inputs: Inputs, encoder: PixelEncoder, attribute: str) -> dict[str, Any] | None:
    """The figures of one stage and attribute; None where it has fewer than two values."""
    codes = inputs.run.index.attribute(attribute)[0][inputs.ids]
    rows = np.random.default_rng([inputs.config.seed, 11]).permutation(np.flatnonzero(codes >= 0))
    rows = rows[: MOVED + TESTED]
    cut = len(rows) - min(TESTED, len(rows) // 3)
    classes = np.unique(codes[rows[:cut]])
    known = np.isin(codes[rows], classes)
    if len(classes) < 2 or not known[cut:].any():
        return None
    train, test = rows[:cut], rows[cut:][known[cut:]]
    labels, truth = (np.searchsorted(classes, codes[part]) for part in (train, test))
    batch = inputs.config.embed.batch_size
    images = encoder.pixels(inputs.run.images(inputs.ids[train]))
    features = encoder.of_all(images, batch)
    readout = logistic.fit(features, labels, _STRENGTH)
    weight, bias = (
        torch.from_numpy(v).float().to(images.device) for v in (readout.weight, readout.bias)
    )
    own = torch.from_numpy(labels).to(images.device)
    targets = draw_targets(own, len(classes), inputs.config.seed)
    moved, steps, reached = move_to_targets(
        encoder, weight, bias, images, targets, batch_size=batch
    )
    some = bool(reached.any())
    after = encoder.of_all(moved[reached], batch) if some else features[:0]
    tested = encoder.of_samples(inputs, inputs.ids[test])
    mask = reached.cpu().numpy()
    return {
        "accuracy_percent": {
            "D": 100.0 * float((readout.predict(tested) == truth).mean()),
            "D_R": _accuracy(after, labels[mask], tested, truth),
            "D_NR": _accuracy(after, targets.cpu().numpy()[mask], tested, truth),
        },
        "moved": len(train),
        "tested": len(test),
        "reached": float(mask.mean()),
        "mean_steps": float(steps[reached].float().mean()) if some else None,
    }


def _accuracy(
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    tested: NDArray[np.float32],
    truth: NDArray[np.int64],
) -> float | None:
    """Percent of right answers; None where there are not two classes to train on."""
    if len(np.unique(labels)) < 2:
        return None
    predicted = logistic.fit(features, labels, _STRENGTH).predict(tested)
    return 100.0 * float((predicted == truth).mean())


# --- the sets ---------------------------------------------------------------------------------


def draw_targets(labels: Tensor, num_classes: int, seed: int) -> Tensor:
    """[N] int64: a class for each sample, uniformly, keyed by (seed, row); its own one too, as in
    the paper."""
    drawn = mix(seed, np.arange(len(labels))) % np.uint64(num_classes)
    return torch.from_numpy(np.asarray(drawn).astype(np.int64)).to(labels.device)


def move_to_targets(
    encoder: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor,
    images: Tensor,
    targets: Tensor,
    *,
    eps: float = 0.01,
    max_steps: int = 50,
    batch_size: int = 256,
) -> tuple[Tensor, Tensor, Tensor]:
    """Moves every image until the readout says its target, at most ``max_steps`` times: the moved
    images [N, ...], the steps [N] int64 of each, and whether it reached its target, bool [N].

    encoder         images [n, ...] -> features [n, D], differentiable; in eval mode
    weight, bias    [C, D] and [C] of the linear readout
    images          [N, ...] in [0, 1]
    targets         [N] int64, as ``draw_targets`` gives them
    eps             each step adds -eps * sign of the gradient of the cross-entropy with the target,
                    and cuts pixels to [0, 1]

    An image whose target the readout says already stays as it is.
    """

    def readout(x: Tensor) -> Tensor:
        return functional.linear(encoder(x), weight, bias)

    moved = images.detach().clone()
    steps, reached = torch.zeros_like(targets), torch.zeros_like(targets, dtype=torch.bool)
    for going in torch.split(torch.arange(len(images), device=images.device), batch_size):
        for step in range(max_steps + 1):
            with torch.no_grad():
                reached[going] = readout(moved[going]).argmax(dim=1) == targets[going]
            going = going[~reached[going]]
            if step == max_steps or not len(going):
                break
            x = moved[going].requires_grad_()
            with torch.enable_grad():
                loss = functional.cross_entropy(readout(x), targets[going], reduction="sum")
                (gradient,) = torch.autograd.grad(loss, x)
            with torch.no_grad():
                moved[going] = (x - eps * gradient.sign()).clamp(0.0, 1.0)
            steps[going] += 1
    return moved, steps, reached


FIGURE = Figure(
    draw,
    f"attributes of two values or more in data.sources.NAME.attributes, and {EXPORTS}",
    encoder=True,
)
