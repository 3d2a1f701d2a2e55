"""Hypotheses go on, and their keys and values move, as by the reference.

Run as kernel_checks.py is.
"""

from __future__ import annotations

from copy import copy

import pytest
import torch

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.row_state import RowStates
from launcher_scripts.engine.messages.plan import RowStart
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.cuda import beams
from launcher_scripts.kernels.quantization import FP8
from launcher_scripts.kernels.reference_sampling import BeamShape
from tests.kernels.kernel_checks import (
    DEVICE,
    INTERPRETED,
    fused,
    pytestmark,  # noqa: F401 - pytest reads it
    random_table,
)

SEARCHES, EXTENT, PROMPT = 3, 24, 5
VOCAB = 1500 if INTERPRETED else 128256
END = 7


def searches_of(width: int, length: int) -> tuple[RowStates, torch.Tensor]:
    """Searches of so many tokens, and padding behind them; slots [(SEARCHES + 1) * width]."""
    count = SEARCHES * width
    states = RowStates(count, EXTENT * count, torch.device(DEVICE))
    rows = [
        RowStart(
            first,
            EXTENT * first,
            (1,) * PROMPT,
            end_id=END,
            request=GenerateRequest((), 0, SamplingParameters(beam_width=width)),
            beams=tuple(range(first, first + width)),
            stride=EXTENT,
            spacing=EXTENT,
        )
        for first in range(0, count, width)
    ]
    states.join(rows)
    order = torch.randperm(count, device=DEVICE)
    states.set_length(order, torch.full_like(order, length))
    states.beam_score[:count] = torch.randn(count, device=DEVICE)
    padding = torch.full((width,), states.padding_slot, device=DEVICE)
    return states, torch.cat([order, padding])


def compare(logits: torch.Tensor, allowed: torch.Tensor, width: int) -> None:
    """Whether rankings, next tokens and those that go on are the reference's."""
    states, slots = searches_of(width, PROMPT + 3)
    mine, theirs = copy(states), copy(states)
    for each in (mine, theirs):
        each.token, each.beam_score = states.token.clone(), states.beam_score.clone()
    shape = BeamShape(width, 2 * width, 2 * width)
    got = fused.rank_beams(logits, allowed, slots, mine, shape)
    want = reference.rank_beams(logits, allowed, slots, theirs, shape)
    found = slice(0, SEARCHES)  # padding has one score for all of its hypotheses
    assert torch.allclose(got[1][:, found], want[1][:, found], atol=1e-4)
    assert torch.equal(got[0][:, found], want[0][:, found])
    assert torch.equal(got[2][: SEARCHES * width], want[2][: SEARCHES * width])
    used = slots[: SEARCHES * width]
    assert torch.equal(mine.token[used], theirs.token[used])
    assert torch.allclose(mine.beam_score[used], theirs.beam_score[used], rtol=1e-5, atol=1e-4)


def distinct_logits(rows: int, vocab: int) -> torch.Tensor:
    """No two of a row are equal; a row lies behind another in memory."""
    order = torch.stack([torch.randperm(vocab + 3, device=DEVICE) for _ in range(rows)])
    return (order.float() / vocab * 8)[:, :vocab]


@pytest.mark.parametrize(
    ("width", "vocab"),
    [(1, 9), (1, VOCAB), (3, 9), (3, 40), (4, VOCAB), (8, 9), (8, 40), (8, VOCAB)],
)
def test_rankings(width, vocab):
    """Ends are among the best, tokens are few or many, and some may not come."""
    logits = distinct_logits((SEARCHES + 1) * width, vocab)
    logits[::2, END % vocab] = 12.0
    compare(logits, logits, width)
    allowed = logits.clone()
    allowed[:, torch.randperm(vocab, device=DEVICE)[: vocab // 4]] = -torch.inf
    compare(logits, allowed, width)


def test_wide_searches_are_the_references():
    compare(distinct_logits((SEARCHES + 1) * 9, 50), distinct_logits((SEARCHES + 1) * 9, 50), 9)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 5), (torch.bfloat16, 16), (FP8, 16)])
@pytest.mark.parametrize("width", [1, 3, 20])
def test_keys_and_values_follow(width, dtype, size, monkeypatch):
    """Hypotheses change places; nothing moves before their first token, nor any other row's."""
    monkeypatch.setattr(beams, "TILE", 256)
    for length, count in ((PROMPT, 4), (PROMPT + 2, 4), (EXTENT, 16)):
        states, slots = searches_of(width, length)
        blocks = EXTENT * SEARCHES * width // 4 + 1
        tokens = 4 * blocks + 1
        states.table = random_table(blocks, 4)
        pool = torch.randn(2, 2, 1, tokens, size, device=DEVICE).to(dtype)
        ids = torch.randint(100, (tokens,), device=DEVICE)
        within = torch.randint(width, (slots.shape[0],), device=DEVICE).view(-1, width)
        parents = slots.view(-1, width).gather(1, within).flatten()
        want = pool.clone(), ids.clone()
        arguments = (slots, parents, states, width, count)
        reference.reorder_beams(*want, *arguments)
        fused.reorder_beams(pool, ids, *arguments)
        assert torch.equal(pool[..., :-1, :].float(), want[0][..., :-1, :].float())
        assert torch.equal(ids[:-1], want[1][:-1])
