"""Every objective written out with plain loops, from the formulas of the papers.

A loop takes a step's features, which carry the gradient of model and adversary, and returns the
loss of all rows, one pair at a time. What the loops are made of stands first: rows of contrastive
losses, the losses over class centers and their optimizer, the network of feature dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import Objective
from mclclip.objectives.class_centers import Margin
from mclclip.objectives.gated_pairs import draw_partners, gate_penalty
from mclclip.objectives.near_copies import DIGESTS as DIGESTS_OF
from mclclip.util.randomness import mix

SEED, NUM_CLASSES = 3, 5
DIGESTS = (*DIGESTS_OF.values(),)


def split(given: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """What an objective is given by name, as features and a batch; what is None is not there."""
    given = {name: value for name, value in given.items() if value is not None}
    fields = {"group_ids": None, "sample_id": None, "classes": None, "prefix_length": 0}
    of_batch = {name: given.get(name, default) for name, default in fields.items()}
    extras = {n: v for n, v in given.items() if n in DIGESTS or n.startswith("base_")}
    features = {n: v for n, v in given.items() if n not in (*fields, *extras)}
    return features, SimpleNamespace(**of_batch, extras=extras)


def parts_of(objective: Any, **given: Any) -> dict[str, Tensor]:
    """The loss and parts of features and fields of a batch by name."""
    parts: dict[str, Tensor] = objective(*split(given))
    return parts


# --- contrastive rows ----------------------------------------------------------------------------


@dataclass
class Batch:
    """Raw features of two sides and the model's logit scale, with gradient, and marks."""

    first: Tensor
    second: Tensor
    scale: Tensor
    group_ids: Tensor
    sample_id: Tensor
    classes: Tensor
    digests: tuple[Tensor, ...] = ()  # equal in one of them: equal captions or pictures
    near: Callable[[int, int], float | None] | None = None  # in their place

    def unit(self) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.first, dim=-1), functional.normalize(self.second, dim=-1)

    def run(self, objective: Objective, second: str = "image_features_1") -> dict[str, Tensor]:
        """The objective's parts; the loss has been pulled back."""
        image, other = self.unit()
        features = {"image_features": image, second: other, "logit_scale": self.scale}
        parts = parts_of(
            objective,
            **features,
            group_ids=self.group_ids[:, None],
            sample_id=self.sample_id,
            classes=self.classes[:, None],
            **dict(zip(DIGESTS, self.digests, strict=False)),
        )
        parts["loss"].backward()
        return parts

    def gradients(self) -> list[Tensor]:
        """Of both sides and the scale; zeros where none arrived."""
        leaves = (self.first, self.second, self.scale)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    def rows(self, chosen: Any) -> Batch:
        """Some of the samples, as a batch of its own."""
        marks = (self.group_ids[chosen], self.sample_id[chosen], self.classes[chosen])
        sides = (side.detach()[chosen].clone() for side in (self.first, self.second))
        leaves = (x.requires_grad_() for x in (*sides, self.scale.detach().clone()))
        return Batch(*leaves, *marks, tuple(each[chosen] for each in self.digests))

    def weight(self, p: int, q: int) -> float | None:
        """That of q as a near copy of p: 1 if they are one sample, or have an equal caption or
        picture; None if it is none."""
        if self.near is not None:
            return self.near(p, q)
        marks = (self.sample_id, *self.digests)
        return 1.0 if any(bool(mark[p] == mark[q]) for mark in marks) else None


def draw(
    seed: int,
    rows: int,
    groups: int = 1,
    classes: int = 2,
    repeated: bool = False,
    dim: int = 6,
    scale: float = 7.0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Features at random; ``repeated``: the last sample is the first one again."""
    rng = np.random.default_rng(seed)
    sides = [torch.tensor(rng.normal(size=(rows, dim)), dtype=dtype) for _ in range(2)]
    marks = [torch.tensor(rng.integers(0, n, size=rows)) for n in (groups, classes)]
    sample_id = torch.tensor(rng.permutation(1000)[:rows])
    if repeated:
        for values in (*marks, sample_id):
            values[-1] = values[0]
    leaves = [x.requires_grad_() for x in (*sides, torch.tensor(scale, dtype=dtype))]
    return Batch(*leaves, marks[0], sample_id, marks[1])


@dataclass
class Row:
    """What a row meets: cosines of its own pair (None: it has none), of its negatives, of those of
    them that have its class, and of its near copies, each with its weight."""

    positive: Tensor | None
    negatives: list[Tensor]
    same_class: list[Tensor]
    near: list[tuple[Tensor, float]]


def rows_of(batch: Batch, between: str, num_views: int = 2) -> list[list[Row]]:
    """The rows of every direction."""
    first, second = batch.unit()
    count = len(first)
    if between == "captions":
        directions = [(first, [second], 0), (second, [first], 0)]
    elif num_views == 1:
        directions = [(first, [first], None)]
    else:
        directions = [(first, [first, second], 1), (second, [first, second], 0)]

    def row(queries: Tensor, keys: list[Tensor], own: int | None, p: int) -> Row:
        group = [q for q in range(count) if q != p and batch.group_ids[p] == batch.group_ids[q]]
        every = [(queries[p] @ side[q], q) for side in keys for q in group]
        met = [(cosine, q) for cosine, q in every if batch.weight(p, q) is None]
        same = [cosine for cosine, q in met if batch.classes[p] == batch.classes[q]]
        near = [(cosine, w) for cosine, q in every if (w := batch.weight(p, q)) is not None]
        positive = None if own is None else queries[p] @ keys[own][p]
        return Row(positive, [cosine for cosine, _ in met], same, near)

    return [[row(*direction, p) for p in range(count)] for direction in directions]


def mean_loss(rows: list[list[Row]], of_row: Callable[[Row], Tensor | None]) -> Tensor:
    """The mean over directions of the mean over the rows that have a loss; 0 where none has."""
    found = [[x for x in map(of_row, direction) if x is not None] for direction in rows]
    means = [torch.stack(losses).mean() for losses in found if losses]
    return (
        torch.stack(means).mean()
        if means
        else torch.zeros((), dtype=torch.float64).requires_grad_()
    )


def _sum(terms: Iterator[Tensor]) -> Any:
    return sum(terms, start=0.0)


def info_nce(row: Row, scale: Tensor) -> Tensor:
    """-log of the own pair's share."""
    assert row.positive is not None
    own = (scale * row.positive).exp()
    return -(own / (own + _sum((scale * c).exp() for c in row.negatives))).log()


def info_nce_of_near(row: Row, scale: Tensor) -> Tensor:
    """The weighted mean over the own pair and the near copies of -log of the share among all."""
    assert row.positive is not None
    positives = [(row.positive, 1.0), *row.near]
    everybody = _sum((scale * c).exp() for c in [*(c for c, _ in positives), *row.negatives])
    shares = _sum(w * ((scale * c).exp() / everybody).log() for c, w in positives)
    return -shares / sum(w for _, w in positives)


def modified_row(row: Row, scale: Tensor, epsilon: float) -> Tensor:
    """IFM's Eq. 2."""
    assert row.positive is not None
    own = (scale * (row.positive - epsilon)).exp()
    return -(own / (own + _sum((scale * (c + epsilon)).exp() for c in row.negatives))).log()


def hard_negatives(row: Row, scale: Tensor, beta: float, tau_plus: float) -> Tensor:
    """HCL's code, with the number of the row's negatives."""
    assert row.positive is not None
    if not row.negatives:
        return 0.0 * row.positive
    own, count = (scale * row.positive).exp(), len(row.negatives)
    e = torch.stack([(scale * c).exp() for c in row.negatives])
    weights = e**beta
    reweighted = (weights * e).sum() / weights.mean()
    estimate = (reweighted - tau_plus * count * own) / (1.0 - tau_plus)
    estimate = torch.maximum(estimate, count * (-scale).exp())
    return -(own / (own + estimate)).log()


def supervised(row: Row, scale: Tensor) -> Tensor | None:
    """SupCon's Eq. 2; None without a positive."""
    own = [] if row.positive is None else [row.positive]
    if not own + row.same_class:
        return None
    everybody = _sum((scale * c).exp() for c in own + row.negatives)
    terms = [((scale * c).exp() / everybody).log() for c in own + row.same_class]
    return -torch.stack(terms).mean()


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


# --- class centers -------------------------------------------------------------------------------


def dense_loss(
    kind: str,
    rows: Tensor,
    features: Tensor,
    labels: Tensor,
    negatives: Sequence[int],
    scale: float,
    margin: Margin,
) -> Tensor:
    """Mean over the rows that have a label, of sums over all their classes."""
    unit, centers = functional.normalize(features, dim=1), functional.normalize(rows, dim=1)
    cosine = unit @ centers.T
    losses = []
    for i, own in enumerate(labels.tolist()):
        positives = [j for j in (own[:1] if kind == "single_label" else own) if j >= 0]
        if not positives:
            continue
        p = torch.stack([torch.exp(-scale * margin(cosine[i, j])) for j in positives]).sum()
        others = [torch.exp(scale * cosine[i, j]) for j in negatives if j not in positives]
        n = torch.stack([*others, torch.zeros_like(p)]).sum()
        coupled = torch.log(1 + p * n)
        losses.append(torch.log(1 + p) + torch.log(1 + n) if kind == "mlcd" else coupled)
    return torch.stack(losses).mean()


# --- the network of feature dropout --------------------------------------------------------------


Weights = Mapping[str, Tensor]


def enlarged(image: Tensor, height: int, width: int) -> Tensor:
    rows = [y * image.shape[1] // height for y in range(height)]
    columns = [x * image.shape[2] // width for x in range(width)]
    return image[:, rows][:, :, columns]


def viewmaker(weights: Weights, pixels: Tensor, noise: Sequence[float] | Tensor) -> Tensor:
    """The viewmaker of one image [C, H, W] with its noise [n]."""
    _, height, width = pixels.shape
    rest = torch.as_tensor(noise, dtype=pixels.dtype)

    def convolution(hidden: Tensor, name: str, stride: int = 1) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        border = [weight.shape[-1] // 2] * 4
        padded = functional.pad(hidden[None], border, mode="reflect")
        return functional.conv2d(padded, weight, bias, stride)[0]

    def norm(hidden: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.instance_norm(hidden[None], weight=weight, bias=bias, eps=1e-5)[0]

    def layer(name: str, hidden: Tensor, stride: int = 1) -> Tensor:
        return norm(convolution(hidden, f"{name}.0", stride), f"{name}.1").relu()

    def with_noise(hidden: Tensor) -> Tensor:
        nonlocal rest
        high, wide = hidden.shape[1:]
        channel, rest = rest[: high * wide].reshape(1, high, wide), rest[high * wide :]
        return torch.cat([hidden, channel])

    hidden = layer("down.0", with_noise(pixels))
    hidden = layer("down.2", layer("down.1", hidden, stride=2), stride=2)
    assert hidden.shape[1:] == (-(-height // 4), -(-width // 4))
    number = 0
    while f"blocks.{number}.layers.1.weight" in weights:
        hidden, name = with_noise(hidden), f"blocks.{number}.layers"
        inside = convolution(layer(f"{name}.0", hidden), f"{name}.1")
        hidden, number = hidden + norm(inside, f"{name}.2"), number + 1
    assert len(rest) == 0
    hidden = layer("to_half", enlarged(hidden, -(-height // 2), -(-width // 2)))
    return convolution(layer("to_whole", enlarged(hidden, height, width)), "last")


def noise_of(seed: int, step: int, view: int, sample_id: int, count: int) -> list[float]:
    """Upper 24 of the 64 bits of a hash of the key and the place."""
    bits = [int(mix(seed, step, view, sample_id, place)) for place in range(count)]
    return [(number >> 40) / 2**24 for number in bits]


def view_of(
    weights: Weights, pixels: Tensor, noise: Sequence[float], epsilon: float
) -> tuple[Tensor, Tensor]:
    """The change of one image [C, H, W] under the budget, and the image with it, cut to [0, 1]."""
    raw = viewmaker(weights, pixels, noise).tanh()
    change = raw * epsilon / (raw.abs().sum() / raw.numel() + 1e-4)
    return change, (pixels + change).clamp(0, 1)


# --- the loops of a step -------------------------------------------------------------------------


@dataclass
class Step:
    """A step of one process, as the objective has it."""

    objective: Any
    features: dict[str, Tensor]
    group_ids: Tensor
    sample_id: Tensor
    classes: Tensor
    prefix_length: int
    number: int
    extras: dict[str, Tensor] = field(default_factory=dict)
    found: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)
    """Leaves of the loop's own, each with the gradient that the objective has for it."""

    def weight(self, p: int, q: int) -> float | None:
        """That of q as a near copy of p, by the objective's options; None if it is none."""
        how = getattr(self.objective, "near", None)
        if self.sample_id[p] == self.sample_id[q]:
            return 1.0
        if how is None:
            return None
        if how.by_bytes:
            equal = [self.extras[name][p] == self.extras[name][q] for name in how.digests]
            return 1.0 if any(equal) else None
        images, texts = (self.extras.get(f"base_{name}_features") for name in ("image", "text"))
        cosines = []
        if "captions" in how.of:
            cosines.append(float(texts[p] @ texts[q]))
        if "pictures" in how.of:
            cosines.append(float(images[p] @ images[q]))
        if "pairs" in how.of:
            cosines += [float(images[p] @ texts[q]), float(texts[p] @ images[q])]
        bound = how.threshold
        if how.margin is not None:
            bound = float(images[p] @ texts[p]) - how.margin
        return min(max(*cosines, 0.0), 1.0) if max(cosines) > bound else None

    def meets(self, p: int, q: int) -> bool:
        """Eq. 3 of MCL: the samples have one group, and are two."""
        same_group = bool(self.group_ids[p] == self.group_ids[q])
        return same_group and bool(self.sample_id[p] != self.sample_id[q])

    def scale(self, temperature: Any) -> Any:
        if temperature == "learnable":
            inner = getattr(self.objective, "loss", self.objective)  # that of changed views
            return inner.temperature.log_scale.exp()[0]
        if temperature is None:
            return self.features["logit_scale"]
        return torch.tensor(1.0 / temperature, dtype=torch.float64)


Loop = Callable[[Step], Tensor]


def contrastive(
    between: str, of_row: Callable[..., Any], temperature: Any = None, num_views: int = 2
) -> Callable[[], Loop]:
    """A contrastive loss by the loss of a row, as the rows below has them."""

    def loop(step: Step) -> Tensor:
        other = "text_features" if between == "captions" else "image_features_1"
        first = step.features["image_features"]
        second = step.features.get(other, first)  # supcon of one view looks at no other
        marks = step.group_ids, step.sample_id, step.classes[:, 0]
        batch = Batch(first, second, torch.ones(()), *marks, near=step.weight)
        scale = step.scale(temperature)
        rows = rows_of(batch, between, num_views)
        return mean_loss(rows, lambda row: of_row(row, scale))

    return lambda: loop


def modified(epsilon: float, plain: float, changed: float) -> Callable[..., Tensor]:
    """IFM: weights of the plain and of the modified loss."""

    def of_row(row: Row, scale: Tensor) -> Tensor:
        moved = modified_row(row, scale, epsilon)
        return changed * moved + plain * info_nce(row, scale)

    return of_row


def edited(scope: str, num: int) -> Loop:
    """Images against captions and edited ones, of their own (or of all samples of their group), and
    captions against images."""

    def loop(step: Step) -> Tensor:
        images, texts = step.features["image_features"], step.features["text_features"]
        scale, rows = step.scale(None), range(len(images))
        total = torch.zeros((), dtype=torch.float64)
        for p in rows:
            kept = [p, *(q for q in rows if step.meets(p, q))]
            of_image = [scale * images[p] @ texts[q] for q in kept]
            of_text = [scale * texts[p] @ images[q] for q in kept]
            for q in rows:
                if q == p or (scope == "global" and step.group_ids[q] == step.group_ids[p]):
                    for number in range(num):
                        if step.extras["has_edit"][q, number]:
                            text = step.features[f"edited_features_{number}"][q]
                            of_image.append(scale * images[p] @ text)
            for logits in (of_image, of_text):
                total = total + torch.stack(logits).exp().sum().log() - logits[0]
        return total / (2 * len(images))

    return loop


def at_widths(widths: Sequence[int], make: Callable[[], Loop]) -> Callable[[], Loop]:
    """The mean over widths of a loss of the first so many numbers of the features, of unit
    length."""

    def loop(step: Step) -> Tensor:
        losses = []
        for width in widths:
            features = {
                name: functional.normalize(each[:, :width], dim=1) if "_features" in name else each
                for name, each in step.features.items()
            }
            losses.append(make()(replace(step, features=features)))
        return torch.stack(losses).mean()

    return lambda: loop


def hard(beta: float, tau_plus: float) -> Callable[..., Tensor]:
    return lambda row, scale: hard_negatives(row, scale, beta, tau_plus)


def sigmoid(step: Step) -> Tensor:
    """SigLIP's Eq. 1 of the pairs that count."""
    image, own = step.features["image_features"], step.objective
    other = step.features[own.other]
    scale = step.features["logit_scale"] if own.log_scale is None else own.log_scale[0].exp()
    bias = step.features["logit_bias"] if own.bias is None else own.bias[0]
    total = torch.zeros((), dtype=torch.float64)
    positives = own.near is not None and own.near.role == "positives"
    for i in range(len(image)):
        for j in range(len(image)):
            weight = 1.0 if i == j else step.weight(i, j)
            if i == j or (step.group_ids[i] == step.group_ids[j] and (positives or weight is None)):
                logit, target = scale * image[i] @ other[j] + bias, weight or 0.0
                total = total + target * torch.log1p(torch.exp(-logit))
                total = total + (1.0 - target) * torch.log1p(torch.exp(logit))
    return total / len(image)


def class_centers(step: Step) -> Tensor:
    """MLCD's Eq. 4 to 6 of the classes that the rule takes for negatives."""
    centers = step.objective.centers
    rows = centers.rows.clone().requires_grad_()
    labels = step.classes
    positives = {c for c in labels.flatten().tolist() if c >= 0}
    if step.objective.kind == "single_label":
        positives = {c for c in labels[:, 0].tolist() if c >= 0}
    drawn = range(NUM_CLASSES) if centers.draw is None else centers.draw(step.number).tolist()
    others = [j for j in drawn if j not in positives]
    negatives = {
        "two_path": drawn,
        "exclude_positives": others,
        "partial_fc": [*positives, *others[: max(len(drawn) - len(positives), 0)]],
    }[centers.rule]

    def gradient() -> Tensor:
        whole = torch.zeros_like(rows)
        whole[centers.touched] = centers.grad
        return whole

    step.found.append((rows, gradient))
    how = step.objective
    features = step.features["image_features"]
    return dense_loss(how.kind, rows, features, labels, negatives, how.scale, how.margin)


class QueuedKeys:
    """MoCo's Algorithm 1 with a list for the queue; keys moved by ``epsilon`` (IFM-MoCo-v2)."""

    def __init__(self, size: int, tau: float, epsilon: float = 0.0, plain: float = 1.0) -> None:
        self.size, self.tau, self.epsilon, self.plain = size, tau, epsilon, plain
        self.entries: list[tuple[Tensor, int, int, int]] = []

    def __call__(self, step: Step) -> Tensor:
        queries, keys = step.features["image_features"], step.features["keys"].detach()
        marks = list(zip(step.group_ids.tolist(), step.sample_id.tolist(), strict=True))
        total = torch.zeros((), dtype=torch.float64)
        for query, key, (label, sample_id) in zip(queries, keys, marks, strict=True):
            own = query @ key / self.tau
            negatives = [
                query @ other / self.tau
                for other, group, sample, length in self.entries
                if (length, group) == (step.prefix_length, label) and sample != sample_id
            ]
            moved_by = self.epsilon / self.tau
            for weight, moved in ((self.plain, 0.0), (1.0 - self.plain, moved_by)):
                logits = [own - moved, *(each + moved for each in negatives)]
                total = total + weight * (torch.stack(logits).exp().sum().log() - logits[0])
        new = [(key, *mark, step.prefix_length) for key, mark in zip(keys, marks, strict=True)]
        self.entries = [*self.entries, *new][-self.size :]
        return total / len(queries)


def batch_keys(tau: float, epsilon: float = 0.0, plain: float = 1.0) -> Loop:
    """MoCo-v3's Algorithm 1: 2 tau (ctr(q1, k2) + ctr(q2, k1))."""

    def loop(step: Step) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for view, others in (("image_features", "keys_1"), ("image_features_1", "keys")):
            queries = functional.normalize(step.objective.predictor(step.features[view]), dim=-1)
            cosines = queries @ step.features[others].T
            for p in range(len(cosines)):
                kept = [cosines[p, q] for q in range(len(cosines)) if step.meets(p, q)]
                for weight, moved in ((plain, 0.0), (1.0 - plain, epsilon)):
                    logits = torch.stack([cosines[p, p] - moved, *(c + moved for c in kept)]) / tau
                    total = total + weight * (logits.exp().sum().log() - logits[0])
        return 2 * tau * total / len(step.group_ids)

    return loop


def simlap(pairs: Any, temperature: Any, code: bool = False, penalty: float = 0.0) -> Loop:
    """Algorithm 1 with the gates of Eq. 2: the mean over rows that have a positive."""

    def loop(step: Step) -> Tensor:
        module, y1, ids = step.objective, step.classes[:, 0], step.sample_id
        added = 0.0  # by the batch norms' statistics of now: the filter's next call moves them
        if penalty:
            added = penalty * gate_penalty(module.filter.of_classes(), "bernoulli")
        key = mix(SEED, step.number)
        y2 = torch.tensor(draw_partners(y1.numpy(), ids.numpy(), key, pairs))
        gates = torch.ones_like(step.features["image_features"])  # open
        if module.filter is not None:
            gates = module.filter(y1, y2.clamp_min(0))
        terms = []
        names = ("image_features", "image_features_1"), ("keys", "keys_1")
        own, others = names[0], names["keys" in step.features]
        for view in range(2):
            z, k = step.features[own[view]], step.features[others[1 - view]]
            if module.norm is not None:
                z, k = (module.norm(functional.normalize(x) * x.shape[1] ** 0.5) for x in (z, k))
            k = k.detach() if "keys" in step.features else k
            for p in range(len(z)):
                left, right = z[p] * gates[p], k * gates[p]
                scores = functional.cosine_similarity(left[None], right, dim=1)
                if code:
                    scores = (left * right).sum(dim=1) / (z[p].norm() * k.norm(dim=1))
                scores = (scores * step.scale(temperature)).exp()
                same_group = step.group_ids == step.group_ids[p]
                negatives = scores[same_group & (y1 != y1[p]) & (y1 != y2[p])].sum()
                positives = scores[same_group & (y1 == y2[p]) & (ids != ids[p])]
                if len(positives):
                    terms.append(-(positives / (positives + negatives)).log().mean())
        loss = torch.stack(terms).mean() if terms else 0.0 * step.features[own[0]].sum()
        return loss + added

    return loop


def toy_momentum(step: Step) -> Tensor:
    losses = []
    for query, key in zip(step.features["image_features"], step.features["keys"], strict=True):
        others = [key, *step.objective.queue.clone()]
        logits = torch.stack([query @ other / 0.2 for other in others])
        losses.append(logits.exp().sum().log() - logits[0])
    return torch.stack(losses).mean()


def toy_prototypes(step: Step) -> Tensor:
    rows, losses = step.objective.prototypes.rows, []
    for feature, label in zip(step.features["image_features"], step.classes[:, 0], strict=True):
        logits = torch.stack([4.0 * feature @ row for row in rows])
        losses.append(logits.exp().sum().log() - logits[label])
    return torch.stack(losses).mean()


def distilled(
    what: str, other: str = "text_features", *, prefix: str = "base_", temperature: Any = None,
    views: int = 1, end: float = 1.0, exact: str = "", squared: bool = False,
) -> Callable[[], Loop]:  # fmt: skip
    """The distance from the teacher, whose features are named by ``prefix``; ``exact``: that of the
    pictures that it sees in the step. The model of ``Towers`` and the teacher of the contract have
    the logit scale exp(1.5)."""
    scale = math.exp(1.5) if temperature is None else 1.0 / temperature

    def divergence(wanted: list[Tensor], logits: list[Tensor]) -> Any:
        if not logits:
            return torch.zeros((), dtype=torch.float64)
        shares, own = (torch.stack(each).exp() for each in (wanted, logits))
        shares, own = shares / shares.sum(), own / own.sum()
        return sum(p * (p / q).log() for p, q in zip(shares, own, strict=True))

    def loop(step: Step) -> Tensor:
        # With nothing to compare a loss has a gradient too, of zeros.
        total, num = 0.0 * step.features["image_features"].sum(), len(step.group_ids)
        for image in ("image_features", "image_features_1")[:views]:
            names = [image, *([other] if other != "image_features" else [])]
            own = [step.features[name] for name in names]
            base = [
                step.features[exact + n if exact and n != "text_features" or prefix == exact
                              else prefix + n.removesuffix("_1")]
                for n in names
            ]  # fmt: skip
            if (projection := getattr(step.objective, "projection", None)) is not None:
                own = [torch.stack([projection.weight @ row for row in rows]) for rows in own]
                if not squared:
                    own = [torch.stack([row / row.norm() for row in rows]) for rows in own]
            sides = ((0, 1), (1, 0)) if len(names) == 2 else ((0, 0),)
            for p in range(num):
                if what == "features" and squared:
                    total = total + sum(
                        ((o[p] - b[p]) ** 2).sum() for o, b in zip(own, base, strict=True)
                    )
                    continue
                if what == "features":
                    total = total + sum(1.0 - o[p] @ b[p] for o, b in zip(own, base, strict=True))
                    continue
                for x, y in sides:
                    met = [q for q in range(num) if step.meets(p, q) or (q == p and x != y)]
                    wanted, logits = (
                        [scale * side[x][p] @ side[y][q] for q in met] for side in (base, own)
                    )
                    total = total + divergence(wanted, logits) / len(sides)
        return total / (num * views) * (1.0 + (end - 1.0) * step.number / 3)

    return lambda: loop


def weighted(*terms: tuple[float, Callable[[], Loop]]) -> Callable[[], Loop]:
    def made() -> Loop:
        loops = [(weight, factory()) for weight, factory in terms]

        def loop(step: Step) -> Tensor:
            parts = zip(step.objective.terms, loops, strict=True)
            losses = [w * each(replace(step, objective=term)) for term, (w, each) in parts]
            return torch.stack(losses).sum()

        return loop

    return made
