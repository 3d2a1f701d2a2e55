"""What a rank says of itself: its host's work, and how far its device has come."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.engine.distributed.heartbeat import (
    COMPILING,
    FIRST_SECONDS,
    LOCAL_WORK,
    RECORDING,
    RankProgress,
    Watchdog,
)
from launcher_scripts.engine.runner.graphs import SLOW_LINKS, seconds_per_token
from tests.engine.small_models import small_config
from tests.processes import wait_for


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A device that passes the marks it is told to."""

    def __init__(self) -> None:
        self.marks: list[DeviceMark] = []

    def mark(self) -> DeviceMark:
        self.marks.append(DeviceMark())
        return self.marks[-1]

    def finish(self, step: int) -> None:
        self.marks[step - 1].passed = True


@dataclass
class DeviceMark:
    passed: bool = False
    broken: bool = False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self.passed


class RankOnDevice:
    """A rank that has loaded, its device and the time."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.device = Device()
        self.progress = RankProgress(self.clock)
        self.progress.on_device(self.device.mark, 0.01)
        self.progress.loaded()

    def launch(self, *, tokens: int = 0) -> None:
        self.progress.begin_step()
        self.progress.expect("decode", tokens)
        self.progress.end_step()

    def state(self) -> tuple[int, int, float]:
        beat = self.progress.heartbeat()
        return beat.launched, beat.finished, beat.held


def test_a_device_is_followed_step_by_step():
    rank = RankOnDevice()
    assert rank.state() == (0, 0, 0.0)
    rank.launch()
    rank.clock.now += 2
    rank.launch()
    assert rank.state() == (2, 0, 2.0)
    rank.device.finish(1)
    assert rank.state() == (2, 1, 0.0)
    rank.clock.now += 5
    assert rank.state() == (2, 1, 5.0)
    rank.device.finish(2)
    rank.clock.now += 1
    assert rank.state() == (2, 2, 0.0)
    rank.clock.now += 60
    rank.launch()
    rank.clock.now += 1
    assert rank.state() == (3, 2, 1.0)


def test_a_step_is_allowed_what_it_announces():
    rank = RankOnDevice()
    rank.launch(tokens=100)
    assert rank.progress.heartbeat().allowed == FIRST_SECONDS + 1.0
    rank.device.finish(1)
    rank.launch(tokens=500)
    assert rank.progress.heartbeat().allowed == 5.0
    rank.progress.begin_step()
    rank.progress.expect("decode", 200)
    assert rank.progress.heartbeat().timeout == 2.0


def test_ranks_that_load_wait_for_each_other_as_long_as_it_takes():
    """The first to arrive is no rank that hangs as soon as the last one is there, too."""
    clock, watchdog = Clock(), Watchdog(Parallelism(2), 3.0)
    ranks = [RankProgress(clock), RankProgress(clock)]
    with ranks[1].exchange("all_gather", 8):
        clock.now += 60.0
        with ranks[0].exchange("all_gather", 8):
            beats = {number: rank.heartbeat() for number, rank in enumerate(ranks)}
            assert watchdog.stuck(beats, 0, 60.0) == {}
    for rank in ranks:
        rank.loaded()
    assert ranks[1].heartbeat().phase == "waiting"


def test_what_the_host_does_by_itself_is_announced():
    rank = RankOnDevice()
    rank.launch()
    rank.progress.begin_step()
    rank.progress.expect("decode", 0)
    rank.clock.now += 2
    with rank.progress.phase(RECORDING):
        beat = rank.progress.heartbeat()
        assert (beat.phase, beat.quiet, beat.timeout) == (RECORDING, 0.0, LOCAL_WORK[RECORDING])
        rank.progress.compiles()
        beat = rank.progress.heartbeat()
        assert (beat.phase, beat.timeout) == (COMPILING, LOCAL_WORK[COMPILING])
        assert beat.doing() == "in step 2, compiling a kernel"
        rank.progress.compiled()
        assert rank.progress.heartbeat().phase == RECORDING
    beat = rank.progress.heartbeat()
    assert (beat.phase, beat.quiet, beat.timeout) == ("computing", 0.0, 0.0)
    assert (beat.launched, beat.held, beat.allowed) == (1, 2.0, FIRST_SECONDS)


def test_kernels_compiled_while_loading_are_part_of_it():
    progress = RankProgress()
    progress.compiles()
    assert progress.heartbeat().phase == "loading"
    progress.compiled()
    assert progress.heartbeat().phase == "loading"


def test_a_device_that_fails_is_told():
    rank = RankOnDevice()
    rank.launch()
    rank.device.marks[0].broken = True
    with pytest.raises(ServerError, match="its device failed: an illegal memory access"):
        rank.progress.heartbeat()


def test_without_a_device_of_its_own_a_step_ends_when_it_is_computed():
    progress = RankProgress()
    progress.loaded()
    progress.begin_step()
    progress.expect("prefill", 1000)
    beat = progress.heartbeat()
    assert (beat.launched, beat.finished, beat.timeout) == (0, 0, 0.0)
    progress.end_step()
    beat = progress.heartbeat()
    assert (beat.launched, beat.finished, beat.held) == (1, 1, 0.0)


def test_a_host_s_step_may_take_three_times_what_such_steps_took():
    clock = Clock()
    progress = RankProgress(clock)
    progress.loaded()
    alone = []
    for kind, tokens, seconds in [
        ("prefill", 10, 5.0),  # the first of a kind says nothing
        ("decode", 2, 3.0),
        ("decode", 2, 0.2),
        ("decode", 4, 0.4),
        ("prefill", 100, 2.0),
        ("prefill", 50, 0.5),
        ("decode", 4, 4.0),
        ("decode", 1, 0.1),
        ("decode", 1, 0.1),
    ]:
        progress.begin_step()
        progress.expect(kind, tokens)
        alone.append(progress.heartbeat().solo_seconds)
        clock.now += seconds
        progress.end_step()
    assert alone == pytest.approx([120, 120, 120, 1.2, 120, 3.0, 1.2, 3.0, 2.7])


@pytest.mark.parametrize("works", [True, False])
def test_a_thread_that_works_is_not_idle(works: bool):
    progress, ended = RankProgress(), threading.Event()

    def compute() -> None:
        progress.loaded()
        progress.begin_step()
        while works and not ended.is_set():
            pass
        ended.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        wait_for(lambda: progress.heartbeat().quiet > 0.5)
        beat = progress.heartbeat()
        assert (beat.idle < 0.4) == works, beat
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("absent", [0, 1])
def test_the_rank_that_did_not_arrive_is_named_within_5_s(absent: int):
    """Both have decoded a while; then one host stops before a step that the other launches."""
    clock, named, watchdog = Clock(), {}, Watchdog(Parallelism(2), 3.0)
    ranks = {number: RankOnDevice(clock) for number in range(2)}
    for step in range(1, 11):
        for rank in ranks.values():
            rank.launch()
            rank.device.finish(step)
        clock.now += 0.1
        beats = {number: rank.progress.heartbeat() for number, rank in ranks.items()}
        assert watchdog.stuck(beats, step, 0.1) == {}
    ranks[absent].progress.begin_step()
    ranks[absent].progress.expect("decode", 1)
    ranks[1 - absent].launch(tokens=1)
    start = clock.now
    while not named and clock.now < start + 10:
        clock.now += 0.5
        beats = {number: rank.progress.heartbeat() for number, rank in ranks.items()}
        named = watchdog.stuck(beats, 11, clock.now - start)
    assert 3.0 < clock.now - start < 5.0
    assert named == {absent: "hangs computing step 11, for 4 s"}


def test_larger_models_and_slower_links_are_allowed_more():
    small, large = small_config(), small_config(num_layers=4)
    tp2 = Parallelism(2)
    alone = seconds_per_token(small, Parallelism(1), several_nodes=False)
    one_node = seconds_per_token(small, tp2, several_nodes=False)
    several = seconds_per_token(small, tp2, several_nodes=True)
    assert several - one_node == pytest.approx(
        3 * 2 * 32 * 4 * (1 / SLOW_LINKS[True] - 1 / SLOW_LINKS[False])
    )
    assert 0 < alone < one_node < seconds_per_token(large, tp2, several_nodes=False)
