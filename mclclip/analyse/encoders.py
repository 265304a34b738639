"""Figures for which an encoder runs: heat maps, adversarial sets, and subspaces of SimLAP.

The encoders are the exports of the stages. Gates act on the features of the projector, which is not
exported and is read from the last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mclclip.analyse.material import ClassGates, Figure, Material, as_picture
from mclclip.analysis import adversarial_sets as attacks
from mclclip.analysis import clam as maps
from mclclip.analysis import gates as analysis
from mclclip.analysis import pictures
from mclclip.analysis import tsne as layouts
from mclclip.analysis.class_overlap import class_similarity
from mclclip.eval import linear_probe
from mclclip.models.image_model import ImageModel
from mclclip.models.loading import load_any
from mclclip.objectives.base import with_prefix
from mclclip.objectives.label_filter import normed
from mclclip.run import artifacts

log = logging.getLogger("mclclip")

PAIRS, VIEWS, MAP_SIZE = 2, 16, 32
ATTACKED, TESTED = 1_000, 500
MAX_LAID_OUT = 2_000
_STRENGTH = 1.0


class PixelEncoder(nn.Module):
    """A stage's encoder for pixels [n, C, H, W] between 0 and 1, which it normalises itself.

    Its features are those of the export, at unit length; with ``gates`` those that the gates act
    on, behind projector and layer norm.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ImageModel, gates: ClassGates | None = None) -> None:
        super().__init__()
        self.model, self.gated = model, gates is not None
        self.norm = None if gates is None else gates.subspaces.norm
        for name in ("mean", "std"):
            values = torch.tensor(model.config["preprocess_cfg"][name], dtype=torch.float32)
            self.register_buffer(name, values.reshape(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, D]."""
        images = (pixels - self.mean) / self.std
        if self.gated:
            return normed(self.model(image=images)["image_features"], self.norm)
        return self.model.encode_image(images, normalize=True)

    def pixels(self, images: Sequence[Any]) -> Tensor:
        """Stored images -> pixels [n, C, H, W] between 0 and 1, of the encoder's size."""
        prepared = torch.stack([self.model.preprocess_val(image) for image in images])
        return (prepared.to(self.mean.device) * self.std + self.mean).clamp(0.0, 1.0)

    def of_all(self, pixels: Tensor, batch_size: int) -> NDArray[np.float32]:
        """[N, D]: the features of pixels [N, C, H, W], a batch at a time."""
        with torch.no_grad():
            parts = [self(batch).cpu() for batch in torch.split(pixels, batch_size)]
        features: NDArray[np.float32] = torch.cat(parts).numpy()
        return features


def load(material: Material, stage: int, gates: ClassGates | None = None) -> PixelEncoder | None:
    """A stage's export in evaluation mode, on the device; None, and a line in the log, without one.

    With ``gates`` it has the projector that was trained.
    """
    directory = material.layout.export(stage)
    if not artifacts.is_finished(directory):
        log.info(
            "stage_%d has no export and is left out: run 'mclclip export --stage %d' to have it in",
            stage, stage,
        )  # fmt: skip
        return None
    if gates is None:
        model = load_any(directory)
    else:
        named = material.config.model_of("train" if stage else "base")
        model = load_any(directory, projector=named.projector)
        if named.projector:
            projector: nn.Module = model.get_submodule("projector")
            projector.load_state_dict(with_prefix(gates.state, "model.projector."))
    return PixelEncoder(model, gates).to(material.device).eval()


# --- CLAM ------------------------------------------------------------------------------------


def clam(material: Material, path: Path) -> dict[str, Any] | None:
    """Where an anchor of one class is like a picture of two classes (SimLAP, Fig. 6).

    The positive is half a sample of the anchor's class y1 and half a sample of y2, side by side. A
    stage with gates has a map in all dimensions, and one through the gates of each of the two
    classes; the classes are the pairs whose gates are least and most alike. Other stages have the
    first map alone, for pairs of an attribute's values that are drawn by the seed. The paper names
    neither the number of views (16 here) nor how the two pictures are fused.
    """
    data: dict[str, list[dict[str, Any]]] = {}
    shown: list[list[NDArray[Any]]] = []
    titles, heat = [], {}
    for stage, name in material.stages.items():
        gates = material.gates.get(name)
        pairs = _class_pairs(material, gates)
        encoder = load(material, stage, gates) if pairs else None
        if encoder is None:
            continue
        data[name] = []
        for number, (title, codes, pair) in enumerate(pairs):
            drawn = _anchor_and_pair(material, codes, pair, number)
            if drawn is None:
                continue
            anchor, one, other = encoder.pixels(material.raw_images(drawn))
            positive = _side_by_side(one, other)
            found = _heat_maps(encoder, anchor, positive, gates, pair, material.seed + number)
            row = [_shown(anchor), _shown(positive)]
            for one_map in found.values():
                heat[len(shown), len(row)] = one_map["heat"]
                row.append(row[0])
            similar = ", ".join(f"{m['similarity']:.2f}" for m in found.values())
            titles.append(f"{name}: {title}; similarity {similar}")
            shown.append(row)
            keys = material.index.keys(drawn)
            data[name].append({"classes": title, "anchor": keys[0], "positive": keys[1:]} | found)
    if not shown:
        return None
    columns = ["anchor", "positive", "all", "gates of y1", "gates of y2"][: max(map(len, shown))]
    pictures.sheet(path, "what an anchor shares with a positive", shown, titles, columns, heat)
    return data


def _class_pairs(
    material: Material, gates: ClassGates | None
) -> list[tuple[str, NDArray[np.integer], Sequence[int]]]:
    """Names of two classes, the codes [N] of all samples, and the two classes' codes."""
    if gates is not None:
        pairs = analysis.unlike_pairs(gates.of_classes(), PAIRS).tolist()
        return [(_title(gates.names, pair), gates.codes, pair) for pair in pairs]
    found: list[tuple[str, NDArray[np.integer], Sequence[int]]] = []
    for attribute in material.attributes:
        codes, names = material.codes(attribute), material.index.attribute(attribute)[1]
        drawn = np.random.default_rng([material.seed, 9]).permutation(len(names))
        for pair in drawn[: len(drawn) // 2 * 2].reshape(-1, 2)[:PAIRS].tolist():
            found.append((f"{attribute} {_title(names, pair)}", codes, pair))
    return found


def _title(names: Sequence[str], pair: Sequence[int]) -> str:
    return " and ".join(names[code] for code in pair)


def _anchor_and_pair(
    material: Material, codes: NDArray[np.integer], pair: Sequence[int], number: int
) -> list[int] | None:
    """Ids of two samples of the first class and one of the second; None where there are none."""
    random = np.random.default_rng([material.seed, 10, number])
    own, other = (random.permutation(material.ids[codes[material.ids] == c]) for c in pair)
    if len(own) < 2 or not len(other):
        return None
    return [int(own[0]), int(own[1]), int(other[0])]


def _side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """Two images [C, H, W] as the halves of one of this size, each at half its width."""
    both = torch.cat([left, right], dim=2)[None]
    size = (left.shape[1], left.shape[2])
    return functional.interpolate(both, size, mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)


def _heat_maps(
    encoder: PixelEncoder,
    anchor: Tensor,
    positive: Tensor,
    gates: ClassGates | None,
    pair: Sequence[int],
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Heat and similarity in all dimensions, and through the gates of each class of the pair."""
    layer = maps.layer_with_map(encoder, encoder.model.blocks(), anchor)
    views = [maps.whole_view(anchor), *maps.draw_views(anchor, VIEWS - 1, seed)]
    spaces: dict[str, Tensor | None] = {"all": None}
    if gates is not None:
        own = torch.from_numpy(gates.of_classes()).to(anchor.device)
        spaces |= {f"gates of y{n}": own[code] for n, code in enumerate(pair, start=1)}
    found = {}
    for name, gate in spaces.items():
        made = maps.clam(encoder, layer, anchor, positive, views, gate)
        height, width = (min(MAP_SIZE, length) for length in made.heat.shape)
        heat = functional.adaptive_avg_pool2d(made.heat[None], (height, width))[0]
        found[name] = {"similarity": made.similarity, "heat": heat.cpu().tolist()}
    return found


def _shown(pixels: Tensor) -> NDArray[Any]:
    return as_picture(pixels.permute(1, 2, 0).cpu().numpy())


# --- robust and non-robust features ----------------------------------------------------------


def adversarial_sets(material: Material, path: Path) -> dict[str, Any] | None:
    """Accuracy of linear readouts of each stage that are trained on the samples as they are (D), on
    robust (D_R) and on non-robust features (D_NR), by attribute (IFM, Fig. 8).

    At most ``ATTACKED`` samples are moved and ``TESTED`` others tested as they are, both drawn from
    the index by the seed. A stage's sets are made with its own encoder and readout.
    """
    data: dict[str, dict[str, Any]] = {}
    bars: dict[str, dict[str, float]] = {}
    for stage, name in material.stages.items():
        encoder = load(material, stage) if material.attributes else None
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
    images, tested = (
        encoder.pixels(material.raw_images(material.ids[part].tolist())) for part in (train, test)
    )
    features = encoder.of_all(images, batch)
    readout = linear_probe.fit(features, labels, _STRENGTH)
    weight, bias = (torch.from_numpy(v).float().to(images.device) for v in readout.linear())
    own = torch.from_numpy(labels).to(images.device)
    targets = attacks.draw_targets(own, len(classes), material.seed)
    moved = attacks.adversarial_sets(
        encoder, weight, bias, images, own, targets=targets, batch_size=batch
    )
    reached = moved.reached.cpu().numpy()
    after = encoder.of_all(moved.images[moved.reached], batch) if reached.any() else features[:0]
    asked = encoder.of_all(tested, batch)
    trained = {
        "D": (features, labels),
        "D_R": (after, labels[reached]),
        "D_NR": (after, targets.cpu().numpy()[reached]),
    }
    return {
        "accuracy_percent": {
            kind: _accuracy(*given, asked, truth) for kind, given in trained.items()
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
    predicted = linear_probe.fit_predict(features, labels, asked, _STRENGTH).predicted
    return float(100.0 * (predicted == truth).mean())


# --- subspaces -------------------------------------------------------------------------------


def subspaces(material: Material, path: Path) -> dict[str, Any] | None:
    """t-SNE in all dimensions and in the subspaces of two pairs of classes (SimLAP, Fig. 5): the
    pair whose gates are least alike, and the one whose are most alike.

    ``cosine`` is the mean over pairs of samples of the two classes, and ``cosine_to_others`` the
    mean over classes of that between the two and any other, in the same dimensions (Fig. 1 and 10).
    """
    data: dict[str, Any] = {}
    lines: list[dict[str, pictures.Plane]] = []
    rows = material.some(MAX_LAID_OUT, 8)
    for stage, name in material.stages.items():
        gates = material.gates.get(name)
        encoder = load(material, stage, gates) if gates is not None else None
        if gates is None or encoder is None:
            continue
        chosen = rows[gates.codes[material.ids[rows]] >= 0]
        if len(chosen) < layouts.FEWEST:
            continue
        ids = material.ids[chosen]
        pixels = encoder.pixels(material.raw_images(ids.tolist()))
        features = encoder.of_all(pixels, material.config.embed.batch_size)
        codes = gates.codes[ids]
        pairs = analysis.unlike_pairs(gates.of_classes(), 1)
        panels: dict[str, tuple[NDArray[np.float32], dict[str, float | None]]] = {}
        panels["all dimensions"] = features, {}
        for pair, values in zip(pairs.tolist(), gates.of_pairs(pairs), strict=True):
            inside = features * values
            panels[_title(gates.names, pair)] = inside, _likeness(features, inside, codes, pair)
        data[name] = {"samples": material.index.keys(ids), "codes": codes.tolist()}
        data[name] |= {"classes": list(gates.names), "panels": {}}
        line: dict[str, pictures.Plane] = {}
        for title, (inside, cosines) in panels.items():
            places = layouts.tsne(inside, material.seed)
            data[name]["panels"][title] = {"places": places.tolist()} | cosines
            line[f"{name}: {title}"] = places, codes, gates.names
        lines.append(line)
    if not lines:
        return None
    pictures.planes(path, "t-SNE in subspaces of pairs of classes", lines)
    return data


def _likeness(
    features: NDArray[np.float32],
    inside: NDArray[np.float32],
    codes: NDArray[np.integer],
    pair: Sequence[int],
) -> dict[str, float | None]:
    """Mean cosines of the pair and of the pair with others, in the subspace and in all dimensions;
    None for classes without samples."""
    found: dict[str, float | None] = {}
    for space, rows in (("", inside), ("_in_all_dimensions", features)):
        classes, cosines = class_similarity(rows, codes)
        own, others = np.isin(classes, pair), ~np.isin(classes, pair)
        both = own.sum() == 2
        found[f"cosine{space}"] = float(cosines[own][:, own][0, 1]) if both else None
        mean = cosines[own][:, others].mean() if own.any() and others.any() else None
        found[f"cosine_to_others{space}"] = None if mean is None else float(mean)
    return found


_EXPORTS = "exports of its stages: run 'mclclip export --stage 0'"
_ATTRIBUTES = "attributes in data.sources.NAME.attributes"
FIGURES = {
    "clam": Figure(clam, f"{_ATTRIBUTES} or an objective with gates, and {_EXPORTS}", True),
    "adversarial_sets": Figure(
        adversarial_sets, f"{_ATTRIBUTES} of two values or more, and {_EXPORTS}", True
    ),
    "subspaces": Figure(
        subspaces,
        "a finished training whose objective learns gates, such as simlap, with its last "
        f"checkpoint, and {_EXPORTS}",
        True,
    ),
}
