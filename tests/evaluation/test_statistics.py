"""Intervals and tests against values of scipy 1.17.1 and statsmodels 0.15.0, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launcher_scripts.evaluation.tasks import task

# 60 draws of numpy's default_rng(7).exponential, rounded.
SAMPLE = [
    *(0.708, 1.025, 0.569, 0.895, 0.207, 3.384, 0.01, 2.809, 0.575, 0.301, 0.541, 0.312),
    *(0.9, 1.074, 1.884, 0.222, 3.145, 0.736, 0.348, 0.884, 0.075, 0.06, 1.224, 0.773),
    *(2.196, 0.475, 0.521, 1.181, 0.527, 0.022, 0.293, 1.014, 0.635, 1.397, 0.008, 0.904),
    *(0.25, 0.356, 3.075, 1.404, 3.795, 1.748, 2.243, 0.145, 0.303, 0.239, 1.148, 1.223),
    *(0.127, 0.384, 1.068, 0.069, 0.098, 0.871, 1.874, 2.696, 0.706, 1.306, 0.764, 0.937),
]


@pytest.mark.parametrize(
    ("successes", "items", "low", "high"),
    [  # statsmodels' proportion_confint(..., method="wilson")
        (68, 200, 0.27791545970908793, 0.4081150447316374),
        (200, 200, 0.9811546736227335, 1.0),
        (0, 30, 0.0, 0.11351339317396873),
    ],
)
def test_a_share_has_wilsons_interval(successes: int, items: int, low: float, high: float) -> None:
    share = task.share(successes, items)
    assert (share.low, share.high) == pytest.approx((low, high), abs=1e-12)
    assert share.value == successes / items and share.method == "Wilson"


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [  # statsmodels' mcnemar(..., exact=True)
        (15, 5, 0.04138946533203125),
        (0, 6, 0.03125),
        (3, 3, 1.0),
        (40, 21, 0.0204147137996349),
    ],
)
def test_mcnemars_p_is_exact(lost: int, won: int, p: float) -> None:
    assert task.mcnemar(lost, won) == pytest.approx(p)
    assert task.mcnemar(won, lost) == pytest.approx(p)


@pytest.mark.parametrize(
    ("lost", "won", "items", "low", "high"),
    [  # Tango's statistic, its nuisance parameter by scipy's minimize_scalar, its ends by brentq
        (15, 5, 200, 0.006784728, 0.098789405),
        (0, 6, 100, -0.124768155, -0.020786891),
        (3, 2, 200, -0.022573693, 0.034475785),
        (40, 21, 500, 0.007604599, 0.069807724),
    ],
)
def test_a_paired_difference_has_tangos_interval(
    lost: int, won: int, items: int, low: float, high: float
) -> None:
    drop = task.paired_share(lost, won, items)
    assert (drop.low, drop.high) == pytest.approx((low, high), abs=1e-7)
    assert drop.value == pytest.approx((lost - won) / items)


def test_items_that_all_agree_still_leave_an_interval() -> None:
    drop = task.paired_share(0, 0, 200)
    end = task.Z**2 / (200 + task.Z**2)  # the closed form
    assert (drop.low, drop.high) == pytest.approx((-end, end))
    half = task.paired_share(0, 200, 200)
    assert half.value == -1 and half.low == -1 and half.high < 0


def test_a_mean_has_the_bootstraps_interval() -> None:
    mean = task.mean(SAMPLE)
    # scipy's bootstrap with 99,999 resamples; ours has 10,000
    assert (mean.low, mean.high) == pytest.approx((0.77627, 1.24016), abs=0.01)
    assert mean.value == pytest.approx(0.97771667)
    assert task.mean(SAMPLE) == mean  # the seed is fixed


def test_a_mean_of_equal_values_has_no_width() -> None:
    mean = task.mean([0.25] * 40)
    assert (mean.value, mean.low, mean.high, mean.items) == (0.25, 0.25, 0.25, 40)


def test_many_items_are_resampled_in_blocks() -> None:
    mean = task.mean(np.random.default_rng(1).normal(5, 1, 6000).tolist())
    assert mean.high - mean.low == pytest.approx(2 * task.Z / math.sqrt(6000), rel=0.05)


@pytest.mark.parametrize(
    ("interval", "limit"),
    [
        (task.share(68, 200), 0.35),
        (task.paired_share(0, 0, 3), 0.02),
        (task.paired_share(3, 2, 200), 0.02),
        (task.mean(SAMPLE), 0.9),
    ],
)
def test_the_items_that_decide_are_just_enough(interval: task.Interval, limit: float) -> None:
    items = interval.items_to_decide(limit)
    assert items is not None
    low, high = interval.grown(items)
    assert not low < limit < high
    low, high = interval.grown(items - 1)
    assert low < limit < high


def test_no_number_of_items_decides_a_value_at_the_bound() -> None:
    assert task.share(50, 100).items_to_decide(0.5) is None
    assert task.share(200, 200).items_to_decide(0.5, minimum=30) == 200


def test_a_function_of_a_figure_keeps_its_ends_in_order() -> None:
    mean = task.mean(SAMPLE)
    turned = mean.mapped(lambda value: -2 * value)
    assert (turned.low, turned.high) == (-2 * mean.high, -2 * mean.low)
    assert turned.grown(60) == pytest.approx((turned.low, turned.high))
