"""Margins: their values, their slopes, and that they never turn around."""

from __future__ import annotations

import math

import pytest
import torch

from mclclip.objectives.class_centers.sums import Margin

COSINES = torch.linspace(-0.999, 0.999, 1999, dtype=torch.float64)


def test_arc_is_the_cosine_of_the_larger_angle() -> None:
    inside = COSINES[COSINES >= -math.cos(0.3)]
    wanted = torch.cos(torch.arccos(inside) + 0.3)
    torch.testing.assert_close(Margin("arc", 0.3)(inside), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["arc", "cos", "none"])
def test_exact_slopes(kind: str) -> None:
    """By central differences, away from where arc changes its formula."""
    margin, h = Margin(kind, 0.3), 1e-6  # type: ignore[arg-type]
    cosine = COSINES[(COSINES + math.cos(0.3)).abs() > 1e-3]
    cosine = cosine[cosine.abs() < 0.9995]
    difference = (margin(cosine + h) - margin(cosine - h)) / (2 * h)
    torch.testing.assert_close(margin.derivative(cosine), difference, atol=1e-6, rtol=1e-6)


def test_straight_through() -> None:
    margin = Margin("arc", 0.3, "straight_through")
    assert torch.equal(margin.derivative(COSINES), torch.ones_like(COSINES))


@pytest.mark.parametrize("size", [0.1, 0.3, 0.5])
def test_phi_lowers_every_cosine_and_is_bounded(size: float) -> None:
    for kind in ("arc", "cos"):
        margin = Margin(kind, size)  # type: ignore[arg-type]
        values = margin(COSINES)
        # Arc passes below the cosine nearly everywhere: cos(x + m) > cos(x) only past pi - m / 2.
        assert (
            values[COSINES > -math.cos(size / 2)] < COSINES[COSINES > -math.cos(size / 2)]
        ).all()
        # Float64 sums exp(-scale * phi) by this bound (ClassCenterLoss).
        assert values.abs().max() <= 1.0 + math.pi / 2


@pytest.mark.parametrize("size", [0.1, 0.3, 1.5])
def test_arc_falls_with_the_angle_beyond_pi_too(size: float) -> None:
    """Where the angle passes pi its cosine would rise again: there phi is a line."""
    values = Margin("arc", size)(COSINES)
    assert (values.diff() > 0).all()
    beyond = COSINES < -math.cos(size) - 1e-9
    torch.testing.assert_close(values[beyond], COSINES[beyond] - size * math.sin(size))


def test_clamped_cosines_have_no_slope() -> None:
    ends = torch.tensor([-1.0, -0.99995, 0.99995, 1.0], dtype=torch.float64)
    assert not Margin().derivative(ends).any()


def test_a_cosine_of_one_has_a_finite_slope() -> None:
    ones = torch.tensor([1.0, -1.0, 1.0 + 1e-7], dtype=torch.float32)
    assert torch.isfinite(Margin()(ones)).all()
    assert torch.isfinite(Margin().derivative(ones)).all()


@pytest.mark.parametrize("size", [-0.1, 2.0])
def test_sizes_are_checked(size: float) -> None:
    with pytest.raises(ValueError, match="wanted 0 to 1.571"):
        Margin("arc", size)
