"""Whether the engine can do what a request asks; a wrong one is answered before it is run."""

from __future__ import annotations

import math

from launcher_scripts.errors import Problems, RequestError
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.protocol import GenerateRequest, SamplingParameters

MOST_IDS = 1 << 32
PENALTIES_EXCLUDE = (
    "Found ambiguous parameters repetition_penalty and presence_penalty which are mutually "
    "exclusive. Please provide one of repetition_penalty or presence_penalty."
)


def effective_prompt(request: GenerateRequest, config: GPTConfig) -> tuple[int, ...]:
    """The prompt as the model sees it: an empty one is the start token alone."""
    if request.input_ids:
        return request.input_ids
    return (config.start_id if request.start_id is None else request.start_id,)


def check_request(request: GenerateRequest, config: GPTConfig, cache_tokens: int) -> None:
    """Raise one RequestError that names everything wrong with the request."""
    problems = Problems("the request")
    _check_ids(problems, request, config)
    _check_lengths(problems, request, config, cache_tokens)
    _check_sampling(problems, request.sampling)
    problems.raise_if_any(RequestError)


def _check_ids(problems: Problems, request: GenerateRequest, config: GPTConfig) -> None:
    vocabulary = range(config.vocab_size)
    valid = (f"0-{config.vocab_size - 1}",)
    wrong = [token for token in effective_prompt(request, config) if token not in vocabulary]
    if wrong:
        what = "input_ids has ids" if request.input_ids else "start_id is an id"
        problems.add(f"{what} outside of the vocabulary", got=wrong[:5], choices=valid)
    if request.end_id is not None and not 0 <= request.end_id < MOST_IDS:
        problems.add("end_id is no token id", got=request.end_id)
    for name, words in (
        ("bad_words_list", request.bad_words),
        ("stop_words_list", request.stop_words),
    ):
        if any(not word for word in words):
            problems.add(f"{name} has an empty word")
        wrong = [token for word in words for token in word if token not in vocabulary]
        if wrong:
            problems.add(f"{name} has ids outside of the vocabulary", got=wrong[:5], choices=valid)


def _check_lengths(
    problems: Problems, request: GenerateRequest, config: GPTConfig, cache_tokens: int
) -> None:
    prompt, output_len = len(effective_prompt(request, config)), request.output_len
    if output_len < 0:
        problems.add("request_output_len is negative", got=output_len)
        return
    needed = prompt + max(output_len - 1, 0)
    if config.position_embedding == "learned" and needed > config.max_positions:
        problems.add(
            f"the prompt's {prompt} tokens and request_output_len {output_len} need {needed} "
            f"positions, and the model has {config.max_positions}"
        )
    elif needed > cache_tokens:
        problems.add(
            f"the prompt's {prompt} tokens and request_output_len {output_len} need {needed} "
            f"tokens in the key/value cache, which holds {cache_tokens}"
        )


def _check_sampling(problems: Problems, sampling: SamplingParameters) -> None:
    at_least_zero = (
        "temperature",
        "top_k",
        "min_length",
        "random_seed",
    )
    for name in at_least_zero:
        _check_range(problems, name, getattr(sampling, name), 0, math.inf)
    _check_range(problems, "repetition_penalty", sampling.repetition_penalty, 0, math.inf, True)
    _check_range(problems, "presence_penalty", sampling.presence_penalty, -math.inf, math.inf)
    _check_range(problems, "runtime_top_p", sampling.top_p, 0, 1)
    _check_range(problems, "top_p_decay", sampling.top_p_decay, 0, 1, True)
    _check_range(problems, "top_p_min", sampling.top_p_min, 0, 1)
    if sampling.repetition_penalty != 1 and sampling.presence_penalty != 0:
        problems.add(PENALTIES_EXCLUDE)
    if sampling.beam_width != 1:
        problems.add(
            "beam search is not supported", got=sampling.beam_width, choices=("beam_width 1",)
        )


def _check_range(
    problems: Problems,
    name: str,
    value: float,
    low: float,
    high: float,
    above_low: bool = False,
) -> None:
    """A finite number in [low, high], or in (low, high]."""
    inside = low <= value <= high and not (above_low and value == low)
    if not (math.isfinite(value) and inside):
        bracket = "(" if above_low or low == -math.inf else "["
        end = ")" if high == math.inf else "]"
        problems.add(
            f"{name} is out of range", got=value, choices=(f"{bracket}{low}, {high}{end}",)
        )
