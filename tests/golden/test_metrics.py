"""Metric maths against independent implementations: scipy, scikit-learn and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    balanced_accuracy_score,
    label_ranking_loss,
    precision_recall_curve,
    roc_auc_score,
)

from mclclip.eval import metrics
from mclclip.eval.outcomes import Outcomes


@pytest.mark.parametrize("hits, count", [(0, 15), (15, 15), (27, 135), (9, 10**6)])
def test_wilson_interval_equals_scipy(hits: int, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    theirs = stats.binomtest(hits, count).proportion_ci(method="wilson")
    assert metrics.wilson_interval(hits, count) == pytest.approx((theirs.low, theirs.high))


def test_mean_per_class_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, guesses = rng.integers(0, 9, 300), rng.integers(0, 9, 300)
    right = Outcomes([*map(str, range(300))], labels == guesses, [*map(str, labels)])
    assert right.value() == pytest.approx(balanced_accuracy_score(labels, guesses))


@pytest.mark.parametrize("k", [1, 5, 10])
def test_recall_equals_topk_with_several_positives(k: int) -> None:
    """clip-benchmark's rule (any positive among torch's top k), where there are no ties."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(60, 150, generator=generator)
    positive = torch.rand(60, 150, generator=generator) < 0.05
    positive[torch.arange(60), torch.arange(60)] = True
    top = scores.topk(k, dim=1).indices
    wanted = positive.gather(1, top).any(dim=1).float().mean().item()
    strict, optimistic = metrics.ranks_with_ties(scores.numpy(), positive.numpy())
    assert (strict <= k).mean() == pytest.approx(wanted)
    assert np.array_equal(strict, optimistic)


def test_ranks_agree_with_scikit_learn_ranking_loss() -> None:
    """With one positive the ranking loss is the share of wrong candidates not below it."""
    rng = np.random.default_rng(4)
    scores = rng.integers(0, 5, (50, 7)).astype(np.float64)  # many ties
    positive = np.eye(7, dtype=bool)[rng.integers(0, 7, 50)]
    strict, _ = metrics.ranks_with_ties(scores, positive)
    assert np.mean((strict - 1) / 6) == pytest.approx(label_ranking_loss(positive, scores))


def test_pair_margins_equal_a_softmax_over_two() -> None:
    """MMVP-VLM's own words: softmax over the pair's images per statement, the larger half wins."""
    generator = torch.Generator().manual_seed(5)
    cosines = torch.rand(400, 2, 2, generator=generator) * 0.02 + 0.2
    chances = (100 * cosines).softmax(dim=2)
    picks = torch.where(chances[:, :, 0] > 0.5, 0, 1)
    wanted = (picks == torch.tensor([0, 1])).all(dim=1)
    right = (metrics.match_margins(cosines.numpy(), np.eye(2, dtype=bool)) > 0).all(axis=1)
    assert np.array_equal(right, wanted.numpy())
    assert 0.15 < right.mean() < 0.35


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_roc_equals_scikit_learns(ties: bool) -> None:
    rng = np.random.default_rng(6)
    truth, scores = rng.random(300) < 0.4, rng.normal(size=300).round(1 if ties else 9)
    weights = rng.integers(0, 3, 300)
    wanted = roc_auc_score(truth, scores, sample_weight=weights)
    ranking = metrics.Ranking(scores, truth)
    found = ranking.area(weights, ties=0.5)
    assert found == pytest.approx(wanted)
    strict = ranking.area(weights)
    assert strict < found if ties else strict == pytest.approx(wanted)


def test_precision_at_11_recalls_from_scikit_learns_curve() -> None:
    rng = np.random.default_rng(7)
    truth, scores = rng.random(400) < 0.2, rng.normal(size=400).round(1)
    precision, recall, _ = precision_recall_curve(truth, scores)
    levels = [precision[recall >= level / 10 - 1e-9].max() for level in range(11)]
    # The curve ends with the point (precision 1, recall 0), which no item stands for.
    levels[0] = precision[:-1].max()
    assert metrics.Ranking(scores, truth).precision(np.ones(len(truth))) == pytest.approx(
        np.mean(levels)
    )
