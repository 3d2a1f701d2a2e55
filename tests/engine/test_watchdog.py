"""A rank that the others wait for in vain is told from one that has much to do."""

from __future__ import annotations

import pytest

from launcher_scripts.engine.messages import Beat
from launcher_scripts.engine.watchdog import Watchdog
from launcher_scripts.parallel import Parallelism

TP2 = Parallelism(2, 1)
PP2 = Parallelism(1, 2)
LONG, SHORT = 30.0, 0.5


def beat(phase, ticks, quiet=LONG, step=7, **more):
    return Beat(step, phase, ticks, quiet, **more)


# sizes, the beats of ranks 0 and 1, whether the step was sent long ago, who is stuck
CASES = {
    "a long prefill: all compute": (TP2, beat("computing", 3), beat("computing", 3), []),
    "one computes on": (TP2, beat("all_reduce", 4), beat("computing", 3), [1]),
    "one computes on, not long enough": (
        TP2,
        beat("all_reduce", 4, quiet=3.0),
        beat("computing", 3, quiet=6.0),
        [1],
    ),
    "it took the other as long": (
        TP2,
        beat("all_reduce", 4, stretch=20.0),
        beat("computing", 3, quiet=50.0),
        [],
    ),
    "one is one exchange behind": (TP2, beat("all_reduce", 4), beat("all_reduce", 3), [1]),
    "all are in it and it does not end": (
        TP2,
        beat("all_reduce", 4),
        beat("all_reduce", 4),
        [0, 1],
    ),
    "much is on its way": (
        TP2,
        beat("all_reduce", 4, patience=60.0),
        beat("all_reduce", 4, patience=60.0),
        [],
    ),
    "all have just begun": (TP2, beat("all_reduce", 4, SHORT), beat("all_reduce", 4, SHORT), []),
    "one finished, one is in its last exchange": (
        TP2,
        beat("waiting", 4),
        beat("all_reduce", 4),
        [1],
    ),
    "one does not take the step": (TP2, beat("all_reduce", 5), beat("waiting", 4, step=6), [1]),
    "nothing to do": (TP2, beat("waiting", 4, quiet=900.0), beat("waiting", 4, quiet=900.0), []),
    "a stage computes long": (PP2, beat("computing", 0), beat("receive", 1), []),
    "a stage computes for ever": (PP2, beat("computing", 0, quiet=200.0), beat("receive", 1), [0]),
    "what a stage sent does not arrive": (PP2, beat("waiting", 1), beat("receive", 1), [1]),
    "stages are steps apart": (PP2, beat("waiting", 9, step=9), beat("computing", 5), []),
    "still loading": (TP2, beat("all_reduce", 4), beat("loading", 0), []),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_stuck(name):
    sizes, first, second, stuck = CASES[name]
    sent = max(first.step, second.step)
    found = Watchdog(sizes, 4.0).stuck({0: first, 1: second}, sent, LONG)
    assert sorted(found) == stuck


def test_a_step_that_was_only_just_sent_may_be_on_its_way():
    beats = {0: beat("all_reduce", 5, SHORT), 1: beat("waiting", 4, step=6)}
    assert Watchdog(TP2, 4.0).stuck(beats, 7, SHORT) == {}


def test_it_is_said_what_hangs():
    beats = {0: beat("all_reduce", 5), 1: beat("computing", 4)}
    assert Watchdog(TP2, 4.0).stuck(beats, 7, LONG) == {1: "hangs computing step 7, for 30 s"}
