"""Logistic regression by both solvers, beside scikit-learn's own models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from mclclip.eval import logistic
from mclclip.ranks.process_group import SINGLE

SOLVERS: tuple[logistic.Solver, ...] = ("scikit_learn", "torch")


def noisy_classes(count: int, num_classes: int = 4, seed: int = 0) -> tuple[Any, Any]:
    """Unit rows [N, 9] around a direction per class, which overlap; labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, count)
    rows = np.eye(9)[labels] + rng.normal(scale=0.5, size=(count, 9))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


def solve(
    solver: logistic.Solver, train: Any, labels: Any, strength: float, steps: int = 1000
) -> logistic.Classifier:
    [found] = logistic.fit_all(
        SINGLE, train, labels, [strength], solver=solver, max_iterations=steps
    )
    return found


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("strength", [1e-2, 1.0, 100.0])
def test_answers_are_those_of_another_solver(solver: logistic.Solver, strength: float) -> None:
    """newton-cg finds the minimum by second derivatives. Unit rows under strength / 9 are the same
    problem as rows of length 3 under strength."""
    train, labels = noisy_classes(200)
    test, truth = noisy_classes(300, seed=1)
    reference = LogisticRegression(C=9 / strength, solver="newton-cg", tol=1e-10, max_iter=1000)
    wanted = reference.fit(train.astype(np.float64), labels).predict(test)
    found = solve(solver, train, labels, strength)
    assert np.array_equal(found.predict(test), wanted) and found.converged
    assert 0.5 < np.mean(wanted == truth) < 0.95  # neither trivial nor hopeless


@pytest.mark.parametrize("num_classes", [2, 4])
def test_both_solvers_find_the_minimum(num_classes: int) -> None:
    """Shares of classes are those of scikit-learn's own model, of two classes too."""
    train, labels = noisy_classes(200, num_classes)
    test, _ = noisy_classes(300, num_classes, seed=1)
    reference = LogisticRegression(C=9, tol=1e-10, max_iter=1000)
    reference.fit(train.astype(np.float64), 10 * labels)
    for solver in SOLVERS:
        found = solve(solver, train, 10 * labels, 1.0)
        assert found.weight.shape == (num_classes, 9) and found.bias.shape == (num_classes,)
        logits = test @ found.weight.T + found.bias
        assert np.array_equal(10 * logits.argmax(axis=1), found.predict(test))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(shares, reference.predict_proba(test), atol=5e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_many_classes_are_learnt_to_the_end(solver: logistic.Solver) -> None:
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
    found = solve(solver, train, labels, 0.01)
    assert np.array_equal(found.predict(test), reference.predict(test))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_common_mean_does_not_slow_the_solver_down(solver: logistic.Solver) -> None:
    """Features of CLIP lie in a narrow cone; the free bias makes their mean irrelevant. Here the
    solver takes some 80 steps, and 185 where the mean is left in."""
    train, labels = noisy_classes(200)
    narrow = train + np.float32(5)
    narrow /= np.linalg.norm(narrow, axis=1, keepdims=True)
    assert solve(solver, narrow, labels, 1e-2, 130).converged


def test_parts_and_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than parts, and rows that do not divide into blocks."""
    for count in (10, 17, 230):
        train, labels = noisy_classes(count, 3)
        wanted = solve("scikit_learn", train, labels, 1.0)
        for rows in (1, 4, 100_000):
            monkeypatch.setattr(logistic, "ROWS", rows)
            found = solve("torch", train, labels, 1.0)
            np.testing.assert_allclose(found.weight, wanted.weight, atol=2e-3)
            assert np.array_equal(found.predict(train), wanted.predict(train))


def test_a_fit_that_ends_too_early_is_said() -> None:
    train, labels = noisy_classes(200)
    for solver in SOLVERS:
        assert not solve(solver, train, labels, 1e-4, 2).converged


def test_auto_goes_by_the_size_of_the_problem_alone() -> None:
    assert logistic.choose("auto", 50_000, 100) == "scikit_learn"
    assert logistic.choose("auto", 1_281_167, 1000) == "torch"
    assert logistic.choose("scikit_learn", 1_281_167, 1000) == "scikit_learn"
    assert logistic.choose("torch", 10, 2) == "torch"
