"""The simulated engine against what was measured, and what any engine has to keep."""

from __future__ import annotations

import pytest

from benchmarks.recorded import result
from benchmarks.simulate import MODELS, Simulation, StepTimes, beside_measured

MEASURED = [
    (row["model"], row["clients"]) for row in result("gateway")["rows"] if row["clients"] <= 128
]
# One of each model.
SLOW = [case for case in MEASURED if case not in dict(MEASURED).items()]


@pytest.mark.parametrize(
    ("shape", "clients"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else []) for case in MEASURED],
)
def test_rates_are_within_a_tenth_of_the_measured_ones(shape: str, clients: int) -> None:
    found = Simulation(StepTimes.of(*MODELS[shape]), clients).run()
    row = {"model": shape, "clients": clients, "tp_size": 1, **found}
    assert beside_measured(row)["ratio"] == pytest.approx(1, abs=0.1)


def test_the_same_seed_gives_the_same_figures() -> None:
    times = StepTimes.of(*MODELS["8b-modern"])
    first, again, other = (Simulation(times, 4, seed).run() for seed in (1, 1, 2))
    assert first == again != other


def test_more_gpus_of_a_node_are_faster_and_other_nodes_cost() -> None:
    rates = [
        Simulation(StepTimes.of(*MODELS["43b"], tp_size), 8).run()["tokens_per_s"]
        for tp_size in (4, 8, 16)
    ]
    assert rates[0] < rates[1]
    assert rates[2] < rates[1]


@pytest.mark.slow
def test_clients_that_stop_early_leave_room_for_others() -> None:
    """They ask for four times the cache, and what they take fits."""
    times = StepTimes.of(*MODELS["1.3b"])
    short = Simulation(times, 32).run()
    early = Simulation(times, 32, asked=2048, cache_tokens=20_000).run()
    assert early["rows"] > 30
    assert early["tokens_per_s"] == pytest.approx(short["tokens_per_s"], rel=0.05)


def test_a_step_takes_longer_with_more_of_anything() -> None:
    times = StepTimes.of(*MODELS["1.3b"])
    assert times.decode(0, 0) == 0
    assert times.decode(8, 800) < times.decode(8, 8000) < times.decode(32, 8000)
    assert times.decode(32, 3200) < times.decode(512, 3200)  # operations beyond what was measured
    assert times.mixed(65, 1, 0, 0) == times.mixed(128, 1, 0, 0) < times.mixed(2000, 1, 0, 0)
    assert times.mixed(65, 1, 0, 0) < times.mixed(65, 1, 128, 12_800)
    assert times.mixed(300, 2, 128, 0) < times.mixed(300, 2, 0, 0) + times.decode(128, 0)


def test_keys_and_values_of_one_byte_take_half_of_their_time() -> None:
    wide, small = (
        StepTimes.of(*MODELS["8b-modern"], kv_cache_dtype=kept) for kept in ("auto", "fp8")
    )
    assert small.decode(8, 0) == wide.decode(8, 0)
    more = wide.decode(8, 80_000) - wide.decode(8, 0)
    assert small.decode(8, 80_000) - small.decode(8, 0) == pytest.approx(more / 2)
