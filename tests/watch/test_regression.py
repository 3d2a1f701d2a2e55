"""False alarms stay rare, and drops are found: also one that no single step shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from launcher_scripts.evaluation.checks import TaskSection
from launcher_scripts.watch.regression import Regression, Tasks, comparisons, regressions

ITEMS, LEVEL, MAX_DROP = 400, 0.05, 0.02


def flags(right: np.ndarray[Any, Any]) -> Tasks:
    """A task whose accuracy is that of `right`."""
    items = [{"index": index, "correct": bool(value)} for index, value in enumerate(right)]
    metric = {"value": float(right.mean()), "low": None, "high": None, "percent": True}
    return {"lambada": TaskSection({"accuracy": metric}, items, {})}


def likelihoods(values: np.ndarray[Any, Any]) -> Tasks:
    """A task whose perplexity is that of the items' log-likelihoods."""
    items = [{"index": index, "log_likelihood": float(x)} for index, x in enumerate(values)]
    metric = {"value": float(np.exp(-values.mean())), "low": None, "high": None, "percent": False}
    return {"lambada": TaskSection({"perplexity": metric}, items, {})}


def alarms(series: list[Tasks], *, with_last: bool = True) -> list[list[Regression]]:
    """The regressions at each checkpoint, which is GO unless it has one."""
    last_go: Tasks | None = None
    result = []
    for number, tasks in enumerate(series, 1):
        references = {"the last GO": last_go} if with_last and last_go is not None else {}
        checked = comparisons(tasks, series[: number - 1], references)
        result.append(regressions(checked, number, LEVEL, MAX_DROP))
        last_go = last_go if result[-1] else tasks
    return result


def noisy(random: np.random.Generator, difficulty: np.ndarray[Any, Any], skill: float) -> Tasks:
    """Answers to items of some difficulty: each is right with its own probability."""
    return flags(random.random(len(difficulty)) < 1 / (1 + np.exp(difficulty - skill)))


def test_60_clean_series_raise_at_most_their_share_of_alarms() -> None:
    random = np.random.default_rng(7)
    difficulty = random.normal(size=ITEMS // 2)
    raised = 0
    for _ in range(60):
        raised += any(alarms([noisy(random, difficulty, 0.5) for _ in range(10)]))
    # More than 8 of 60 have a probability of less than 1 % where each has one of 5 %.
    assert raised <= 8


def test_a_drop_is_found_at_its_checkpoint_and_named() -> None:
    random = np.random.default_rng(3)
    difficulty = random.normal(size=ITEMS)
    skills = [0.1 * step for step in range(10)] + [-0.6]
    found = alarms([noisy(random, difficulty, skill) for skill in skills])
    assert not any(found[:10])
    (worst, *_) = found[10]
    assert worst.task == "lambada"
    assert worst.figure == "accuracy"
    assert worst.drop > MAX_DROP
    assert "lambada's accuracy dropped by" in worst.text()


def test_a_slow_decline_is_found_though_no_step_shows_it() -> None:
    random = np.random.default_rng(5)
    base = random.normal(-2.0, 0.5, size=ITEMS)
    # Each step costs 1 %, less than what counts as a regression.
    declining = [
        likelihoods(base - 0.01 * step + random.normal(0, 0.05, size=ITEMS)) for step in range(16)
    ]
    found = alarms(declining)
    assert not found[1]
    first = next(one for one in found if one)
    assert all("checkpoints before" in regression.against for regression in first)


def test_a_change_below_max_drop_is_none() -> None:
    base = np.linspace(-3, -1, ITEMS)
    checked = comparisons(likelihoods(base - 0.01), [], {"the last GO": likelihoods(base)})
    assert regressions(checked, 1, LEVEL, MAX_DROP) == []
    (found,) = regressions(checked, 1, LEVEL, 0.005)
    assert found.drop == pytest.approx(np.expm1(0.01))


def test_too_few_items_show_nothing() -> None:
    checked = comparisons(flags(np.zeros(29)), [], {"the last GO": flags(np.ones(29))})
    assert regressions(checked, 1, LEVEL, MAX_DROP) == []
    checked = comparisons(flags(np.zeros(30)), [], {"the last GO": flags(np.ones(30))})
    assert len(regressions(checked, 1, LEVEL, MAX_DROP)) == 1


def test_other_items_are_not_compared() -> None:
    tasks = flags(np.zeros(60))
    others = {
        "lambada": TaskSection(
            flags(np.ones(60))["lambada"].metrics,
            [{**item, "index": item["index"] + 60} for item in flags(np.ones(60))["lambada"].items],
            {},
        )
    }
    checked = comparisons(tasks, [], {"the last GO": others})
    assert regressions(checked, 1, LEVEL, MAX_DROP) == []


def test_levels_of_a_series_sum_to_no_more_than_the_level() -> None:
    checked = comparisons(flags(np.zeros(99)), [], {"the last GO": flags(np.ones(99))})
    levels = [regressions(checked, k, LEVEL, MAX_DROP)[0].level for k in range(1, 100)]
    assert 0.9 * LEVEL < sum(levels) <= LEVEL
