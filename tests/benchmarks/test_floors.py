"""What a request must read and compute at least."""

from __future__ import annotations

import pytest

from benchmarks.floors import (
    Rates,
    between_nodes,
    floor_ms,
    numbers,
    planned_ms,
    within_node,
)
from benchmarks.report import plan, rows_by_gpus
from benchmarks.shapes import CONFIGS, TINY, Case

READ_ONLY = Rates(read_bytes=1e12, operations=float("inf"))
COMPUTE_ONLY = Rates(read_bytes=float("inf"), operations=1e12)


def test_a_models_numbers_are_those_of_its_name() -> None:
    sizes = {name: numbers(CONFIGS[name], lambda _: True) / 1e9 for name in CONFIGS}
    assert sizes["126m"] == pytest.approx(0.126, abs=0.001)
    assert sizes["1.3b"] == pytest.approx(1.3, abs=0.05)
    assert sizes["5b"] == pytest.approx(5, abs=0.1)
    assert sizes["20b"] == pytest.approx(20, abs=0.5)
    assert sizes["t5-base"] == pytest.approx(0.25, abs=0.01)
    assert sizes["t5-3b"] == pytest.approx(2.85, abs=0.05)


def test_every_token_of_one_row_reads_the_weights_once() -> None:
    config = CONFIGS["5b"]
    read = numbers(config, lambda name: not name.startswith("wpe"))
    cached = 2 * config.num_layers * config.hidden_size
    steps = 19 * 2 * cached * (60 + 10)
    expected = (20 * 2 * read + steps) / 1e12 * 1e3
    assert floor_ms(config, Case(1, 60, 20), READ_ONLY) == pytest.approx(expected, rel=1e-4)


def test_rows_share_the_weights_and_not_the_operations() -> None:
    config = TINY["tiny"]
    one, many = (floor_ms(config, Case(rows, 8, 1), READ_ONLY) for rows in (1, 16))
    assert many == one
    one, many = (floor_ms(config, Case(rows, 8, 1), COMPUTE_ONLY) for rows in (1, 16))
    assert many == pytest.approx(16 * one)


def test_a_t5_reads_its_encoder_once_and_its_decoder_with_every_token() -> None:
    config = CONFIGS["t5-3b"]
    once = floor_ms(config, Case(1, 60, 1), READ_ONLY)
    twice = floor_ms(config, Case(1, 60, 2), READ_ONLY)
    decoder = numbers(config, lambda name: name.startswith(("decoder.", "lm_head")))
    assert twice - once < 2 * decoder / 1e12 * 1e3
    assert once > 2 * 0.9 * numbers(config, lambda name: name.startswith("encoder.")) / 1e9


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_plan_of_20b_is_near_what_was_measured(tp_size: int) -> None:
    for case, planned in plan(CONFIGS["20b"], tp_size).items():
        (row,) = (
            row
            for row in rows_by_gpus()
            if (row["model"], row["tp_size"], Case.of(row)) == ("20b", tp_size, case)
        )
        assert 1 <= row["ms"] / planned < 1.3


def test_sums_take_what_was_measured_or_the_network_lets_through() -> None:
    near = within_node({"4096": 6.0, "8192": 8.0})
    assert [near(size) * 1e6 for size in (0, 6144, 1 << 20)] == pytest.approx([6, 7, 8])
    assert between_nodes(30e-6, 50e9)(50_000) == pytest.approx(32e-6)


def test_a_pass_has_two_sums_a_layer_and_one_for_the_token() -> None:
    config = TINY["tiny"]
    case = Case(1, 8, 3)
    alone = floor_ms(config, case, READ_ONLY)
    asked: list[int] = []
    planned = planned_ms(config, case, READ_ONLY, 2, lambda size: asked.append(size) or 1e-3)
    assert planned == pytest.approx(alone / 2 + 3 * (2 * config.num_layers + 1))
    assert sorted(asked) == [0, 2 * config.hidden_size, 8 * 2 * config.hidden_size]
