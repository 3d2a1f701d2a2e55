"""Random rows of many parameters at once, in random company, against rules written plainly."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.engine import Engine
from tests.checkpoint import reference_forward_gpt
from tests.engine.reference_rows import Expected, Row, Text
from tests.engine.small_models import engine_for, random_tensors, small_config
from tests.engine.small_t5 import NEMO, Plain, t5_config, t5_tensors

VOCAB = 67
CLEAR = 1e-4  # a choice this wide is the same in float32
CHOICES: dict[str, tuple[float, ...]] = {
    "top_k": (0, 1, 2, 5, 1024),
    "top_p": (0.0, 0.1, 0.5, 0.9, 1.0),
    "temperature": (0.25, 1.0, 1.75, 3.0),
    "repetition_penalty": (0.75, 1.25, 2.0),
    "presence_penalty": (-0.5, 0.75, 2.0),
    "frequency_penalty": (-0.5, 0.25, 1.5),
    "output_presence_penalty": (-0.75, 1.0),
    "min_p": (0.05, 0.3, 1.0),
    "min_length": (0, 1, 3, 50),
    "random_seed": (0, 1, (1 << 63) + 5, (1 << 64) - 1),
    "top_p_decay": (0.5, 1.0),
    "top_p_min": (1e-6, 0.25),
    "top_p_reset_id": tuple(range(0, VOCAB, 7)),
    "beam_width": (1, 2, 3, 5),
    "len_penalty": (0.0, 0.5, 1.0, -1.0),
    "beam_search_diversity_rate": (0.0, 0.5, -0.25),
    "no_repeat_ngram_size": (0, 1, 2, 3),
}


def random_request(draw: random.Random) -> GenerateRequest:
    """Few different ids, so that words and n-grams come about."""
    hot = draw.sample(range(VOCAB), 6)
    chosen = {name: draw.choice(values) for name, values in CHOICES.items() if draw.random() < 0.35}
    if draw.random() < 0.5:
        chosen.pop("presence_penalty", None)
    if "presence_penalty" in chosen:
        chosen.pop("repetition_penalty", None)
    ids = tuple(draw.choice([*hot, draw.randrange(VOCAB)]) for _ in range(draw.choice((1, 2, 5))))

    def words() -> tuple[Text, ...]:
        sizes = [draw.choice((1, 1, 2, 3)) for _ in range(draw.choice((0, 0, 1, 3, 20)))]
        return tuple(tuple(draw.choice([*hot, *ids]) for _ in range(size)) for size in sizes)

    return GenerateRequest(
        ids,
        output_len=draw.choice((1, 3, 7)),
        sampling=SamplingParameters(**chosen),  # type: ignore[arg-type]
        start_id=draw.choice(hot),
        end_id=draw.choice([*hot, 1000]),
        bad_words=words(),
        logit_bias=tuple((token, draw.uniform(-9, 9)) for token in hot[: draw.choice((0, 0, 3))]),
        stop_words=words(),
        return_log_probs=True,
    )


def gpt() -> tuple[Engine, Callable[[GenerateRequest], Row]]:
    config = small_config()
    tensors = random_tensors(config)
    weights = {name: torch.from_numpy(values) for name, values in tensors.items()}

    @cache
    def logits_after(text: Text) -> torch.Tensor:
        return reference_forward_gpt.logits(weights, config, torch.tensor([text]))[0, -1]

    engine = engine_for(config, tensors, max_batch_size=16)
    return engine, lambda request: Row(logits_after, request.input_ids, request)


def t5() -> tuple[Engine, Callable[[GenerateRequest], Row]]:
    config = t5_config(**NEMO)
    tensors = t5_tensors(config)
    plain = Plain(config, tensors)

    @cache
    def logits_after(source: Text, text: Text) -> torch.Tensor:
        return plain.logits(source, text)[-1]

    def row(request: GenerateRequest) -> Row:
        start = (request.start_id or 0,)
        return Row(lambda text: logits_after(request.input_ids, text), start, request)

    return engine_for(config, tensors, max_batch_size=16), row


def check(output: GenerateOutput, requested: list[Expected]) -> None:
    assert [each.output_ids for each in output.hypotheses] == [each.ids for each in requested]
    for got, each in zip(output.hypotheses, requested, strict=True):
        assert got.cum_log_probs == pytest.approx(each.total, rel=1e-3, abs=2e-3)
        assert got.output_log_probs == pytest.approx(each.per_token, rel=1e-3, abs=2e-3)


@pytest.mark.parametrize(("model", "batches"), [(gpt, 40), (t5, 25)])
def test_rows_are_what_the_rules_say(model: Callable[[], Any], batches: int) -> None:
    engine, row = model()
    checked = 0
    try:
        for seed in range(batches):
            draw = random.Random(seed)
            requests = [random_request(draw) for _ in range(draw.choice((1, 2, 3, 4)))]
            futures = [engine.submit(request) for request in requests]
            for request, future in zip(requests, futures, strict=True):
                output = future.result(60)
                wanted, narrowest = row(request).expected()
                if narrowest > CLEAR:
                    check(output, wanted)
                    checked += 1
    finally:
        engine.close()
    assert checked > batches
