"""What every sampling parameter means, on hand-made logits."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper

from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.row_state import RowStates
from launcher_scripts.engine.core.sampler import Sampled, SamplingBatch, sample
from launcher_scripts.engine.messages import plan
from launcher_scripts.engine.messages.plan import Choice, RowStart
from launcher_scripts.kernels import reference
from launcher_scripts.kernels.operands import MAX_LISTED
from launcher_scripts.kernels.reference_sampling import uniforms

CPU = torch.device("cpu")
PROMPT = (3, 1, 4)
EXTENT = 16


class Rows:
    """Rows whose prompts are in the cache, ready to choose their next token."""

    def __init__(self, *rows: RowStart) -> None:
        self.batch = SamplingBatch(rows, CPU)
        self.states = RowStates(len(rows), EXTENT * len(rows), CPU)
        self.states.join(rows)
        self.states.set_length(self.batch.slots, torch.tensor([len(row.ids) for row in rows]))
        self.history = torch.zeros(EXTENT * len(rows) + 1, dtype=torch.int64)
        for row in rows:
            self.history[row.start : row.start + len(row.ids)] = torch.tensor(row.ids)

    def sample(self, logits: torch.Tensor) -> Sampled:
        return sample(logits.clone(), self.batch, self.states, self.history, reference)

    def feed(self, tokens: list[int]) -> None:
        """The chosen tokens are in the cache now."""
        for slot, token in enumerate(tokens):
            self.history[self.states.start[slot] + self.states.length[slot]] = token
        self.states.advance(self.batch.slots)


def row(slot: int = 0, ids: tuple[int, ...] = PROMPT, **more: object) -> RowStart:
    outside = {"bad_words", "return_log_probs", "logit_bias", "num_log_probs"}
    end_id = more.pop("end_id", 0)
    fields = {name: value for name, value in more.items() if name in outside}
    parameters = {name: value for name, value in more.items() if name not in outside}
    request = GenerateRequest((), 0, SamplingParameters(**parameters), **fields)
    return RowStart(slot, slot * EXTENT, ids, end_id, request)


def choose(logits: list[float], **parameters: object) -> int:
    return Rows(row(**parameters)).sample(torch.tensor([logits])).tokens.item()


def draw(logits: torch.Tensor, count: int, **parameters: object) -> torch.Tensor:
    """Tokens of `count` rows that differ in their seeds only: how often each came, [vocab]."""
    rows = Rows(*(row(slot, random_seed=slot, **parameters) for slot in range(count)))
    tokens = rows.sample(logits.expand(count, -1)).tokens
    return torch.bincount(tokens, minlength=logits.shape[0]) / count


LOGITS = torch.tensor([0.5, 2.0, 1.0, -1.0, 1.5, 0.0])


def test_neither_k_nor_p_is_greedy():
    assert choose(LOGITS.tolist()) == 1
    assert choose(LOGITS.tolist(), top_k=1) == 1
    assert choose(LOGITS.tolist(), temperature=3.0) == 1


def test_top_k_draws_from_the_k_largest_by_their_shares():
    seen = draw(LOGITS, 4000, top_k=3)
    expected = torch.zeros(6)
    expected[[1, 4, 2]] = LOGITS[[1, 4, 2]].softmax(-1)
    assert torch.allclose(seen, expected, atol=0.03)
    assert seen[[0, 3, 5]].sum() == 0


def test_top_p_draws_from_the_smallest_set_that_reaches_p():
    shares = LOGITS.softmax(-1)
    seen = draw(LOGITS, 4000, top_p=0.7)  # 0.42 + 0.26 + 0.16 = 0.83
    kept = shares * torch.tensor([0, 1, 1, 0, 1, 0])
    assert shares[[1, 4]].sum() < 0.7 < kept.sum()
    assert seen[[0, 3, 5]].sum() == 0
    # u * p falls into a token's share of the first 0.7; the last token keeps the rest
    expected = torch.zeros(6)
    expected[1], expected[4] = shares[1] / 0.7, shares[4] / 0.7
    expected[2] = 1 - expected.sum()
    assert torch.allclose(seen, expected, atol=0.03)


def test_top_p_below_the_largest_share_is_greedy():
    assert draw(LOGITS, 50, top_p=0.3)[1] == 1


def test_top_p_one_can_draw_everything():
    assert (draw(LOGITS, 6000, top_p=1.0) > 0).all()


def test_top_p_inside_top_k_counts_from_the_mass_of_the_k():
    shares = LOGITS[[1, 4, 2]].softmax(-1)  # of the three largest: 0.51, 0.31, 0.19
    assert shares[:2].sum() > 0.8
    seen = draw(LOGITS, 4000, top_k=3, top_p=0.8)
    assert seen[[0, 2, 3, 5]].sum() == 0
    assert float(seen[1]) == pytest.approx(float(shares[0]) / 0.8, abs=0.03)


@pytest.mark.parametrize("top_p", [0.4, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 12])
@pytest.mark.parametrize("min_p", [0.02, 0.2, 1.0])
def test_min_p_leaves_what_transformers_warper_leaves(min_p, top_k, top_p):
    """Shares of the rest are drawn as top-k and top-p always are: the first to reach u * p."""
    count = 100
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, 50, generator=generator) * 2
    parameters = {"min_p": min_p, "top_k": top_k, "top_p": top_p, "temperature": 1.5}
    rows = Rows(*(row(slot, random_seed=slot, **parameters) for slot in range(count)))
    warpers = [TemperatureLogitsWarper(1.5), MinPLogitsWarper(min_p)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    scores = logits.double()
    for warper in warpers:
        scores = warper(None, scores)
    running, ids = scores.softmax(-1).sort(descending=True)
    running = running.cumsum(-1)
    uniform = uniforms(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    place = (running < (uniform * top_p)[:, None] - 1e-6).sum(-1)
    assert rows.sample(logits).tokens.tolist() == ids[torch.arange(count), place].tolist()


def test_min_p_of_one_row_leaves_the_others_as_they_were():
    others = [row(slot, random_seed=slot, top_p=0.9) for slot in range(1, 40)]
    rows = Rows(row(0, min_p=1.0, top_p=1.0, random_seed=1), *others)
    together = rows.sample(LOGITS.expand(40, -1)).tokens.tolist()
    alone = [choose(LOGITS.tolist(), random_seed=slot, top_p=0.9) for slot in range(1, 40)]
    assert together == [1, *alone]


def test_min_p_changes_nothing_about_greedy_rows():
    rows = Rows(row(0, min_p=0.5), row(1, min_p=0.5, top_k=1))
    assert rows.batch.choice == Choice.GREEDY
    assert rows.sample(LOGITS.expand(2, -1)).tokens.tolist() == [1, 1]


def test_a_forbidden_token_does_not_come_of_rounding():
    """The probabilities of the tokens that may come sum up to a little less than 1 in float32."""
    logits = torch.randn(200, generator=torch.Generator().manual_seed(2)) * 2
    seed = 74078248
    assert float(uniforms(torch.tensor([seed]), torch.tensor([0]))) == 1.0
    forbidden = tuple((token,) for token in range(100, 200))
    assert choose(logits.tolist(), top_p=1.0, random_seed=seed, bad_words=forbidden) < 100


def test_rows_choose_by_their_own_parameters():
    rows = Rows(row(0), row(1, top_k=2, random_seed=5), row(2, top_p=0.2), row(3, top_k=6, top_p=1))
    together = rows.sample(LOGITS.expand(4, -1)).tokens.tolist()
    alone = [
        choose(LOGITS.tolist(), **parameters)
        for parameters in ({}, {"top_k": 2, "random_seed": 5}, {"top_p": 0.2}, {"top_k": 6})
    ]
    assert together == alone


def test_a_larger_k_than_the_vocabulary_is_the_vocabulary():
    assert (draw(LOGITS, 3000, top_k=1000) > 0).all()


def test_temperature_flattens_and_sharpens():
    flat, sharp = (draw(LOGITS, 3000, top_k=6, temperature=t) for t in (5.0, 0.2))
    assert torch.allclose(flat, (LOGITS / 5).softmax(-1), atol=0.03)
    assert torch.allclose(sharp, (LOGITS / 0.2).softmax(-1), atol=0.03)


def test_temperature_zero_is_greedy():
    assert draw(LOGITS, 50, top_k=6, temperature=0.0)[1] == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = [0.0, 2.0, 1.5, 0.9, -1.0, -1.8]
    assert choose(logits, repetition_penalty=1.5) == 2  # 1 was seen: 2.0 / 1.5 = 1.33
    assert choose(logits, ids=(1, 1, 1), repetition_penalty=1.3) == 1  # once: 2.0 / 1.3 = 1.54
    only_negative = [-9.0, -1.0, -1.6, -9.0, -9.0, -9.0]
    assert choose(only_negative, ids=(1,), repetition_penalty=1.5) == 1  # -1.5 > -1.6
    assert choose(only_negative, ids=(1,), repetition_penalty=1.7) == 2


def test_presence_penalty_subtracts_once_and_sees_generated_tokens():
    rows = Rows(row(ids=(5,), presence_penalty=1.0))
    logits = torch.tensor([[0.0, 2.0, 1.5, 0.9, -1.0, -1.8]])
    first = rows.sample(logits).tokens.tolist()
    rows.feed(first)
    assert (first, rows.sample(logits).tokens.tolist()) == ([1], [2])


def test_penalties_come_after_temperature():
    logits = [0.0, 2.0, 1.5, 0.0, 0.0, 0.0]
    # 2.0 / 4 - 0.3 = 0.2 < 1.5 / 4; before the temperature 2.0 - 0.3 would still lead
    assert choose(logits, ids=(1,), presence_penalty=0.3, temperature=4.0) == 2


def test_penalties_of_generated_tokens_count_those_alone():
    """Written plainly: frequency times the count, presence once, the prompt's tokens not at all."""
    rows = Rows(
        row(0, ids=(1, 1, 4), frequency_penalty=0.4),
        row(1, ids=(1, 1, 4), output_presence_penalty=0.7),
        row(2, ids=(1, 1, 4), frequency_penalty=0.3, output_presence_penalty=0.2, temperature=2.0),
        row(3, ids=(1, 1, 4)),
    )
    counts = torch.zeros(4, 6)
    frequency = torch.tensor([0.4, 0.0, 0.3, 0.0])[:, None]
    presence = torch.tensor([0.0, 0.7, 0.2, 0.0])[:, None]
    for _ in range(8):
        tokens = rows.sample(LOGITS.expand(4, -1)).tokens
        expected = LOGITS - frequency * counts - presence * (counts > 0)
        assert tokens.tolist() == expected.argmax(-1).tolist()
        counts[torch.arange(4), tokens] += 1
        rows.feed(tokens.tolist())
    assert len(set(counts[0].tolist())) > 2


def test_penalties_of_generated_tokens_come_before_temperature():
    rows = Rows(row(ids=(5,), frequency_penalty=0.4, temperature=4.0))
    logits = torch.tensor([[0.0, 2.0, 1.5, 0.0, 0.0, 0.0]])
    rows.feed(rows.sample(logits).tokens.tolist())
    # (2.0 - 0.4) / 4 leads 1.5 / 4; after the temperature 2.0 / 4 - 0.4 would not
    assert rows.sample(logits).tokens.tolist() == [1]


def test_biases_are_added_before_penalties_and_temperature():
    logits = [0.0, 2.0, 1.5, 0.0, 0.0, 0.0]
    assert choose(logits, logit_bias=((2, 0.6),)) == 2
    assert choose(logits, logit_bias=((1, -0.6),)) == 2
    # (2.0 - 4.0) * 2 is below -3.5; after the penalty 2.0 / 2 - 4.0 would not be
    behind = [-9.0, 2.0, -3.5, -9.0, -9.0, -9.0]
    assert choose(behind, ids=(1,), repetition_penalty=2.0, logit_bias=((1, -4.0),)) == 2
    assert choose(behind, ids=(1,), logit_bias=((1, -4.0),)) == 1
    assert choose(logits, temperature=4.0, logit_bias=((2, 0.4),)) == 1


def test_biases_belong_to_their_row():
    rows = Rows(row(0), row(1, logit_bias=((0, 9.0), (1, 9.5))), row(2, logit_bias=((5, 90.0),)))
    assert rows.sample(LOGITS.expand(3, -1)).tokens.tolist() == [1, 1, 5]
    assert rows.batch.choice == Choice.PROCESSED


def test_lists_that_are_too_long_for_columns(monkeypatch):
    """They are made with the batch, beside rows whose lists are in columns."""
    words, biases = ((3, 1, 4, 4), (1, 4, 1)), ((4, -0.6), (2, 0.7))
    together = []
    for most in (MAX_LISTED, 1):
        monkeypatch.setattr(plan, "MAX_LISTED", most)
        rows = Rows(
            row(0, bad_words=words, logit_bias=biases),
            row(1, bad_words=((1,),)),
            row(2, min_length=9),
        )
        assert rows.batch.choice == (Choice.PROCESSED if most > 1 else Choice.EAGER)
        together.append(rows.sample(LOGITS.expand(3, -1)).tokens.tolist())
    assert together == [[2, 4, 1]] * 2


def test_a_words_ban_stays_whatever_the_bias():
    assert choose(LOGITS.tolist(), logit_bias=((0, 1e15),), bad_words=((0,),)) == 1


def test_min_length_holds_the_end_token_back():
    rows = Rows(row(end_id=1, min_length=2))
    logits = LOGITS[None]
    for expected in (4, 4, 1):
        tokens = rows.sample(logits).tokens.tolist()
        assert tokens == [expected]
        rows.feed(tokens)


def test_min_length_with_an_end_token_outside_of_the_vocabulary():
    assert choose(LOGITS.tolist(), end_id=50256, min_length=3) == 1


def test_bad_words_of_one_token_are_never_chosen():
    assert choose(LOGITS.tolist(), bad_words=((1,), (4,))) == 2
    assert choose([9.0, 1.0, 0.0], bad_words=((0,),)) == 1  # id 0 can be banned, too


def test_bad_words_of_several_tokens_are_banned_after_their_beginning():
    assert choose(LOGITS.tolist(), bad_words=((1, 4, 1),)) == 4  # the prompt ends in 1, 4
    assert choose(LOGITS.tolist(), bad_words=((3, 4, 1),)) == 1
    assert choose(LOGITS.tolist(), ids=(4,), bad_words=((1, 4, 1),)) == 1
    assert choose(LOGITS.tolist(), bad_words=((1,), (1, 4, 4))) == 2


def test_bad_words_belong_to_their_row():
    rows = Rows(row(0, bad_words=((1,),)), row(1))
    assert rows.sample(LOGITS.expand(2, -1)).tokens.tolist() == [4, 1]


def test_log_probs_are_over_the_whole_vocabulary_and_over_the_candidates():
    rows = Rows(
        row(0, return_log_probs=True),
        row(1, top_k=3, random_seed=1, return_log_probs=True),
        row(2, top_p=0.9, random_seed=2, return_log_probs=True),
    )
    sampled = rows.sample(LOGITS.expand(3, -1))
    whole, candidates = sampled.log_probs
    expected = LOGITS.log_softmax(-1)[sampled.tokens]
    assert torch.allclose(whole, expected, atol=1e-5)
    of_three = LOGITS[[1, 4, 2]].softmax(-1).sum()
    mass = LOGITS.softmax(-1)[[1, 4, 2]].sum()
    assert of_three == pytest.approx(1)
    assert candidates[0] == 0  # greedy: one candidate
    assert candidates[1] == pytest.approx(float(expected[1] - mass.log()), abs=1e-5)
    assert candidates[2] == pytest.approx(float(expected[2]), abs=1e-5)


def test_log_probs_come_after_temperature_and_penalties():
    rows = Rows(row(return_log_probs=True, temperature=2.0, presence_penalty=0.3))
    changed = LOGITS / 2
    changed[list(PROMPT)] -= 0.3
    sampled = rows.sample(LOGITS[None])
    best = int(changed.argmax())
    assert sampled.tokens.item() == best
    assert float(sampled.log_probs[0, 0]) == pytest.approx(
        float(changed.log_softmax(-1)[best]), abs=1e-5
    )


def test_scores_are_of_the_unmodified_logits_and_of_the_rows_that_ask():
    rows = Rows(
        row(0),
        row(1, temperature=0.5, presence_penalty=3.0, logit_bias=((3, 50.0),), num_log_probs=2),
        row(2, top_k=3, random_seed=1, return_log_probs=True),
        row(3, num_log_probs=0),
    )
    sampled = rows.sample(LOGITS.expand(4, -1))
    assert sampled.tokens[1] == 3
    assert rows.batch.scored_rows == (1, 3)
    expected = LOGITS.log_softmax(-1)
    assert torch.allclose(sampled.scores.log_probs[:, 0], expected[[3, 1]])
    assert torch.allclose(sampled.scores.log_probs[0, 1:], expected[[1, 4]])
    assert sampled.scores.ids.tolist() == [[6, 1, 4], [1, 1, 4]]


def test_top_p_decays_down_to_its_minimum_and_is_reset():
    rows = Rows(row(top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=4))
    for logits, expected in (
        ([0.0, 9.0, 0, 0, 0, 0], 0.4),
        ([0.0, 9.0, 0, 0, 0, 0], 0.3),
        ([0.0, 0.0, 0, 0, 9, 0], 0.8),
        ([0.0, 9.0, 0, 0, 0, 0], 0.4),
    ):
        rows.feed(rows.sample(torch.tensor([logits])).tokens.tolist())
        assert float(rows.states.top_p[0]) == pytest.approx(expected)


def test_uniforms_are_in_the_half_open_interval_and_spread_evenly():
    values = uniforms(torch.arange(20000), torch.zeros(20000, dtype=torch.int64))
    assert values.min() > 0
    assert values.max() <= 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert (counts - 1000).abs().max() < 5 * math.sqrt(1000)


def test_uniforms_depend_on_seed_and_step_alone():
    seeds = torch.tensor([7, 7, 8, -1])
    first, again = (uniforms(seeds, torch.tensor([0, 1, 0, 0])) for _ in range(2))
    assert torch.equal(first, again)
    assert first.unique().numel() == 4
    assert torch.equal(uniforms(seeds[:1], torch.tensor([0])), first[:1])


def test_consecutive_steps_of_a_seed_are_independent():
    steps = torch.arange(20000)
    values = uniforms(torch.full((20000,), 3), steps)
    pairs = torch.corrcoef(torch.stack([values[:-1], values[1:]]))
    assert abs(float(pairs[0, 1])) < 0.03


def test_a_seed_gives_the_same_tokens_whoever_is_beside():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    beside = Rows(*(row(slot, top_k=20, random_seed=10 + slot) for slot in range(6)))
    alone = Rows(row(0, top_k=20, random_seed=13))
    assert beside.sample(logits).tokens[3] == alone.sample(logits[3:4]).tokens[0]
