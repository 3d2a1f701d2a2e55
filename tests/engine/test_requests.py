"""A wrong request gets an error that says what is wrong; the others go on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launcher_scripts.common.errors import RequestError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.engine.core.requests import PENALTIES_EXCLUDE, check_request
from tests.engine.small_models import engine_for, generate, random_tensors, run, small_config

CONFIG = small_config()
NAN = math.nan


@pytest.fixture(scope="module")
def engine():
    loaded = engine_for(CONFIG, random_tensors(CONFIG))
    yield loaded
    loaded.close()


def request(ids=(1, 2, 3), output_len=5, **more) -> GenerateRequest:
    outside = {"bad_words", "stop_words", "start_id", "end_id", "logit_bias"}
    outside |= {"num_log_probs", "num_prompt_log_probs"}
    fields = {name: value for name, value in more.items() if name in outside}
    sampling = {name: value for name, value in more.items() if name not in outside}
    return GenerateRequest(ids, output_len, SamplingParameters(**sampling), **fields)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request((1, 67)), r"input_ids .*outside of the vocabulary; got \[67\]; choices: 0-66"),
        (request((-1,)), "outside of the vocabulary"),
        (request((), start_id=99), "start_id .*outside of the vocabulary"),
        (request(output_len=-1), "request_output_len is negative"),
        (request(output_len=95), "need 97 positions, and the model has 96"),
        (request(output_len=1 << 31), "positions"),
        (request(temperature=NAN), "temperature is out of range; got nan"),
        (request(temperature=-1.0), "temperature is out of range"),
        (request(temperature=math.inf), "temperature is out of range"),
        (request(top_p=1.5), r"runtime_top_p is out of range; got 1.5; choices: \[0, 1\]"),
        (request(top_p=NAN), "runtime_top_p"),
        (request(top_p_decay=0.0), "top_p_decay is out of range"),
        (request(top_p_min=2.0), "top_p_min"),
        (request(repetition_penalty=0.0), "repetition_penalty is out of range"),
        (
            request(repetition_penalty=1e-38),
            r"repetition_penalty is out of range; got 1e-38; choices: \[1e-15, 1e\+15\]",
        ),
        (request(repetition_penalty=1e-45), "repetition_penalty is out of range"),
        (request(repetition_penalty=3e38), "repetition_penalty is out of range"),
        (request(repetition_penalty=NAN), "repetition_penalty"),
        (
            request(presence_penalty=3e38),
            r"presence_penalty is out of range; got 3e\+38; choices: \[-1e\+15, 1e\+15\]",
        ),
        (request(presence_penalty=-3e38), "presence_penalty is out of range"),
        (request(presence_penalty=math.inf), "presence_penalty"),
        (request(repetition_penalty=1.2, presence_penalty=0.1), PENALTIES_EXCLUDE),
        (
            request(frequency_penalty=2e18),
            r"frequency_penalty is out of range; got 2e\+18; choices: \[-1e\+15, 1e\+15\]",
        ),
        (request(frequency_penalty=NAN), "frequency_penalty is out of range"),
        (request(output_presence_penalty=-math.inf), "output_presence_penalty is out of range"),
        (request(min_p=-0.1), r"min_p is out of range; got -0.1; choices: \[0, 1\]"),
        (request(min_p=NAN), "min_p is out of range"),
        (
            request(logit_bias=((1, 0.5), (67, 1.0), (-2, 1.0))),
            r"logit_bias_ids has ids outside of the vocabulary; got \[67, -2\]; choices: 0-66",
        ),
        (
            request(logit_bias=((1, 0.5), (2, 1.0), (1, 1.0))),
            r"logit_bias_ids has an id more than once; got \[1\]",
        ),
        (request(logit_bias=((1, math.inf),)), "logit_bias_values is out of range; got inf"),
        (
            request(num_log_probs=21),
            r"num_log_probs is out of range; got 21; choices: \[-1, 20\]",
        ),
        (request(num_log_probs=-2), "num_log_probs is out of range; got -2"),
        (request(num_prompt_log_probs=21), "num_prompt_log_probs is out of range; got 21"),
        (request(num_prompt_log_probs=-2), "num_prompt_log_probs is out of range"),
        (
            request(num_log_probs=0, beam_width=2),
            "num_log_probs is not for beam searches.*; got 'beam_width 2'",
        ),
        (request(beam_width=0), r"beam_width is out of range; got 0; choices: \[1, 64\]"),
        (request(beam_width=65), "beam_width is out of range; got 65"),
        (request(beam_width=9), "beam_width rows, and the engine runs 8 at a time; got 9"),
        (request(len_penalty=NAN), "len_penalty is out of range"),
        (request(len_penalty=33.0), r"len_penalty is out of range; got 33.0; choices: \[-32, 32\]"),
        (request(beam_search_diversity_rate=math.inf), "beam_search_diversity_rate is out of"),
        (request(bad_words=((1,), ())), "bad_words_list has an empty word"),
        (request(bad_words=tuple((id,) for id in range(67))), "bad_words_list forbids every token"),
        (
            request(bad_words=tuple((id,) for id in range(66)), min_length=1),
            "bad_words_list forbids every token",
        ),
        (request(stop_words=((70,),)), "stop_words_list has ids outside of the vocabulary"),
    ],
)
def test_what_is_wrong_is_named(wrong, message):
    with pytest.raises(RequestError, match=message):
        check_request(wrong, CONFIG, cache_tokens=1000, slots=8)


def test_every_problem_is_named_at_once():
    with pytest.raises(RequestError) as raised:
        check_request(request((99,), top_p=2.0, temperature=NAN), CONFIG, 1000, 8)
    assert str(raised.value).startswith("3 problems in the request:")


@pytest.mark.parametrize(
    "right",
    [
        request(output_len=94),
        request(output_len=0),
        request(()),
        request(end_id=50256),
        request(temperature=0.0, top_k=5000, top_p=1.0, random_seed=(1 << 64) - 1),
        request(repetition_penalty=0.5),
        request(presence_penalty=-1.0, top_p_min=0.0),
        request(bad_words=tuple((id,) for id in range(66))),
    ],
)
def test_what_is_unusual_passes(right):
    check_request(right, CONFIG, cache_tokens=1000, slots=8)


def float32(value: float) -> float:
    return float(np.float32(value))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": float32(1e-38)},
        {"temperature": float32(3e38)},
        {"temperature": 0.0, "repetition_penalty": float32(1e-15)},
        {"temperature": 0.0, "repetition_penalty": float32(1e15)},
        {"repetition_penalty": 0.01},
        {"presence_penalty": float32(1e15)},
        {"presence_penalty": float32(-1e15)},
        {"top_p": float32(1e-45)},
        {"top_p": 1.0, "top_p_decay": float32(1e-45), "top_p_min": 0.0},
        {"top_k": 3, "top_p": float32(1e-45)},
        {"len_penalty": -32.0},
        {"beam_search_diversity_rate": float32(3e38)},
        {"beam_search_diversity_rate": float32(-3e38)},
        {"beam_search_diversity_rate": 0.5, "len_penalty": 32.0},
        {"beam_search_diversity_rate": float32(1e-45), "len_penalty": 32.0},
    ],
)
def test_what_may_be_asked_for_gives_log_probabilities(engine, parameters, width):
    """At the ends of every range too; a hypothesis that should not be there has -1e9 more."""
    sampling = SamplingParameters(beam_width=width, **parameters)
    count = 40 if "len_penalty" in parameters else 12  # 40^32 is no float32
    output = run(engine, (1, 2, 3), count, sampling=sampling, return_log_probs=True)
    for beam in output.hypotheses:
        values = (beam.cum_log_probs, *beam.output_log_probs)
        assert all(map(math.isfinite, values))
        if width > 1:
            assert values[0] == pytest.approx(sum(values[1:]), rel=1e-3)


def test_rope_has_no_position_table_but_a_cache():
    config = small_config(position_embedding="rope")
    check_request(request(output_len=500), config, cache_tokens=1000, slots=8)
    with pytest.raises(RequestError, match="which holds 100"):
        check_request(request(output_len=500), config, cache_tokens=100, slots=8)


def test_every_hypothesis_needs_room():
    """In whole blocks, of which they share those that the prompt fills."""
    wide = request(output_len=48, beam_width=4)
    check_request(wide, CONFIG, cache_tokens=256, slots=4, block_tokens=16)
    with pytest.raises(RequestError, match=r"48 and beam_width 4 need 256 tokens .* holds 240"):
        check_request(wide, CONFIG, cache_tokens=240, slots=4, block_tokens=16)
    long = request(tuple(range(20)), output_len=12, beam_width=4)
    check_request(long, CONFIG, cache_tokens=80, slots=4, block_tokens=16)
    with pytest.raises(RequestError, match="need 80 tokens"):
        check_request(long, CONFIG, cache_tokens=79, slots=4, block_tokens=16)


def test_the_others_go_on():
    engine = engine_for(CONFIG, random_tensors(CONFIG))
    expected = generate(engine, (1, 2), 6)
    futures = [engine.submit(request(ids)) for ids in ((1, 2), (99,), (1, 2), (-3,), (1, 2))]
    answers = [future.exception(60) or future.result().output_ids[:5] for future in futures]
    assert [type(answer) is RequestError for answer in answers] == [False, True, False, True, False]
    assert answers[0] == answers[2] == answers[4] == tuple(expected[:5])
    engine.close()


def test_no_more_of_the_likeliest_tokens_than_there_are():
    small = small_config(vocab_size=7, start_id=0, end_id=6)
    check_request(request(num_log_probs=7), small, 96, 8)
    with pytest.raises(RequestError, match=r"num_log_probs is out of range; got 8.*\[-1, 7\]"):
        check_request(request(num_log_probs=8), small, 96, 8)


def test_the_largest_penalties_leave_numbers(engine):
    """At the temperature that scales the most, and with tokens that come again."""
    sampling = SamplingParameters(
        repetition_penalty=1e15,
        frequency_penalty=1e15,
        output_presence_penalty=1e15,
        temperature=0.0,
        top_k=3,
    )
    more = {"logit_bias": ((3, 1e15), (4, -1e15)), "return_log_probs": True, "num_log_probs": 1}
    answer = run(engine, (3, 3, 4), 40, sampling=sampling, **more)
    assert math.isfinite(answer.cum_log_probs)
    assert len(set(answer.output_ids)) == 40
