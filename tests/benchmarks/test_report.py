"""The texts on performance come from the results."""

from __future__ import annotations

import pytest

from benchmarks import tables
from benchmarks.report import BEGIN, END, main, with_section

SERVED = {
    "model": "t5-base",
    "tp_size": 1,
    "rows": 1,
    "input": 60,
    "output": 20,
    "ms": 10.0,
    "tokens_per_s": 2000.0,
    "floor_ms": 2.0,
    "peers": {"ctranslate2": 55.0},
}


def test_a_section_is_replaced_and_the_rest_stays() -> None:
    text = f"# Title\n\n{BEGIN}\n\nold\n\n{END}\n\nlast\n"
    once = with_section(text, ["new"])
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nlast\n"
    assert with_section(once, ["new"]) == once


def test_a_text_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="made by"):
        with_section("# Title\n", ["new"])


def test_a_peer_that_did_not_run_has_no_figure() -> None:
    _, _, row = tables.served_table([SERVED])
    assert row == "| T5-base | 1 x 60/20 | 10.0 | 2,000 | 55.0 (5.5x) | - | 2.0 |"


def test_use_cases_stand_beside_each_other_by_gpus() -> None:
    two = {**SERVED, "tp_size": 2, "ms": 7.0}
    header, _, row, *others = tables.use_case_table([two, SERVED])
    assert header.endswith("| 1 GPU (TP 1), ms | 2 GPUs (TP 2), ms |")
    assert row == "| T5-base | question answering | 60 | 20 | 10.0 | 7.0 |"
    assert [line[-9:] for line in others] == ["| - | - |"] * 2


def test_the_best_way_of_ctranslate2_counts() -> None:
    row = {
        "clients": 8,
        "in_flight_tokens_per_s": 300.0,
        "static_tokens_per_s": 150.0,
        "leaving_tokens_per_s": 200.0,
        "peer_tokens_per_s": {"one batch": 50.0, "rows leave": 100.0},
    }
    line = tables.in_flight_table({"rows": [row]})[-1]
    assert line == "| 8 | 300 | 150 (2.00x) | 200 (1.50x) | 100 (3.00x) |"


def test_the_first_start_stands_beside_the_fastest_later_one() -> None:
    starts = [
        {"first_token_s": 9.0, "timeline_s": [["ready", 8.0], ["weights", 4.0], ["kernels", 7.0]]},
        {"first_token_s": 6.0, "timeline_s": [["ready", 5.0], ["weights", 4.0]]},
        {"first_token_s": 5.0, "timeline_s": [["ready", 4.5], ["weights", 3.0]]},
    ]
    starts.append(
        {"first_token_s": 9.5, "timeline_s": [["weights", 8.0]], "read_from_disk_bytes": 1}
    )
    header, _, *rows = tables.load_table([{"shape": "5b", "starts": starts}])
    assert header.endswith("| 5B, later | 5B, later, files not in the page cache |")
    assert rows == [
        "| weights | 4.00 | 3.00 | 8.00 |",
        "| kernels | 7.00 |  |  |",
        "| ready | 8.00 | 4.50 |  |",
    ]


def test_the_texts_are_what_the_results_say() -> None:
    assert main(["--check"]) == 0


def test_streaming_clients_stand_beside_those_that_wait() -> None:
    row = {
        "model": "1.3b",
        "clients": 32,
        "first_token_ms": {"p50": 20.55, "p99": 35.0},
        "between_responses_ms": {"p50": 16.9, "p99": 28.1},
        "tokens_per_response": 7.73,
        "tokens_per_s": 14407,
        "whole_answers_tokens_per_s": 14285,
        "ratio": 1.009,
        "memory_mib": [1379, 1418],
        "cancelled_ms": [80.1, 98.9],
    }
    _, _, line = tables.streaming_table([row])
    assert line == (
        "| 1.3B | 32 | 20.6 / 35.0 | 16.9 / 28.1 | 7.7 | 14,407 | 14,285 (1.01x) | 1379 -> 1418 "
        "| 99 |"
    )


def test_weights_in_bytes_stand_beside_whole_ones() -> None:
    case = {"rows": 1, "context": 80, "share_of_floor": 0.9}
    rows = [{**case, "model": "5b", "ms": 3.0}, {**case, "model": "5b-fp8", "ms": 2.0}]
    sizes = {"5b": 10.1e9, "5b-int8": 5.27e9}
    report = {"weight_bytes": sizes, "runs": [{"rows": rows}]}
    line = tables.quantized_table(report)[-1]
    assert line == "| 5B, batch 1, context 80 | 10.1, 5.3 | 3.000 (90%) | - | 2.000 (90%, 1.50x) |"
