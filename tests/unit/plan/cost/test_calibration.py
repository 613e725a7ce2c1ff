"""Measured figures between, below and beyond the measured sizes."""

from __future__ import annotations

import pytest
import torch

from merak.plan.cost.calibration import Calibration, Curve, PassSeconds, curve_of


def test_a_curve_is_interpolated_in_the_logarithm_of_the_size() -> None:
    curve = Curve(((1e2, 1.0), (1e4, 4.0)))
    assert curve.at(1e3) == pytest.approx(2.0)
    assert (curve.at(1e2), curve.at(1e4)) == (1.0, 4.0)
    assert (curve.at(1.0), curve.at(1e9)) == (1.0, 4.0)


def test_seconds_grow_with_the_work_beyond_the_largest_size() -> None:
    curve = Curve(((1e2, 1.0), (1e4, 4.0)))
    assert curve.seconds_at(3e4) == pytest.approx(12.0)
    assert curve.seconds_at(1.0) == 1.0


def test_of_several_values_at_one_size_the_last_counts() -> None:
    assert curve_of([(2.0, 5.0), (1.0, 3.0), (2.0, 4.0)]).points == ((1.0, 3.0), (2.0, 4.0))


def test_a_type_that_was_not_measured_has_the_factor_of_float32() -> None:
    known = Calibration(products={"float32": Curve(((1.0, 2.0),))})
    assert known.product(torch.bfloat16, 5.0) == 2.0
    assert Calibration().product(torch.float32, 5.0) == 1.0
    assert Calibration().copy(5.0) == Calibration().update(5.0) == 1.0


def test_segments_of_one_kind_are_interpolated() -> None:
    small, large = PassSeconds(1, 1, 2, 1, 0), PassSeconds(4, 4, 8, 4, 0)
    known = Calibration(segments={"a": small}, kinds={"k": {1e2: small, 1e4: large}})
    assert known.segment("a", "none", 7.0) == small
    found = known.segment("b", "k", 1e3)
    assert found is not None
    assert (found.forward_s, found.backward_s) == pytest.approx((2.0, 4.0))
    assert found.weight_gradient_s == 0.0
    assert known.segment("b", "other", 1e3) is None
