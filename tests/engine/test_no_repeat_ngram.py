"""no_repeat_ngram_size forbids what transformers' processor forbids, row by row."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.row_state import RowStates
from launcher_scripts.engine.core.sampler import processing
from launcher_scripts.engine.messages.plan import RowStart
from tests.engine.small_models import engine_for, generate, random_tensors, small_config

CPU = torch.device("cpu")
VOCAB = 5
EXTENT = 24


def rows(texts: list[list[int]], sizes: list[int]) -> list[RowStart]:
    return [
        RowStart(
            slot,
            slot * EXTENT,
            tuple(text),
            end_id=99,
            request=GenerateRequest((), 0, SamplingParameters(no_repeat_ngram_size=size)),
        )
        for slot, (text, size) in enumerate(zip(texts, sizes, strict=True))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_same_tokens_are_forbidden(seed):
    """Rows of different lengths and sizes, also longer than the row, beside each other."""
    source = random.Random(seed)
    sizes = [source.randrange(0, 6) for _ in range(6)] + [EXTENT + 5]
    texts = [[source.randrange(VOCAB) for _ in range(source.randrange(1, EXTENT))] for _ in sizes]
    batch = rows(texts, sizes)
    states = RowStates(len(batch), EXTENT * len(batch), CPU)
    states.join(batch)
    changes = processing(batch, CPU)
    states.set_length(changes.slots, torch.tensor([len(text) for text in texts]))
    history = torch.randint(VOCAB, (EXTENT * len(batch) + 1,))
    for row in batch:
        history[row.start : row.start + len(row.ids)] = torch.tensor(row.ids)
    scores = torch.randn(len(batch), VOCAB)
    for longest in (max(map(len, texts)), EXTENT):
        got = changes.allowed(scores, states, history, longest)
        for text, size, before, after in zip(texts, sizes, scores, got, strict=True):
            want = before[None]
            if size:
                want = NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), want)
            assert torch.equal(after, want[0])


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_generation_repeats_nothing(top_k):
    config = small_config(end_id=67)
    engine = engine_for(config, random_tensors(config))
    prompt = (3, 9, 4, 3, 9)

    def text(size: int) -> list[int]:
        sampling = SamplingParameters(top_k=top_k, temperature=0.3, no_repeat_ngram_size=size)
        return [*prompt, *generate(engine, prompt, 40, sampling=sampling)]

    free, pairs, single = text(0), text(2), text(1)
    engine.close()
    assert len(set(pairwise(free))) < len(free) - 1
    assert Counter(pairwise(pairs))[3, 9] == 2
    assert set(Counter(pairwise(pairs[4:])).values()) == {1}
    assert len(set(single[5:]) - set(prompt)) == 40
