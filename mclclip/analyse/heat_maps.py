"""Figure: heat maps of what an anchor shares with a positive. An encoder runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mclclip.analyse import encoders
from mclclip.analyse.encoders import PixelEncoder
from mclclip.analyse.material import ClassGates, Figure, Material, pair_title
from mclclip.analysis import clam as maps
from mclclip.analysis import gates as analysis
from mclclip.analysis import pictures
from mclclip.data.decode import as_picture

PAIRS, VIEWS, MAP_SIZE = 2, 16, 32


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
        encoder = encoders.load(material, stage, gates) if pairs else None
        if encoder is None:
            continue
        data[name] = []
        for number, (classes, codes, pair) in enumerate(pairs):
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
            titles.append(f"{name}: {classes}; similarity {similar}")
            shown.append(row)
            keys = material.index.keys(drawn)
            data[name].append({"classes": classes, "anchor": keys[0], "positive": keys[1:]} | found)
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
        return [(pair_title(gates.names, pair), gates.codes, pair) for pair in pairs]
    found: list[tuple[str, NDArray[np.integer], Sequence[int]]] = []
    for attribute in material.attributes:
        codes, names = material.codes(attribute), material.index.attribute(attribute)[1]
        drawn = np.random.default_rng([material.seed, 9]).permutation(len(names))
        for pair in drawn[: len(drawn) // 2 * 2].reshape(-1, 2)[:PAIRS].tolist():
            found.append((f"{attribute} {pair_title(names, pair)}", codes, pair))
    return found


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


FIGURES = {
    "clam": Figure(
        clam,
        "attributes in data.sources.NAME.attributes or an objective with gates, and "
        f"{encoders.NEEDS}",
        encoder=True,
    )
}
