"""Tokens chosen without sorting are those of the reference.

Run as kernel_checks.py is.
"""

from __future__ import annotations

import random
from copy import copy

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.row_state import RowStates
from launcher_scripts.engine.messages.plan import RowStart
from launcher_scripts.kernels import reference, reference_sampling
from launcher_scripts.kernels.cuda import candidates, sampling
from tests.kernels.kernel_checks import (
    DEVICE,
    INTERPRETED,
    fused,
    pytestmark,  # noqa: F401 - pytest reads it
    random_table,
)

VOCAB = 1500 if INTERPRETED else 50257
ROWS = 3 if INTERPRETED else 128
EXTENT = 40
SAMPLED = (
    {},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.8},
    {"top_k": 300, "min_p": 0.05},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1.0, "temperature": 1.7},
    {"top_p": 0.8, "min_p": 0.1, "top_p_decay": 0.9, "top_p_min": 0.2, "top_p_reset_id": 3},
    {"top_p": 0.3, "temperature": 0.0},
)
PROCESSED = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "temperature": 0.6},
    {"frequency_penalty": 0.4, "output_presence_penalty": -0.5, "temperature": 3.0},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 0.8, "min_length": 50},
    {"no_repeat_ngram_size": 10**9},
    {"min_length": 50},
    {"bad_words": ((1, 2), (0,), (3, 3, 3), (2, 1, 4), (5,) * 50)},
    {"logit_bias": ((2, 1.5), (4, -1e15), (0, 0.1)), "temperature": 0.5, "presence_penalty": 0.3},
    {"bad_words": tuple((first, second) for first in range(9) for second in (1, 3))},
)
LISTS = ("bad_words", "logit_bias")


def request_with(seed: int, own: dict) -> GenerateRequest:
    lists = {name: own[name] for name in LISTS if name in own}
    parameters = {name: value for name, value in own.items() if name not in LISTS}
    return GenerateRequest(
        (), 0, SamplingParameters(**{"random_seed": seed, **parameters}), **lists
    )


def states_of(parameters: list[dict], lengths: list[int], generated: int = 2) -> RowStates:
    """Rows with these parameters and lengths, the last of whose tokens they have generated."""
    states = RowStates(len(parameters), EXTENT * len(parameters), torch.device(DEVICE))
    rows = [
        RowStart(
            slot,
            EXTENT * slot,
            (1,) * length,
            end_id=7,
            generated=min(generated, length),
            request=request_with(1000 * slot + length, own),
        )
        for slot, (own, length) in enumerate(zip(parameters, lengths, strict=True))
    ]
    states.join(rows)
    slots = torch.arange(len(rows), device=DEVICE)
    states.set_length(slots, torch.tensor(lengths, device=DEVICE))
    return states


def copied(states: RowStates) -> RowStates:
    """The same values in tensors of their own."""
    other = copy(states)
    other.token, other.top_p = states.token.clone(), states.top_p.clone()
    return other


def compare(logits: torch.Tensor, states: RowStates, slots: torch.Tensor) -> None:
    """Whether tokens, log-probabilities and the rows' states are the reference's.

    A device's exponential may have another last bit. So few rows whose random number falls between
    two tokens get the other one.
    """
    mine, theirs = copied(states), copied(states)
    tokens, log_probs = fused.sample(logits, slots, mine)
    expected, expected_log_probs = reference.sample(logits, slots, theirs)
    same = tokens == expected
    ordered = reference_sampling.temper(logits, slots, states).sort(
        dim=-1, descending=True, stable=True
    )
    ranks = ordered.indices.argsort(-1)
    apart = [ranks.gather(1, ids[:, None]) for ids in (tokens, expected)]
    assert (~same).sum() <= (0 if INTERPRETED else 0.02 * len(slots))
    assert (apart[0] - apart[1]).abs().max() <= 1
    assert torch.allclose(log_probs[:, same], expected_log_probs[:, same], atol=1e-4)
    kept = slots[same & (slots != states.padding_slot)]  # which several rows write
    assert torch.equal(mine.token[kept], theirs.token[kept])
    assert torch.equal(mine.top_p[kept], theirs.top_p[kept])


@pytest.mark.parametrize("scale", [0.0, 0.5, 6.0])
@pytest.mark.parametrize("parameters", SAMPLED)
def test_rows_of_one_method(parameters, scale):
    """Peaked, flat and equal logits; those that round alike are equal ones, too."""
    rows = ROWS if scale or not INTERPRETED else 2
    states = states_of([parameters] * rows, [5] * rows)
    for seed in range(1 if INTERPRETED else 5):
        torch.manual_seed(seed)
        logits = (torch.randn(rows, VOCAB + 3, device=DEVICE) * scale).half().float()[:, :VOCAB]
        compare(logits, states, torch.arange(rows, device=DEVICE))


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_rows_of_all_methods(vocab):
    """In any order, with padding rows, and with tokens that may not come."""
    random.seed(vocab)
    parameters = list(SAMPLED)
    states = states_of(parameters, [random.randrange(1, EXTENT) for _ in parameters])
    order = random.sample(range(len(parameters)), len(parameters))
    slots = torch.tensor([*order, states.padding_slot, states.padding_slot], device=DEVICE)
    logits = torch.randn(len(slots), vocab, device=DEVICE) * 3
    logits[:, 1::3] = -torch.inf
    compare(logits, states, slots)
    compare(
        torch.full_like(logits, -torch.inf).index_fill_(1, slots[:1] * 0 + 2, 1.0), states, slots
    )


def test_a_row_alone_gets_what_it_gets_among_many():
    states = states_of(list(SAMPLED), [5] * len(SAMPLED))
    logits = torch.randn(len(SAMPLED), VOCAB, device=DEVICE) * 2
    slots = torch.arange(len(SAMPLED), device=DEVICE)
    together, log_probs = fused.sample(logits, slots, copied(states))
    for row in range(len(SAMPLED)):
        token, alone = fused.sample(logits[row : row + 1], slots[row : row + 1], copied(states))
        assert token.tolist() == together[row : row + 1].tolist()
        assert torch.equal(alone[:, 0], log_probs[:, row])


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel has its number")
def test_more_candidates_than_the_list_holds(monkeypatch):
    """They are looked for in the whole row."""
    for module in (candidates, candidates, sampling):
        monkeypatch.setattr(module, "FEW", module.tl.constexpr(32))
        monkeypatch.setattr(module, "CANDIDATES", module.tl.constexpr(64), raising=False)
    parameters = ({"top_p": 0.9}, {"top_k": 500}, {"top_k": 2}, {})
    rows = len(parameters)
    states, slots = states_of(list(parameters), [5] * rows), torch.arange(rows, device=DEVICE)
    compare(torch.randn(rows, 600, device=DEVICE), states, slots)
    for of_one_score in (1, 200):
        logits = torch.arange(600, device=DEVICE).repeat(rows, 1) // of_one_score / 10.0
        compare(logits.flip(-1), states, slots)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_that_are_no_logits_choose_a_token_of_the_vocabulary():
    states = states_of([{"top_p": 0.9}, {"top_k": 4}, {}], [5] * 3)
    slots, vocab = torch.arange(3, device=DEVICE), 300 if INTERPRETED else 1100
    for value in (-torch.inf, torch.inf, torch.nan, 3e38):
        logits = torch.full((3, vocab), value, device=DEVICE)
        tokens, _ = fused.sample(logits, slots, copied(states))
        assert all(0 <= token < vocab for token in tokens.tolist())


@pytest.mark.parametrize("vocab", [9, 1100])
def test_process(vocab):
    """Texts that repeat themselves, with virtual tokens, and padding rows."""
    random.seed(vocab)
    parameters = list(PROCESSED) * 2
    lengths = [random.randrange(1, EXTENT) for _ in parameters]
    states = states_of(parameters, lengths, generated=9)
    blocks = EXTENT * len(parameters) // 4 + 1
    states.table = random_table(blocks, 4)
    ids = torch.randint(-1, 9, (4 * blocks,), device=DEVICE)
    rows = [*range(len(parameters)), states.padding_slot]
    slots = torch.tensor(random.sample(rows, len(rows)), device=DEVICE)
    logits = torch.randn(len(rows), vocab + 3, device=DEVICE)[:, :vocab] * 4
    logits[:, 3] = 0.0
    want = reference.process(logits.clone(), slots, states, ids)
    assert (want != logits).any()
    assert torch.equal(fused.process(logits, slots, states, ids), want)


def test_process_of_long_rows(monkeypatch):
    """Longer than a program looks at at once."""
    monkeypatch.setattr(sampling, "BLOCK", 16)
    test_process(150)
