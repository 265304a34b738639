"""Logistic regression beside scikit-learn's own models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from mclclip.eval import logistic


def noisy_classes(count: int, num_classes: int = 4, seed: int = 0) -> tuple[Any, Any]:
    """Unit rows [N, 9] around a direction per class, which overlap; labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, count)
    rows = np.eye(9)[labels] + rng.normal(scale=0.5, size=(count, 9))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.mark.parametrize("count, num_classes, block", [(17, 3, 7), (200, 2, 100_000), (400, 9, 70)])
@pytest.mark.parametrize("strength", [1e-2, 100.0])
def test_it_finds_the_minimum_of_another_solver(
    monkeypatch: pytest.MonkeyPatch, strength: float, count: int, num_classes: int, block: int
) -> None:
    """newton-cg finds it by second derivatives. Unit rows under strength / 9 are the same problem
    as rows of length 3 under strength. Rows need not divide into blocks."""
    monkeypatch.setattr(logistic, "ROWS", block)
    train, labels = noisy_classes(count, num_classes)
    test, _ = noisy_classes(300, num_classes, seed=1)
    reference = LogisticRegression(C=9 / strength, solver="newton-cg", tol=1e-10, max_iter=1000)
    reference.fit(train.astype(np.float64), 10 * labels)
    fitted = logistic.fit(train, 10 * labels, strength)
    assert fitted.converged and fitted.weight.shape == (num_classes, 9)
    logits = test @ fitted.weight.T + fitted.bias
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, reference.predict_proba(test), atol=2e-3)
    assert np.array_equal(10 * logits.argmax(axis=1), fitted.predict(test))


def test_many_classes_are_learnt_to_the_end() -> None:
    """With 200 classes scikit-learn's own tolerance stops too early, as do rows of length 1."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(200), 4)
    classes = np.repeat(rng.normal(size=(200, 32)), 4, axis=0)
    train, test = (classes + rng.normal(scale=0.8, size=(800, 32)) for _ in range(2))
    train, test = (
        (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        for rows in (train, test)
    )
    reference = LogisticRegression(C=100 * 32, tol=1e-9, max_iter=10_000).fit(train, labels)
    fitted = logistic.fit(train, labels, 0.01)
    assert np.array_equal(fitted.predict(test), reference.predict(test))


def test_a_common_mean_does_not_slow_the_solver_down() -> None:
    """Features of CLIP lie in a narrow cone; the free bias makes their mean irrelevant. Here the
    solver takes some 80 steps, and 185 where the mean is left in."""
    train, labels = noisy_classes(200)
    narrow = train + np.float32(5)
    narrow /= np.linalg.norm(narrow, axis=1, keepdims=True)
    assert logistic.fit(narrow, labels, 1e-2, 130).converged


def test_a_fit_that_ends_too_early_has_a_gradient() -> None:
    train, labels = noisy_classes(200)
    fitted = logistic.fit(train, labels, 1e-4, 2)
    assert not fitted.converged and 1e-4 < fitted.gradient < 1
