"""MoCo-v2 and v3: the papers written out with loops; queue, mask, resume, refusals."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip import config
from mclclip.objectives.base import Setting, parse
from mclclip.objectives.moco import BatchKeys, QueuedKeys, predictor_of
from mclclip.objectives.momentum import MomentumCopy
from mclclip.ranks.process_group import SINGLE

BATCH, DIM, STEPS = 4, 5, 7


class Model(nn.Module):
    """One linear layer; features of unit length."""

    feature_dim = DIM

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(DIM, 6, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight)

    def forward(self, image: Tensor, text: Any = None, text_features: Any = None) -> Any:
        return {"image_features": functional.normalize(image @ self.weight.T, dim=-1)}


def batch_of(step: int, groups: int = 2, repeats: bool = True) -> Any:
    """Two views of four samples; some batches are masked at another prefix length."""
    generator = torch.Generator().manual_seed(step)
    views = [torch.randn(BATCH, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    ids = torch.randint(0, 12 if repeats else 10**9, (BATCH,), generator=generator)
    return SimpleNamespace(
        views=views,
        labels=torch.randint(0, groups, (BATCH, 1), generator=generator),
        sample_id=ids,
        prefix_length=1 if step % 3 else 2,
        text=None,
        text_features=None,
    )


def built(tree: dict[str, Any]) -> tuple[Model, Any]:
    model = Model()
    options = parse({"kind": "moco", **tree})
    setting = Setting(model=model, context=SINGLE, seed=3, precision="float64")
    return model, options.build(setting)


def step_of(
    model: Model, objective: Any, batch: Any, step: int, lr: float = 0.3
) -> dict[str, Tensor]:
    """One step of SGD, as the loop makes it."""
    objective.begin(step, STEPS, 0.0)
    features = objective.features(model, batch)
    parts: dict[str, Tensor] = objective(
        **features, labels=batch.labels, sample_id=batch.sample_id, classes=None
    )
    trained = [model.weight, *(p for p in objective.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(parts["loss"], trained)
    with torch.no_grad():
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.sub_(lr * gradient)
    objective.stepped(model)
    return parts | {"gradient": gradients[0]}


# --- v2, written out ---------------------------------------------------------------------------


class SlowQueue:
    """MoCo's Algorithm 1 with a list for the queue, and MCL's Eq. 3 pair by pair; with ``epsilon``
    IFM's mean of the loss and that of moved keys, or by ``weights`` one of them."""

    def __init__(
        self,
        size: int,
        momentum: float,
        tau: float,
        epsilon: float = 0.0,
        weights: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        self.epsilon, self.weights = epsilon, weights
        self.weight = Model().weight.detach().clone().requires_grad_()
        self.copy = self.weight.detach().clone()
        self.size, self.momentum, self.tau = size, momentum, tau
        self.entries: list[tuple[Tensor, int, int, int]] = []

    def step(self, batch: Any, lr: float = 0.3) -> tuple[Tensor, int, Tensor]:
        queries = functional.normalize(batch.views[0] @ self.weight.T, dim=-1)
        keys = functional.normalize(batch.views[1] @ self.copy.T, dim=-1)
        total, alone = torch.zeros((), dtype=torch.float64), 0
        for row in range(BATCH):
            own = queries[row] @ keys[row] / self.tau
            negatives = [
                queries[row] @ key / self.tau
                for key, group, sample, length in self.entries
                if length == batch.prefix_length
                and group == int(batch.labels[row])
                and sample != int(batch.sample_id[row])
            ]
            alone += not negatives
            for weight, moved in zip(self.weights, (0.0, self.epsilon / self.tau), strict=True):
                logits = [own - moved, *(each + moved for each in negatives)]
                own_loss = torch.stack(logits).exp().sum().log() - logits[0]
                total = total + weight * own_loss
        loss = total / BATCH
        (gradient,) = torch.autograd.grad(loss, self.weight)
        with torch.no_grad():
            self.weight.sub_(lr * gradient)
            self.copy = self.momentum * self.copy + (1 - self.momentum) * self.weight
        for row in range(BATCH):
            entry = keys[row], int(batch.labels[row]), int(batch.sample_id[row])
            self.entries.append((*entry, batch.prefix_length))
        self.entries = self.entries[-self.size :]
        return loss.detach(), alone, gradient


@pytest.mark.parametrize("queue_size", [4, 6, 12, 100])
@pytest.mark.parametrize("groups", [1, 3])
def test_v2_is_the_definition(queue_size: int, groups: int) -> None:
    """Also where the queue is no multiple of the batch, not yet full, and full many times."""
    model, objective = built({"queue_size": queue_size, "momentum": 0.8})
    slow = SlowQueue(queue_size, 0.8, tau=0.2)
    alone = []
    for step in range(STEPS):
        batch = batch_of(step, groups)
        found = step_of(model, objective, batch, step)
        loss, count, gradient = slow.step(batch)
        torch.testing.assert_close(found["loss"].detach(), loss, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found["gradient"], gradient, atol=1e-12, rtol=1e-12)
        assert int(found["rows_without_negatives"]) == count
        alone.append(count)
    assert alone[0] == BATCH  # the queue starts empty
    assert min(alone) < BATCH
    kept = torch.stack([entry[0] for entry in slow.entries])
    order = (torch.arange(queue_size) + objective.position) % queue_size  # oldest first
    filled = objective.queue_prefix_lengths[order] >= 0
    torch.testing.assert_close(objective.queue[order][filled], kept, atol=1e-12, rtol=0)
    assert filled.sum() == len(kept)


@pytest.mark.parametrize(("term", "weights"), [("both", (0.5, 0.5)), ("modified", (0.0, 1.0))])
def test_v2_with_modified_keys_is_the_definition(term: str, weights: tuple[float, float]) -> None:
    """IFM-MoCo-v2: the own key moved away by epsilon, and every negative of the queue nearer."""
    model, objective = built({"queue_size": 6, "momentum": 0.8, "epsilon": 0.1, "term": term})
    slow = SlowQueue(6, 0.8, 0.2, 0.1, weights)
    plain, silent = [], 0
    for step in range(STEPS):
        batch = batch_of(step, groups=2)
        found = step_of(model, objective, batch, step)
        loss, count, gradient = slow.step(batch)
        torch.testing.assert_close(found["loss"].detach(), loss, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found["gradient"], gradient, atol=1e-12, rtol=1e-12)
        assert int(found["rows_without_negatives"]) == count
        plain.append(float(loss))
        silent += count == BATCH
    assert silent and plain[0] == 0.0 < max(plain)


def test_v3_with_modified_keys_is_the_definition() -> None:
    model, objective = built({"version": "v3", "temperature": 0.4, "epsilon": 0.1})
    batch = batch_of(0, groups=1, repeats=False)
    features = objective.features(model, batch)
    own, expected = torch.arange(BATCH), torch.zeros((), dtype=torch.float64)
    for queries, keys in (("image_features", "keys_1"), ("image_features_1", "keys")):
        cosines = features[queries] @ features[keys].T
        for moved in (cosines, cosines + 0.1 - 0.2 * torch.eye(BATCH, dtype=torch.float64)):
            expected = expected + functional.cross_entropy(moved / 0.4, own) / 2
    found = objective(**features, labels=batch.labels, sample_id=batch.sample_id)
    torch.testing.assert_close(found["loss"], 2 * 0.4 * expected)


def test_a_modified_term_alone_wants_an_epsilon() -> None:
    with pytest.raises(ValueError, match="term=modified with epsilon=0 modifies nothing"):
        parse({"kind": "moco", "term": "modified"})


def test_v2_without_a_mask_is_the_cross_entropy_of_moco() -> None:
    model, objective = built({"queue_size": 8, "momentum": 0.9})
    for step in (1, 2):
        step_of(model, objective, batch_of(step, groups=1, repeats=False), step)
    batch = batch_of(4, groups=1, repeats=False)
    queue = objective.queue.clone()
    features = objective.features(model, batch)
    queries, keys = features["image_features"], features["keys"]
    logits = torch.cat([(queries * keys).sum(dim=1, keepdim=True), queries @ queue.T], 1) / 0.2
    expected = functional.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.int64))
    found = objective(**features, labels=batch.labels, sample_id=batch.sample_id)
    torch.testing.assert_close(found["loss"], expected)


def test_v2_keys_of_another_group_or_length_have_no_influence() -> None:
    model, objective = built({"queue_size": 8})
    step_of(model, objective, batch_of(1, groups=1, repeats=False), 1)
    batch = batch_of(2, groups=1, repeats=False)

    def loss(**changed: Any) -> dict[str, Tensor]:
        given = SimpleNamespace(**(vars(batch) | changed))
        features = objective.features(model, given)
        found: dict[str, Tensor] = objective(
            **features, labels=given.labels, sample_id=given.sample_id
        )
        return found

    assert loss()["loss"] > 0
    for changed in ({"labels": batch.labels + 5}, {"prefix_length": 0}):
        found = loss(**changed)
        assert (found["loss"].item(), int(found["rows_without_negatives"])) == (0.0, BATCH)
        assert torch.equal(
            torch.autograd.grad(found["loss"], model.weight)[0], torch.zeros_like(model.weight)
        )


# --- v3, written out ---------------------------------------------------------------------------


def slow_symmetric(
    queries: list[Tensor], keys: list[Tensor], batch: Any, tau: float
) -> tuple[Tensor, int]:
    """MoCo-v3's Algorithm 1, pair by pair: 2 tau (ctr(q1, k2) + ctr(q2, k1))."""
    total, alone = torch.zeros((), dtype=torch.float64), 0
    for view in range(2):
        for row in range(BATCH):
            own = queries[view][row] @ keys[1 - view][row] / tau
            kept = [
                queries[view][row] @ keys[1 - view][other] / tau
                for other in range(BATCH)
                if batch.labels[other] == batch.labels[row]
                and batch.sample_id[other] != batch.sample_id[row]
            ]
            alone += view == 0 and not kept
            total = total - own + torch.stack([own, *kept]).exp().sum().log()
    return 2 * tau * total / BATCH, alone


@pytest.mark.parametrize("predictor", [None, [7, DIM]])
@pytest.mark.parametrize("groups", [1, 3])
def test_v3_is_the_definition(groups: int, predictor: list[int] | None) -> None:
    tree = {"version": "v3", "momentum": 0.7, "temperature": 0.4, "predictor": predictor}
    model, objective = built(tree)
    for step in range(STEPS):
        batch = batch_of(step, groups)
        slow, copied = copy.deepcopy(model), copy.deepcopy(objective)
        queries = [slow(image=view)["image_features"] for view in batch.views]
        queries = [functional.normalize(copied.predictor(q), dim=-1) for q in queries]
        keys = [copied.copy(view) for view in batch.views]
        loss, alone = slow_symmetric(queries, keys, batch, 0.4)
        (gradient,) = torch.autograd.grad(loss, slow.weight)
        found = step_of(model, objective, batch, step)
        torch.testing.assert_close(found["loss"].detach(), loss.detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found["gradient"], gradient, atol=1e-12, rtol=1e-12)
        assert int(found["rows_without_negatives"]) == alone


def test_v3_without_a_mask_is_the_cross_entropy_of_moco_v3() -> None:
    model, objective = built({"version": "v3"})
    batch = batch_of(0, groups=1, repeats=False)
    features = objective.features(model, batch)
    own = torch.arange(BATCH)
    expected = 2.0 * sum(
        functional.cross_entropy(features[q] @ features[k].T, own)
        for q, k in (("image_features", "keys_1"), ("image_features_1", "keys"))
    )
    found = objective(**features, labels=batch.labels, sample_id=batch.sample_id)
    torch.testing.assert_close(found["loss"], expected)


def test_the_predictor_is_drawn_by_the_seed() -> None:
    tree = {"version": "v3", "predictor": [16, DIM]}
    torch.manual_seed(0)
    _, one = built(tree)
    state = torch.random.get_rng_state()
    _, other = built(tree)
    assert torch.equal(torch.random.get_rng_state(), state)
    for mine, theirs in zip(one.predictor.parameters(), other.predictor.parameters(), strict=True):
        assert mine.requires_grad and torch.equal(mine, theirs)
    kinds = [type(layer).__name__ for layer in one.predictor]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [p.shape for p in predictor_of(3, [4, 2])[-1].parameters()] == []


# --- both --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {"queue_size": 6},
        {"queue_size": 8, "momentum_schedule": "cosine"},
        {"version": "v3", "predictor": [7, DIM]},
    ],
    ids=str,
)
def test_a_saved_state_goes_on_bit_for_bit(tree: dict[str, Any]) -> None:
    """Queue, position, copy and predictor come back from the state dict of the objective."""
    model, objective = built(tree)
    for step in range(4):
        step_of(model, objective, batch_of(step), step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "objective": objective.state_dict()}, file)
    rest = [step_of(model, objective, batch_of(step), step) for step in range(4, STEPS)]

    other_model, other = built(tree)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other_model.load_state_dict(saved["model"])
    other.load_state_dict(saved["objective"])
    again = [step_of(other_model, other, batch_of(step), step) for step in range(4, STEPS)]
    for one, two in zip(rest, again, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    for name, value in objective.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_defaults_are_those_of_the_papers() -> None:
    _, v2 = built({})
    _, v3 = built({"version": "v3"})
    assert isinstance(v2, QueuedKeys) and isinstance(v3, BatchKeys)
    assert (len(v2.queue), v2.row_loss.temperature, v2.copy.base) == (65_536, 0.2, 0.999)
    assert (v3.row_loss.temperature, v3.copy.base) == (1.0, 0.99)
    assert (v2.copy.schedule, v3.copy.schedule) == ("constant", "cosine")


def test_a_queue_smaller_than_the_batches_that_come_is_refused() -> None:
    model, objective = built({"queue_size": BATCH - 1})
    with pytest.raises(ValueError, match="queue_size=3 is less than global_batch=4"):
        step_of(model, objective, batch_of(0), 0)


def test_zero_3_is_refused() -> None:
    tree: dict[str, Any] = {"run_dir": "x", "train": {"objective": {"kind": "moco"}}}
    for stage in (1, 2):
        tree["train"]["engine"] = {"name": "deepspeed", "zero_stage": stage}
        config.from_tree(tree)
    tree["train"]["engine"] = {"name": "deepspeed", "zero_stage": 3}
    with pytest.raises(ValueError, match="engine.zero_stage=3 shares out the parameters"):
        config.from_tree(tree)


def test_a_queue_smaller_than_a_batch_is_refused_before_the_run() -> None:
    objective = {"kind": "moco", "queue_size": 100}
    tree = {"run_dir": "x", "train": {"objective": objective, "global_batch": 128}}
    with pytest.raises(ValueError, match="queue_size=100 is less than global_batch=128"):
        config.from_tree(tree)


def test_options_that_belong_to_the_other_version_are_refused() -> None:
    with pytest.raises(ValueError, match="predictor belongs to version=v3"):
        parse({"kind": "moco", "predictor": [4, 4]})
    with pytest.raises(ValueError, match="queue_size belongs to version=v2"):
        parse({"kind": "moco", "version": "v3", "queue_size": 4})
    with pytest.raises(ValueError, match="predictor ends in 4, but the model's features have 5"):
        built({"version": "v3", "predictor": [4, 4]})


def test_momentum_of_a_step_is_that_of_the_schedule() -> None:
    copied = MomentumCopy(Model(), 0.5, "cosine")
    copied.begin(STEPS - 1, STEPS)
    assert copied.momentum == 1.0
