"""Every objective written out with plain loops, and the settings that its contract tries.

A loop takes a step's features, which carry the gradient of model and adversary, and returns the
loss of all rows by the paper's formula, one pair at a time.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import ObjectiveOptions, parse
from mclclip.objectives.contrast import DIGESTS
from mclclip.objectives.gated_pairs import draw_partners, gate_penalty
from mclclip.randomness import mix
from tests import contrast_loops as contrast
from tests import toys
from tests.slow_heads import dense_loss

SEED, NUM_CLASSES = 3, 5


@dataclass
class Step:
    """A step of one process, as the objective has it."""

    objective: Any
    features: dict[str, Tensor]
    labels: Tensor
    sample_id: Tensor
    classes: Tensor
    prefix_length: int
    number: int
    extras: dict[str, Tensor] = field(default_factory=dict)
    found: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)
    """Leaves of the loop's own, each with the gradient that the objective has for it."""

    @property
    def digests(self) -> tuple[Tensor, ...]:
        """Those of captions and pictures, where they are read."""
        return tuple(self.extras[name] for name in DIGESTS if name in self.extras)

    def meets(self, p: int, q: int) -> bool:
        """Eq. 3 of MCL: the samples have one group, and are two."""
        same_group = bool(self.labels[p] == self.labels[q])
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
    """A contrastive loss by the loss of a row, as ``contrast_loops`` has them."""

    def loop(step: Step) -> Tensor:
        other = "text_features" if between == "captions" else "image_features_1"
        first = step.features["image_features"]
        second = step.features.get(other, first)  # supcon of one view looks at no other
        marks = step.labels, step.sample_id, step.classes[:, 0], step.digests
        batch = contrast.Batch(first, second, torch.ones(()), *marks)
        scale = step.scale(temperature)
        rows = contrast.rows_of(batch, between, num_views)
        return contrast.loss(rows, lambda row: of_row(row, scale))

    return lambda: loop


def modified(epsilon: float, plain: float, changed: float) -> Callable[..., Tensor]:
    """IFM: weights of the plain and of the modified loss."""

    def of_row(row: contrast.Row, scale: Tensor) -> Tensor:
        moved = contrast.modified(row, scale, epsilon)
        return changed * moved + plain * contrast.info_nce(row, scale)

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
                if q == p or (scope == "global" and step.labels[q] == step.labels[p]):
                    for number in range(num):
                        if step.extras["has_edit"][q, number]:
                            text = step.features[f"edited_features_{number}"][q]
                            of_image.append(scale * images[p] @ text)
            for logits in (of_image, of_text):
                total = total + torch.stack(logits).exp().sum().log() - logits[0]
        return total / (2 * len(images))

    return loop


def hard(beta: float, tau_plus: float) -> Callable[..., Tensor]:
    return lambda row, scale: contrast.hard_negatives(row, scale, beta, tau_plus)


def sigmoid(step: Step) -> Tensor:
    """SigLIP's Eq. 1 of the pairs that count."""
    image, own = step.features["image_features"], step.objective
    other = step.features[own.other]
    scale = step.features["logit_scale"] if own.log_scale is None else own.log_scale[0].exp()
    bias = step.features["logit_bias"] if own.bias is None else own.bias[0]
    total = torch.zeros((), dtype=torch.float64)
    positives = own.equal_captions == "positives"
    for i in range(len(image)):
        for j in range(len(image)):
            marks = (step.sample_id, *step.digests)
            equal = any(bool(mark[i] == mark[j]) for mark in marks)
            if i == j or (step.labels[i] == step.labels[j] and (positives or not equal)):
                logit = scale * image[i] @ other[j] + bias
                belong = i == j or equal
                total = total + torch.log1p(torch.exp(-logit if belong else logit))
    return total / len(image)


def class_centers(step: Step) -> Tensor:
    """MLCD's Eq. 4 to 6 of the classes that the rule takes for negatives."""
    centers = step.objective.centers
    rows = centers.rows.clone().requires_grad_()
    labels = step.classes
    positives = {c for c in labels.flatten().tolist() if c >= 0}
    if step.objective.kind == "single_label":
        positives = {c for c in labels[:, 0].tolist() if c >= 0}
    drawn = range(NUM_CLASSES) if centers._draw is None else centers._draw(step.number).tolist()
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
        marks = list(zip(step.labels.tolist(), step.sample_id.tolist(), strict=True))
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
        return 2 * tau * total / len(step.labels)

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
                same_group = step.labels == step.labels[p]
                negatives = scores[same_group & (y1 != y1[p]) & (y1 != y2[p])].sum()
                positives = scores[same_group & (y1 == y2[p]) & (ids != ids[p])]
                if len(positives):
                    terms.append(-(positives / (positives + negatives)).log().mean())
        loss = torch.stack(terms).mean() if terms else 0.0 * step.features[own[0]].sum()
        return loss + added

    return loop


def two_views_without_a_mask(step: Step) -> Tensor:
    """The toy's NT-Xent at 0.5: all other images are negatives."""
    every = torch.cat([step.features["image_features"], step.features["image_features_1"]])
    count, losses = len(every), []
    for p in range(count):
        logits = [every[p] @ every[q] / 0.5 for q in range(count) if q != p]
        own = every[p] @ every[(p + count // 2) % count] / 0.5
        losses.append(torch.stack(logits).exp().sum().log() - own)
    return torch.stack(losses).mean()


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


def toy_alignment(step: Step) -> Tensor:
    pairs = zip(step.features["image_features"], step.features["text_features"], strict=True)
    return torch.stack([1.0 - image @ text for image, text in pairs]).mean()


def preserved(
    what: str, other: str = "text_features", *, prefix: str = "base", temperature: Any = None,
    views: int = 1, end: float = 1.0,
) -> Callable[[], Loop]:  # fmt: skip
    """The distance from the base; the model of ``Towers`` had the logit scale exp(1.5)."""
    scale = math.exp(1.5) if temperature is None else 1.0 / temperature

    def divergence(wanted: list[Tensor], logits: list[Tensor]) -> Any:
        if not logits:
            return torch.zeros((), dtype=torch.float64)
        shares, own = (torch.stack(each).exp() for each in (wanted, logits))
        shares, own = shares / shares.sum(), own / own.sum()
        return sum(p * (p / q).log() for p, q in zip(shares, own, strict=True))

    def loop(step: Step) -> Tensor:
        # With nothing to compare a loss has a gradient too, of zeros.
        total, num = 0.0 * step.features["image_features"].sum(), len(step.labels)
        for image in ("image_features", "image_features_1")[:views]:
            names = [image, *([other] if other != "image_features" else [])]
            own = [step.features[name] for name in names]
            base = [
                step.features[f"{prefix}_{n.removesuffix('_1') if prefix == 'base' else n}"]
                for n in names
            ]
            sides = ((0, 1), (1, 0)) if len(names) == 2 else ((0, 0),)
            for p in range(num):
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


# --- the settings ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Settings of an objective, and what makes its loop (the loop may remember earlier steps).

    ``cached``: gradients can be computed in micro-batches, which trained batch norms forbid, and
    parameters outside whose gradient is autograd's alone.
    ``zero``: DeepSpeed runs it; ``resnet``: its model has batch norms; ``coupled``: any sample
    influences any other across groups, as by batch norms of its own or a mean over the batch;
    ``frozen_text``: the text tower is locked; ``autocast``: under autocast it is computed in bf16,
    or a network of its own is, where all other objectives are computed in fp32.
    """

    settings: dict[str, Any]
    loop: Callable[[], Loop]
    cached: bool = True
    zero: bool = True
    resnet: bool = False
    coupled: bool = False
    frozen_text: bool = False
    autocast: bool = False

    def options(self) -> ObjectiveOptions:
        return options_of(self.settings)


def options_of(settings: dict[str, Any]) -> ObjectiveOptions:
    """The checked options; those of toys are found by their modules."""
    if settings["kind"] == "weighted_sum":
        terms = [t | {"objective": options_of(t["objective"])} for t in settings["terms"]]
        return parse(settings | {"terms": terms})
    if settings["kind"] in toys.KINDS:
        options: Any = importlib.import_module(toys.KINDS[settings["kind"]]).Options
        made: ObjectiveOptions = options(**settings)
        return made
    return parse(settings)


LEARNABLE = {"learnable": True, "start": 0.3}
HEAD = {"labels_per_sample": 2, "scale": 16.0, "centers": "normal", "sample_rate": 0.6}
SMALL = {"label_dim": 3, "hidden_dim": 4, "temperature": 0.2}
MAKER = {"kind": "feature_dropout", "width": 2, "residual_blocks": 1, "temperature": 0.4}
V3 = {"kind": "moco", "version": "v3", "momentum": 0.7}
CASES: dict[str, Case] = {
    "info_nce": Case({"kind": "info_nce"}, contrastive("captions", contrast.info_nce)),
    "info_nce-learnable": Case(
        {"kind": "info_nce", "temperature": LEARNABLE},
        contrastive("captions", contrast.info_nce, "learnable"),
    ),
    "info_nce-masked": Case(
        {"kind": "info_nce", "equal_captions": "masked"},
        contrastive("captions", contrast.info_nce),
    ),
    "info_nce-positives": Case(
        {"kind": "info_nce", "equal_captions": "positives"},
        contrastive("captions", contrast.info_nce_of_equals),
    ),
    "info_nce-edited": Case({"kind": "info_nce", "hard_captions": {}}, lambda: edited("own", 1)),
    "info_nce-edited_global": Case(
        {"kind": "info_nce", "hard_captions": {"per_caption": 2, "scope": "global"}},
        lambda: edited("global", 2),
    ),
    "nt_xent": Case(
        {"kind": "nt_xent", "temperature": None}, contrastive("views", contrast.info_nce, 0.5)
    ),
    "ifm": Case({"kind": "ifm"}, contrastive("captions", modified(0.1, 0.5, 0.5))),
    "ifm-views": Case(
        {"kind": "ifm", "between": "views", "temperature": LEARNABLE, "epsilon": 0.7, "alpha": 0.5}
        | {"average": "mean"},
        contrastive("views", modified(0.7, 1 / 1.5, 0.5 / 1.5), "learnable"),
    ),
    "ifm-modified": Case(
        {"kind": "ifm", "term": "modified"}, contrastive("captions", modified(0.1, 0.0, 1.0))
    ),
    "hcl": Case(
        {"kind": "hcl", "beta": 2.0, "tau_plus": 0.6}, contrastive("captions", hard(2.0, 0.6))
    ),
    "ifm-masked": Case(
        {"kind": "ifm", "equal_captions": "masked"},
        contrastive("captions", modified(0.1, 0.5, 0.5)),
    ),
    "hcl-masked": Case(
        {"kind": "hcl", "equal_captions": "masked"}, contrastive("captions", hard(1.0, 0.1))
    ),
    "hcl-views": Case(
        {"kind": "hcl", "between": "views", "temperature": LEARNABLE},
        contrastive("views", hard(1.0, 0.1), "learnable"),
    ),
    "hcl-unweighted": Case(
        {"kind": "hcl", "between": "views", "temperature": 0.3, "beta": 0.0, "tau_plus": 0.1},
        contrastive("views", hard(0.0, 0.1), 0.3),
    ),
    "supcon": Case(
        {"kind": "supcon", "attribute": "shape", "temperature": LEARNABLE},
        contrastive("views", contrast.supervised, "learnable"),
    ),
    "supcon-one_view": Case(
        {"kind": "supcon", "num_views": 1, "temperature": 0.5},
        contrastive("views", contrast.supervised, 0.5, num_views=1),
    ),
    "sigmoid": Case({"kind": "sigmoid"}, lambda: sigmoid),
    "sigmoid-masked": Case({"kind": "sigmoid", "equal_captions": "masked"}, lambda: sigmoid),
    "sigmoid-positives": Case({"kind": "sigmoid", "equal_captions": "positives"}, lambda: sigmoid),
    "sigmoid-frozen_text": Case({"kind": "sigmoid"}, lambda: sigmoid, frozen_text=True),
    "sigmoid-views": Case({"kind": "sigmoid", "between": "views"}, lambda: sigmoid),
    "mlcd": Case({"kind": "mlcd", **HEAD}, lambda: class_centers),
    "mlc": Case(
        {"kind": "mlc", "negatives": "partial_fc", "margin": "cos", "lazy": True, **HEAD},
        lambda: class_centers,
    ),
    "mlcd-excluding": Case(
        {"kind": "mlcd", "negatives": "exclude_positives", **HEAD}, lambda: class_centers
    ),
    "single_label": Case(
        {"kind": "single_label", **HEAD, "margin": "none", "sample_rate": 1.0},
        lambda: class_centers,
    ),
    "moco": Case({"kind": "moco", "queue_size": 14, "momentum": 0.7}, lambda: QueuedKeys(14, 0.2)),
    "moco-modified": Case(
        {"kind": "moco", "queue_size": 14, "momentum": 0.7, "epsilon": 0.1},
        lambda: QueuedKeys(14, 0.2, 0.1, 0.5),
        cached=False,
        resnet=True,
    ),
    "moco-v3": Case(V3, lambda: batch_keys(1.0)),
    "moco-v3-predictor": Case(
        V3 | {"predictor": [6, 8], "temperature": 0.4, "epsilon": 0.1, "term": "modified"},
        lambda: batch_keys(0.4, 0.1, 0.0),
        cached=False,
        coupled=True,
        autocast=True,
    ),
    "simlap": Case(
        {"kind": "simlap", **SMALL, "penalty": "bernoulli", "penalty_weight": 0.3},
        lambda: simlap("arbitrary", 0.2, penalty=0.3),
        cached=False,
        autocast=True,
    ),
    "simlap-momentum": Case(
        {"kind": "simlap", **SMALL, "momentum": 0.9, "groups": True, "temperature": LEARNABLE},
        lambda: simlap("arbitrary", "learnable"),
        cached=False,
        autocast=True,
    ),
    "simlap-code": Case(
        {"kind": "simlap", **SMALL, "norm": "none", "score": "code", "pairs": "distinct"},
        lambda: simlap("distinct", 0.2, code=True),
        cached=False,
        autocast=True,
    ),
    "simlap-open": Case(
        {"kind": "simlap", "gates": "open", "pairs": "identical", "temperature": None},
        lambda: simlap("identical", None),
        autocast=True,
    ),
    "feature_dropout": Case(MAKER, contrastive("views", contrast.info_nce, 0.4), autocast=True),
    "feature_dropout-resnet": Case(
        MAKER | {"temperature": LEARNABLE},
        contrastive("views", contrast.info_nce, "learnable"),
        cached=False,
        resnet=True,
        autocast=True,
    ),
    "weighted_sum": Case(
        {
            "kind": "weighted_sum",
            "terms": [
                {"objective": V3 | {"temperature": 0.4}, "weight": 0.25},
                {"objective": {"kind": "nt_xent"}, "weight": 0.75},
            ],
        },
        weighted(
            (0.25, lambda: batch_keys(0.4)), (0.75, contrastive("views", contrast.info_nce, 0.5))
        ),
    ),
    "weighted_sum-toy": Case(
        {
            "kind": "weighted_sum",
            "terms": [
                {"objective": {"kind": "info_nce"}, "weight": 0.7},
                {"objective": {"kind": "toy_alignment"}, "weight": 0.3},
            ],
        },
        weighted((0.7, contrastive("captions", contrast.info_nce)), (0.3, lambda: toy_alignment)),
    ),
    "weighted_sum-equal_captions": Case(
        {
            "kind": "weighted_sum",
            "terms": [
                {"objective": {"kind": "info_nce", "equal_captions": "positives"}, "weight": 0.7},
                {"objective": {"kind": "hcl", "equal_captions": "masked"}, "weight": 0.3},
            ],
        },
        weighted(
            (0.7, contrastive("captions", contrast.info_nce_of_equals)),
            (0.3, contrastive("captions", hard(1.0, 0.1))),
        ),
    ),
    "preserve": Case({"kind": "preserve"}, preserved("similarities")),
    "preserve-images": Case(
        {"kind": "preserve", "between": "images", "temperature": 0.3, "num_views": 2}
        | {"end_factor": 0.25},
        preserved("similarities", "image_features", temperature=0.3, views=2, end=0.25),
    ),
    "preserve-features": Case(
        {"kind": "preserve", "what": "features", "end_factor": 3.0},
        preserved("features", end=3.0),
    ),
    "preserve-exact": Case(
        {
            "kind": "weighted_sum",
            "terms": [
                {"objective": {"kind": "info_nce"}},
                {"objective": {"kind": "preserve", "exact": True}, "weight": 0.5},
                {"objective": {"kind": "preserve", "exact": True, "what": "features"}},
            ],
        },
        weighted(
            (1.0, contrastive("captions", contrast.info_nce)),
            (0.5, preserved("similarities", prefix="copied")),
            (1.0, preserved("features", prefix="copied")),
        ),
    ),
    "weighted_sum-edited": Case(
        {
            "kind": "weighted_sum",
            "terms": [
                {"objective": {"kind": "info_nce", "hard_captions": {}}, "weight": 0.7},
                {"objective": {"kind": "hcl"}, "weight": 0.3},
            ],
        },
        weighted((0.7, lambda: edited("own", 1)), (0.3, contrastive("captions", hard(1.0, 0.1)))),
    ),
    "toy_two_views": Case(
        {"kind": "toy_two_views"}, lambda: two_views_without_a_mask, autocast=True
    ),
    "toy_momentum": Case({"kind": "toy_momentum"}, lambda: toy_momentum, zero=False, autocast=True),
    "toy_adversary": Case({"kind": "toy_adversary"}, contrastive("captions", contrast.info_nce)),
    "toy_prototypes": Case(
        {"kind": "toy_prototypes"}, lambda: toy_prototypes, cached=False, autocast=True
    ),
}
