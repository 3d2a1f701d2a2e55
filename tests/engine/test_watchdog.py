"""A rank that the others wait for in vain is told from one that has much to do."""

from __future__ import annotations

import pytest

from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.heartbeat import (
    SOLO_SECONDS,
    WORKING_SECONDS,
    Heartbeat,
    Watchdog,
)

TP2 = Parallelism(2, 1)
PP2 = Parallelism(1, 2)
LONG, SHORT = 30.0, 0.5


def beat(phase, ticks, quiet=LONG, step=7, **more):
    return Heartbeat(step, phase, ticks, quiet, **{"solo_seconds": SOLO_SECONDS, **more})


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
        beat("all_reduce", 4, timeout=60.0),
        beat("all_reduce", 4, timeout=60.0),
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
    "a stage never ends": (PP2, beat("computing", 0, quiet=200.0), beat("receive", 1), [0]),
    "a stage computes longer than such steps took": (
        PP2,
        beat("computing", 0, quiet=7.0, solo_seconds=2.0),
        beat("receive", 1),
        [0],
    ),
    "a stage computes as long as such steps took": (
        PP2,
        beat("computing", 0, quiet=7.0, solo_seconds=20.0),
        beat("receive", 1),
        [],
    ),
    "what a stage sent does not arrive": (PP2, beat("waiting", 1), beat("receive", 1), [1]),
    "stages are steps apart": (PP2, beat("waiting", 9, step=9), beat("computing", 5), []),
    "it works on a busy machine": (
        TP2,
        beat("all_reduce", 4),
        beat("computing", 3, quiet=90.0, idle=0.4),
        [],
    ),
    "it worked, and then did nothing": (
        TP2,
        beat("all_reduce", 4),
        beat("computing", 3, quiet=90.0, idle=4.5),
        [1],
    ),
    "its work never ends": (
        TP2,
        beat("all_reduce", 4),
        beat("computing", 3, quiet=WORKING_SECONDS + 5.0, idle=0.0),
        [1],
    ),
    "it reads a large step": (
        TP2,
        beat("all_reduce", 5),
        beat("waiting", 4, step=6, idle=0.0),
        [],
    ),
    "a stage works on": (PP2, beat("computing", 0, quiet=200.0, idle=0.0), beat("receive", 1), []),
    "still loading": (TP2, beat("all_reduce", 4), beat("loading", 0), []),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_stuck(name):
    sizes, first, second, stuck = CASES[name]
    sent = max(first.step, second.step)
    found = Watchdog(sizes, 4.0).stuck({0: first, 1: second}, sent, LONG)
    assert sorted(found) == stuck


def on_device(phase, launched, finished, held=LONG, *, quiet=LONG, step=7, **more):
    steps = {"launched": launched, "finished": finished, "held": held}
    return Heartbeat(step, phase, 0, quiet, **steps, **more)


# Of ranks whose devices finish what their hosts launch: the beats of ranks 0 and 1, who is stuck.
ON_DEVICES = {
    "both at work": (
        on_device("waiting for its device", 7, 6, SHORT),
        on_device("waiting", 7, 6, SHORT, step=7),
        [],
    ),
    "one does not launch the step that the other's device is at": (
        on_device("waiting for its device", 8, 6, step=8),
        on_device("computing", 6, 6, 0.0),
        [1],
    ),
    "it has only just begun to": (
        on_device("waiting for its device", 7, 6),
        on_device("computing", 6, 6, 0.0, quiet=SHORT),
        [],
    ),
    "it compiles a kernel": (
        on_device("waiting for its device", 7, 6),
        on_device("compiling a kernel", 6, 6, 0.0, timeout=120.0),
        [],
    ),
    "it never ends compiling a kernel": (
        on_device("waiting for its device", 7, 6),
        on_device("compiling a kernel", 6, 6, 0.0, quiet=130.0, timeout=120.0),
        [1],
    ),
    "it has launched the step at last": (
        on_device("waiting for its device", 7, 6),
        on_device("waiting", 7, 6, SHORT, quiet=SHORT),
        [],
    ),
    "rank 0 does not launch it": (
        on_device("computing", 6, 6, 0.0),
        on_device("waiting", 7, 6),
        [0],
    ),
    "one launches nothing more, and the devices have finished all": (
        on_device("waiting for its device", 7, 7, 0.0),
        on_device("computing", 6, 6, 0.0),
        [1],
    ),
    "it launches a big prefill": (
        on_device("waiting for its device", 7, 7, 0.0),
        on_device("computing", 6, 6, 0.0, timeout=60.0),
        [],
    ),
    "rank 0 cannot launch the next step, for the other device does not finish one": (
        on_device("computing", 7, 7, 0.0, step=8),
        on_device("waiting", 7, 6),
        [1],
    ),
    "rank 0 cannot launch the next step: the queue is full": (
        on_device("computing", 7, 6, step=8),
        on_device("computing", 6, 6, 0.0),
        [1],
    ),
    "all have launched it, no device finishes it": (
        on_device("waiting for its device", 7, 6),
        on_device("waiting", 7, 6),
        [0, 1],
    ),
    "one device has finished it": (
        on_device("waiting for its device", 7, 7, 0.0, quiet=SHORT),
        on_device("waiting", 7, 6),
        [1],
    ),
    "the step is a big prefill": (
        on_device("waiting for its device", 7, 6, allowed=60.0),
        on_device("waiting", 7, 6, allowed=60.0),
        [],
    ),
    "a launched step is not taken": (
        on_device("waiting for its device", 7, 6),
        on_device("waiting", 6, 6, 0.0, step=6),
        [1],
    ),
    "the host waits for nothing": (
        on_device("waiting for its device", 7, 7, 0.0, quiet=200.0),
        on_device("waiting", 7, 7, 0.0, quiet=200.0),
        [0],
    ),
    "nothing to do": (
        on_device("waiting", 7, 7, 0.0, quiet=900.0),
        on_device("waiting", 7, 7, 0.0, quiet=900.0),
        [],
    ),
}


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=str)
@pytest.mark.parametrize("name", ON_DEVICES)
def test_who_is_stuck_on_devices(name, sizes):
    first, second, stuck = ON_DEVICES[name]
    sent = max(first.step, second.step)
    found = Watchdog(sizes, 3.0).stuck({0: first, 1: second}, sent, LONG)
    assert sorted(found) == stuck


def test_a_step_that_was_only_just_sent_may_be_on_its_way():
    beats = {0: beat("all_reduce", 5, SHORT), 1: beat("waiting", 4, step=6)}
    assert Watchdog(TP2, 4.0).stuck(beats, 7, SHORT) == {}


def test_it_is_said_what_hangs():
    beats = {0: beat("all_reduce", 5), 1: beat("computing", 4)}
    assert Watchdog(TP2, 4.0).stuck(beats, 7, LONG) == {1: "hangs computing step 7, for 30 s"}


def test_it_is_said_which_step_a_device_is_at():
    beats = {0: on_device("waiting", 7, 7, 0.0), 1: on_device("waiting", 8, 6)}
    said = Watchdog(TP2, 3.0).stuck(beats, 7, LONG)
    assert said == {1: "hangs: its device has been at step 7 for 30 s"}
