"""The speed sweep, by a clock that the model itself moves."""

import json

import numpy as np
import pytest

from launcher_scripts.common.errors import ConfigError, ServerError
from launcher_scripts.config.evaluation import BenchmarkSettings
from launcher_scripts.contract.requests import GenerateOutput
from launcher_scripts.evaluation.speed import (
    check_batch_sizes,
    random_rows,
    sweep,
)
from launcher_scripts.evaluation.tasks.prompts import read_vocab_size

SETTINGS = BenchmarkSettings(batch_sizes=(1, 4), lengths=((3, 2), (5, 6)), requests=4, warmup=1)


class Model:
    """Takes the seconds it is given, one after the other, for every request."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)
        self.now = 0.0
        self.requests = []

    def generate(self, rows):
        self.requests.append(rows)
        self.now += self.seconds[(len(self.requests) - 1) % len(self.seconds)]
        return [GenerateOutput(output_ids=(0,) * row.output_len) for row in rows]

    def clock(self):
        return self.now


def test_latencies_leave_the_warm_up_out_and_rates_count_every_row():
    model = Model(100.0, 0.1, 0.2, 0.3, 0.4)  # the first is the warm-up
    rows = list(sweep(SETTINGS, 50, model.generate, model.clock))
    assert [(row.input_len, row.output_len, row.batch_size) for row in rows] == [
        (3, 2, 1),
        (3, 2, 4),
        (5, 6, 1),
        (5, 6, 4),
    ]
    for row in rows:
        assert row.requests == 4
        assert row.latency_mean_ms == pytest.approx(250)
        assert row.latency_p50_ms == pytest.approx(250)
        assert row.latency_p90_ms == pytest.approx(370)  # 0.7 of the way from 300 to 400
        assert row.latency_p99_ms == pytest.approx(397)
        assert row.tokens_per_second == pytest.approx(row.batch_size * row.output_len * 4 / 1.0)


def test_rows_are_random_in_the_vocabulary_and_cannot_end_early():
    model = Model(1.0)
    list(sweep(SETTINGS, 50, model.generate, model.clock))
    assert [len(rows) for rows in model.requests] == [1] * 5 + [4] * 5 + [1] * 5 + [4] * 5
    for rows in model.requests:
        for row in rows:
            assert all(0 <= token < 50 for token in row.input_ids)
            assert row.sampling.min_length == row.output_len
    assert len({row.input_ids for rows in model.requests[5:10] for row in rows}) == 20
    again = random_rows(np.random.default_rng([1, 3, 2]), 1, 3, 2, 50)
    assert again == model.requests[0]


def test_a_row_that_ends_early_fails_the_measurement():
    def early(rows):
        return [GenerateOutput(output_ids=(0,)) for _ in rows]

    with pytest.raises(ServerError, match=r"did not generate 2 tokens per row; got \[1\]"):
        list(sweep(SETTINGS, 50, early))


def test_batch_sizes_beyond_the_models_are_refused():
    check_batch_sizes(SETTINGS, 4)
    with pytest.raises(ConfigError, match=r"at most 2 rows .*got \[4\]; change evaluate.benchmark"):
        check_batch_sizes(SETTINGS, 2)


def test_vocab_size_comes_from_config_ini_else_from_the_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"no vocabulary size.*change evaluate\.tokenizer_dir"):
        read_vocab_size(tmp_path)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_vocab_size(tmp_path) == 3
    (tmp_path / "config.ini").write_text("[gpt]\nname = 5%\nvocab_size = 128 ; padded\n")
    assert read_vocab_size(tmp_path) == 128
    (tmp_path / "config.ini").write_text("vocab_size = 128\n")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.ini.*no section headers"):
        read_vocab_size(tmp_path)
