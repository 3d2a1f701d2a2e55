"""Beam searches are the same alone, in a batch of eight, and at every TP x PP."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from launcher_scripts.models.family import ModelConfig
from tests.engine.small_models import LATENT, engine_for, load_engine, random_tensors, small_config
from tests.engine.small_t5 import SOURCE, VARIANTS, t5_config, t5_tensors

IDS = (5, 60, 11, 11, 2, 33, 47, 0, 9, 28)
END = 3
MODELS = {
    "latent": small_config(num_layers=3, vocab_size=65, start_id=0, end_id=END, **LATENT),
    "gpt": small_config(num_layers=3, vocab_size=65, start_id=0, end_id=END),
    "t5": t5_config(**VARIANTS["google"], vocab_size=65, end_id=END),
}
ROWS = [
    (6, {"len_penalty": 1.0}),
    (1, {}),
    (4, {"beam_search_diversity_rate": 0.3, "temperature": 0.8}),
    (1, {"top_k": 9, "random_seed": 77, "temperature": 1.5}),
    (3, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}),
    (2, {"min_length": 12}),
    (4, {"len_penalty": -1.0}),
    (5, {}),
]


def requests(kind: str) -> list[GenerateRequest]:
    """Eight rows, most of them searches; every second has a stop word and a bad word."""
    ids = SOURCE if kind == "t5" else IDS
    words = [{}, {"stop_words": ((12,), (40, 7)), "bad_words": ((9,),)}]
    return [
        GenerateRequest(
            ids[: 3 + index],
            14 - index,
            SamplingParameters(beam_width=width, **more),
            return_log_probs=True,
            **words[index % 2],
        )
        for index, (width, more) in enumerate(ROWS)
    ]


def tensors_of(config: ModelConfig) -> dict:
    return t5_tensors(config) if config is MODELS["t5"] else random_tensors(config)


def alone(engine: Engine, rows: list[GenerateRequest]) -> list[GenerateOutput]:
    return [engine.submit(row).result(60) for row in rows]


def together(engine: Engine, rows: list[GenerateRequest]) -> list[GenerateOutput]:
    return [future.result(60) for future in [engine.submit(row) for row in rows]]


def compare(requested: list[GenerateOutput], got: list[GenerateOutput]) -> None:
    for one, other in zip(requested, got, strict=True):
        pairs = list(zip(one.hypotheses, other.hypotheses, strict=True))
        assert [a.output_ids for a, _ in pairs] == [b.output_ids for _, b in pairs]
        for a, b in pairs:
            assert a.cum_log_probs == pytest.approx(b.cum_log_probs, abs=1e-4)
            assert a.output_log_probs == pytest.approx(b.output_log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [
        pytest.param("gpt", 2, 1, marks=pytest.mark.slow),
        ("t5", 1, 2),
        ("latent", 2, 1),
        pytest.param("gpt", 1, 2, marks=pytest.mark.slow),
        pytest.param("t5", 2, 1, marks=pytest.mark.slow),
        pytest.param("gpt", 2, 2, marks=pytest.mark.slow),
        pytest.param("t5", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_with_one(tmp_path: Path, kind, tp, pp):
    config, rows = MODELS[kind], requests(kind)
    tensors = tensors_of(config)
    single = engine_for(config, tensors, max_batch_size=32)
    wanted = alone(single, rows)
    compare(wanted, together(single, rows))
    single.close()
    ranks = load_engine(tmp_path, config, tensors, tp, pp, max_batch_size=32)
    compare(wanted, alone(ranks, rows))
    compare(wanted, together(ranks, rows))
    ranks.close()
