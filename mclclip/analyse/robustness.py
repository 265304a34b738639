"""Figure: readouts of robust and of non-robust features. An encoder runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mclclip.analyse import encoders
from mclclip.analyse.encoders import PixelEncoder
from mclclip.analyse.material import Figure, Material
from mclclip.analysis import adversarial_sets as attacks
from mclclip.analysis import pictures
from mclclip.eval import logistic

ATTACKED, TESTED = 1_000, 500
_STRENGTH = 1.0  # of the readouts' L2 penalty


def adversarial_sets(material: Material, path: Path) -> dict[str, Any] | None:
    """Accuracy of linear readouts of each stage that are trained on the samples as they are (D), on
    robust (D_R) and on non-robust features (D_NR), by attribute (IFM, Fig. 8).

    At most ``ATTACKED`` samples are moved and ``TESTED`` others tested as they are, both drawn from
    the index by the seed. A stage's sets are made with its own encoder and readout.
    """
    data: dict[str, dict[str, Any]] = {}
    bars: dict[str, dict[str, float]] = {}
    for stage, name in material.stages.items():
        encoder = encoders.load(material, stage) if material.attributes else None
        if encoder is None:
            continue
        for attribute in material.attributes:
            found = _readouts(material, encoder, attribute)
            if found is None:
                continue
            data.setdefault(attribute, {})[name] = found
            for kind, value in found["accuracy_percent"].items():
                if value is not None:
                    bars.setdefault(f"{attribute}\n{kind}", {})[name] = value
    if not data:
        return None
    pictures.bars(path, "readouts of D, robust D_R, non-robust D_NR", bars)
    return data


def _readouts(material: Material, encoder: PixelEncoder, attribute: str) -> dict[str, Any] | None:
    """The figures of one stage and attribute; None where it has fewer than two values."""
    codes = material.codes(attribute)[material.ids]
    rows = np.random.default_rng([material.seed, 11]).permutation(np.flatnonzero(codes >= 0))
    rows = rows[: ATTACKED + TESTED]
    cut = len(rows) - min(TESTED, len(rows) // 3)
    classes = np.unique(codes[rows[:cut]])
    known = np.isin(codes[rows], classes)
    if len(classes) < 2 or not known[cut:].any():
        return None
    train, test = rows[:cut], rows[cut:][known[cut:]]
    labels, truth = (np.searchsorted(classes, codes[part]) for part in (train, test))
    batch = material.config.embed.batch_size
    images = encoder.pixels(material.raw_images(material.ids[train].tolist()))
    features = encoder.of_all(images, batch)
    readout = logistic.fit(features, labels, _STRENGTH)
    readout_parts = (readout.weight, readout.bias)
    weight, bias = (torch.from_numpy(v).float().to(images.device) for v in readout_parts)
    own = torch.from_numpy(labels).to(images.device)
    targets = attacks.draw_targets(own, len(classes), material.seed)
    moved = attacks.adversarial_sets(
        encoder, weight, bias, images, own, targets=targets, batch_size=batch
    )
    reached = moved.reached.cpu().numpy()
    after = encoder.of_all(moved.images[moved.reached], batch) if reached.any() else features[:0]
    asked = encoders.features_of(material, encoder, material.ids[test])
    moved_sets = {
        "D_R": (after, labels[reached]),
        "D_NR": (after, targets.cpu().numpy()[reached]),
    }
    return {
        "accuracy_percent": {
            "D": _percent(readout.predict(asked), truth),
            **{kind: _accuracy(*given, asked, truth) for kind, given in moved_sets.items()},
        },
        "moved": len(train),
        "tested": len(test),
        "reached": float(reached.mean()),
        "mean_steps": float(moved.steps[moved.reached].float().mean()) if reached.any() else None,
    }


def _accuracy(
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    asked: NDArray[np.float32],
    truth: NDArray[np.int64],
) -> float | None:
    """Percent of right answers; None where there are not two classes to train on."""
    if len(np.unique(labels)) < 2:
        return None
    predicted = logistic.fit(features, labels, _STRENGTH).predict(asked)
    return _percent(predicted, truth)


def _percent(predicted: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    return float(100.0 * (predicted == truth).mean())


FIGURES = {
    "adversarial_sets": Figure(
        adversarial_sets,
        f"attributes of two values or more in data.sources.NAME.attributes, and {encoders.NEEDS}",
        encoder=True,
    )
}
