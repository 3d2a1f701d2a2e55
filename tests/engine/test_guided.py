"""Rows that follow a guide: only what may come does, whatever runs beside or ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine import engine as engine_module
from launcher_scripts.engine.core import row as row_module
from launcher_scripts.engine.core.requests import check_request
from launcher_scripts.engine.engine import Engine
from tests.checkpoint import reference_forward_gpt
from tests.engine.small_models import engine_for, load_engine, random_tensors, run, small_config
from tests.engine.small_t5 import NEMO, SOURCE, Plain, t5_config, t5_tensors

VOCAB = 67
CONFIG = small_config(end_id=VOCAB)
TENSORS = random_tensors(CONFIG)
WEIGHTS = {name: torch.from_numpy(values) for name, values in TENSORS.items()}
PROMPT = (5, 60, 11, 11, 2)


class Steps:
    """A guide that lets one of a set of ids come at each step; what comes next hangs on the token.

    An even token lets the ids of `even` come after it, an odd one those of `odd`.
    """

    def __init__(self, first: Sequence[int], even: Sequence[int], odd: Sequence[int], count: int):
        self._allowed, self._after = set(first), (set(even), set(odd))
        self._left = count
        self.asked = 0

    @property
    def finished(self) -> bool:
        return self._left == 0

    def is_ready(self, timeout: float) -> bool:  # noqa: ARG002
        return True

    def mask(self) -> bytes:
        self.asked += 1
        bits = np.zeros(3 * 32, dtype=np.uint8)
        bits[list(self._allowed)] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> bool:
        taken = token in self._allowed
        self._left -= 1
        self._allowed = self._after[token % 2]
        return taken


def steps(count: int = 9) -> Steps:
    return Steps((3, 8, 31, 32, 63, 64, 66), (1, 33, 65, 66), (0, 2, 5, 30, 64), count)


class LateSteps(Steps):
    """The second mask is there once `mask_there` is set; or it fails."""

    def __init__(self, error: RequestError | None = None) -> None:
        super().__init__((3, 8, 31, 32, 63, 64, 66), (1, 33, 65, 66), (0, 2, 5, 30, 64), 9)
        self.mask_there = threading.Event()
        self._error = error

    def is_ready(self, timeout: float) -> bool:  # noqa: ARG002
        if self.asked == 1 and self._error is not None:
            raise self._error
        return self.asked != 1 or self.mask_there.is_set()


def submit(
    engine: Engine, ids: tuple[int, ...], guide: Steps | None, count: int = 20, **more: object
) -> Future[GenerateOutput]:
    return engine.submit(GenerateRequest(ids, count, **more), guide=guide)


def expected(text: tuple[int, ...], guide: Steps) -> tuple[int, ...]:
    """The likeliest token that may come, by a forward pass without cache for each."""
    generated: list[int] = []
    while not guide.finished:
        ids = torch.tensor([(*text, *generated)])
        logits = reference_forward_gpt.logits(WEIGHTS, CONFIG, ids)[0, -1]
        token = max(guide._allowed, key=lambda each: float(logits[each]))
        assert guide.accept(token)
        generated.append(token)
    return tuple(generated)


@pytest.fixture(params=[0, 1], ids=["in_step", "a_step_ahead"])
def engine(request, monkeypatch):
    """On the CPU too, a step may be launched before the one before it was read."""
    monkeypatch.setitem(engine_module.STEPS_AHEAD, "cpu", request.param)
    loaded = engine_for(CONFIG, TENSORS)
    yield loaded
    loaded.close()


def test_the_likeliest_token_that_may_come_does(engine):
    guide = steps()
    answer = submit(engine, PROMPT, guide).result(60)
    assert answer.output_ids == expected(PROMPT, steps())
    assert len(answer.output_ids) == guide.asked == 9


def test_rows_beside_have_their_own(engine):
    plain = [run(engine, PROMPT[:count], 12).output_ids for count in (2, 4)]
    futures = [
        submit(engine, PROMPT, steps()),
        submit(engine, PROMPT[:2], None, 12),
        submit(engine, PROMPT[1:], steps(5)),
        submit(engine, PROMPT[:4], None, 12),
    ]
    first, second, third, fourth = (future.result(60).output_ids for future in futures)
    assert (first, third) == (expected(PROMPT, steps()), expected(PROMPT[1:], steps(5)))
    assert [second, fourth] == plain


def test_a_late_mask_holds_up_no_other_row(engine):
    late, guided = LateSteps(), steps()
    waiting = submit(engine, PROMPT, late)
    beside = submit(engine, PROMPT, guided)
    assert run(engine, PROMPT[:4], 12).output_ids
    assert beside.result(60).output_ids == expected(PROMPT, steps())
    assert not waiting.done()
    late.mask_there.set()
    assert waiting.result(60).output_ids == expected(PROMPT, steps())


def test_a_guide_that_fails_ends_its_row_alone(engine):
    failing = submit(engine, PROMPT, LateSteps(RequestError("too complex")))
    beside = submit(engine, PROMPT, steps())
    with pytest.raises(RequestError, match="too complex"):
        failing.result(60)
    assert beside.result(60).output_ids == expected(PROMPT, steps())


def test_a_mask_that_never_comes_ends_its_row(engine, monkeypatch):
    monkeypatch.setattr(row_module, "MAX_MASK_SECONDS", 0.2)
    with pytest.raises(RequestError, match=r"too complex: .*; choices: at most 0\.2 s"):
        submit(engine, PROMPT, LateSteps()).result(60)


def test_drawn_tokens_are_those_that_may_come(engine):
    seen = set()
    for seed in range(20):
        sampling = SamplingParameters(top_p=1.0, temperature=9.0, random_seed=seed)
        guide = steps(6)
        answer = submit(engine, PROMPT, guide, sampling=sampling).result(60)
        again = steps(6)
        assert all(again.accept(token) for token in answer.output_ids)
        seen.add(answer.output_ids)
    assert len(seen) > 10


def test_other_ends_hold_too(engine):
    wanted = expected(PROMPT, steps())
    assert submit(engine, PROMPT, steps(), 4).result(60).output_ids == wanted[:4]
    cut = wanted[: wanted.index(wanted[3]) + 1]
    assert submit(engine, PROMPT, steps(), end_id=wanted[3]).result(60).output_ids == cut


def test_log_probabilities_are_the_unguided_ones(engine):
    answer = submit(engine, PROMPT, steps(), num_log_probs=1, num_prompt_log_probs=0).result(60)
    ids = torch.tensor([(*PROMPT, *answer.output_ids)])
    logits = reference_forward_gpt.logits(WEIGHTS, CONFIG, ids)[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1)[range(9), answer.output_ids]
    assert torch.allclose(answer.token_log_probs.log_probs, wanted, atol=1e-4)
    assert max(answer.token_log_probs.ranks) > 1


def test_where_nothing_may_come_the_row_alone_fails(engine):
    other = submit(engine, PROMPT, None)
    nothing = submit(engine, PROMPT, Steps((3,), (), (), 5))
    bad_words = tuple((token,) for token in (3, 8, 31, 32, 63, 64, 66))
    forbidden = submit(engine, PROMPT, steps(), bad_words=bad_words)
    for future in (nothing, forbidden):
        with pytest.raises(RequestError, match="guided_grammar and the request's other inputs"):
            future.result(60)
    assert other.result(60).output_ids == run(engine, PROMPT, 20).output_ids


def test_a_prompt_that_is_only_scored_needs_no_mask(engine):
    guide = steps()
    answer = submit(engine, PROMPT, guide, 0, num_prompt_log_probs=0).result(60)
    assert (answer.output_ids, len(answer.prompt_log_probs.ranks)) == ((), 5)


def test_progress_is_told_token_by_token(engine):
    seen = []
    future = engine.submit(
        GenerateRequest(PROMPT, 20),
        lambda each: seen.append(each.output().output_ids),
        guide=steps(4),
    )
    wanted = expected(PROMPT, steps(4))
    assert future.result(60).output_ids == wanted
    assert seen == [wanted[:count] for count in (1, 2, 3)]


def test_a_beam_search_has_no_guide():
    request = GenerateRequest(
        PROMPT, 3, SamplingParameters(beam_width=2), guided_grammar='{"regex": "a"}'
    )
    with pytest.raises(RequestError, match="guided_grammar is not for beam searches; got 'beam_w"):
        check_request(request, CONFIG, 96, 8)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_agree_with_one(tmp_path, tp, pp):
    together = load_engine(tmp_path, CONFIG, TENSORS, tp, pp)
    futures = [submit(together, PROMPT, steps()), submit(together, PROMPT[:2], None, 6)]
    guided, plain = (future.result(60).output_ids for future in futures)
    together.close()
    alone = engine_for(CONFIG, TENSORS)
    assert guided == expected(PROMPT, steps())
    assert plain == run(alone, PROMPT[:2], 6).output_ids
    alone.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_t5_decodes_what_may_come(ahead, monkeypatch):
    monkeypatch.setitem(engine_module.STEPS_AHEAD, "cpu", ahead)
    config = t5_config(**NEMO)
    tensors = t5_tensors(config)
    plain, guide = Plain(config, tensors), steps(6)
    engine = engine_for(config, tensors)
    answer = submit(engine, SOURCE, steps(6)).result(60)
    engine.close()
    text = [0]
    while not guide.finished:
        logits = plain.logits(SOURCE, text)[-1]
        text.append(max(guide._allowed, key=lambda each: float(logits[each])))
        assert guide.accept(text[-1])
    assert list(answer.output_ids) == text[1:]
