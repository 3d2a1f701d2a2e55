"""Beam searches on CUDA against the CPU: same float32 hypotheses, whatever runs beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.models.family import ModelConfig
from tests.engine.small_models import engine_for, load_engine, random_tensors
from tests.engine.small_t5 import VARIANTS
from tests.gpu import test_engine, test_t5

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

CONFIGS = {
    "gpt": test_engine.wider(),
    "modern": test_engine.wider(**test_engine.MODERN),
    "t5": test_t5.wider(**VARIANTS["google"], end_id=2),
}
WIDTHS = (4, 1, 7, 2, 16, 1, 3, 64)
LENGTHS = (30, 3, 17, 24, 9, 30, 1, 12)


def tensors_of(config: ModelConfig) -> dict:
    if config is CONFIGS["t5"]:
        return test_t5.calm_tensors(config)
    return random_tensors(config)


def requests(config: ModelConfig) -> list[GenerateRequest]:
    ids = test_t5.SOURCES if config is CONFIGS["t5"] else test_engine.PROMPTS
    return [
        GenerateRequest(
            prompt,
            length,
            SamplingParameters(
                beam_width=width,
                len_penalty=1.0,
                top_k=8 if index == 5 else 0,
                no_repeat_ngram_size=3 * (index % 2),
            ),
            stop_words=((5, 6), (11,)) if index % 3 == 0 else (),
        )
        for index, (prompt, width, length) in enumerate(zip(ids, WIDTHS, LENGTHS, strict=True))
    ]


def texts(outputs: list[GenerateOutput]) -> list[list[tuple[int, ...]]]:
    return [[beam.output_ids for beam in output.hypotheses] for output in outputs]


@pytest.mark.parametrize("name", CONFIGS)
def test_hypotheses_equal_the_cpus_alone_and_together(name):
    config = CONFIGS[name]
    tensors, rows = tensors_of(config), requests(config)
    sizes = {"max_batch_size": 100, "max_tokens": 1 << 16}
    reference = engine_for(config, tensors, **sizes)
    wanted = texts([reference.submit(row).result(300) for row in rows])
    reference.close()
    engine = engine_for(config, tensors, device="cuda", **sizes)
    assert texts([engine.submit(row).result(300) for row in rows]) == wanted
    for _ in range(3):  # a shape's first step runs eagerly, its second is recorded
        futures = [engine.submit(row) for row in rows]
        assert texts([future.result(300) for future in futures]) == wanted
    engine.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_ranks_agree_with_one(tmp_path: Path, name, tp, pp):
    if torch.cuda.device_count() < tp * pp:
        pytest.skip(f"there are fewer than {tp * pp} CUDA devices")
    config = CONFIGS[name]
    tensors, rows = tensors_of(config), requests(config)
    sizes = {"max_batch_size": 100, "max_tokens": 1 << 16}
    alone = engine_for(config, tensors, device="cuda", **sizes)
    wanted = texts([alone.submit(row).result(300) for row in rows])
    alone.close()
    ranks = load_engine(tmp_path, config, tensors, tp, pp, device="cuda", **sizes)
    futures = [ranks.submit(row) for row in rows]
    assert texts([future.result(300) for future in futures]) == wanted
    ranks.close()
