"""Checks of requests; a wrong one gets an error before it is run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from launcher_scripts.common.errors import Problems, RequestError
from launcher_scripts.contract.requests import GenerateRequest, SamplingParameters
from launcher_scripts.contract.tensors import MAX_LOG_PROBS, MAX_SPECULATIVE_TOKENS
from launcher_scripts.engine.core.session import Session, check_session, learned_positions
from launcher_scripts.models.adapters import adapters_of
from launcher_scripts.models.bart import BartConfig
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.t5 import T5Config


def prompt_start_id(config: ModelConfig) -> int:
    """The first id that is a virtual token: config.ini's, or the first beyond the vocabulary."""
    return adapters_of(config).prompt_start_id or config.vocab_size


def real_ids(request: GenerateRequest, start: int) -> tuple[int, ...]:
    """input_ids without virtual tokens, which begin with the id `start`."""
    if request.soft_prompt or not _has_prompt(request):
        return request.input_ids
    return tuple(token for token in request.input_ids if token < start)


def with_prompt(
    request: GenerateRequest, ids: tuple[int, ...], config: ModelConfig
) -> tuple[int, ...]:
    """ids as the engine has them: -1 - n stands for row n of the prompt table."""
    if not _has_prompt(request):
        return ids
    if request.soft_prompt:
        return (*range(-1, -1 - _length(request, config), -1), *ids)
    start = prompt_start_id(config)
    return tuple(start - 1 - token if token >= start else token for token in ids)


def prompt_in_session(
    session: Session, request: GenerateRequest, prompt: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the ids that the request adds to the cache: the token left from before, and its own
    prompt.

    A request without ids goes on where the session is, be it after an end token.
    """
    if request.input_ids or not session.positions:
        return (*session.pending, *prompt)
    return session.pending or session.finished


def check_adapters(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    """Check that the model has the tables and vectors that the request names."""
    parts = adapters_of(config)
    if request.ia3_task is not None:
        if not parts.ia3_num_tasks:
            problems.add("Cannot request ia3_tasks, model has no IA3 adapters")
        elif not 0 <= request.ia3_task < parts.ia3_num_tasks:
            choices = (f"0-{parts.ia3_num_tasks - 1}",)
            problems.add(
                "Requested IA3 tasks aren't in the range", got=request.ia3_task, choices=choices
            )
    is_fixed = parts.lora_slots is None  # else see ranks/operations.py
    if is_fixed and request.lora_adapter not in (None, *range(len(parts.lora_names))):
        problems.add(
            "lora_task_id names no LoRA adapter of the model",
            got=request.lora_adapter,
            choices=[f"{number} ({name})" for number, name in enumerate(parts.lora_names)] or None,
        )
    if request.prompt_embedding is not None:
        _check_embedding(problems, request, config)
    elif request.prompt_task is not None:
        tasks = parts.prompt_tasks
        if not 0 <= request.prompt_task < len(tasks):
            problems.add(
                "prompt_learning_task_name_ids names no loaded prompt table",
                got=request.prompt_task,
                choices=[f"{number} ({task.name})" for number, task in enumerate(tasks)] or None,
            )
            return
    if request.soft_prompt or not _has_prompt(request):
        return
    length, start = _length(request, config), prompt_start_id(config)
    if request.prompt_embedding is not None and max(request.input_ids, default=-1) < start:
        problems.add(
            "request_prompt_embedding has no effect: input_ids has no virtual tokens",
            choices=(f"ids {start}-{start + length - 1}",) if length else (),
        )
    beyond = [token for token in request.input_ids if token >= start + length]
    if beyond:
        problems.add(
            f"input_ids has virtual tokens beyond the {length} of the row's prompt",
            got=beyond[:5],
            choices=(f"{start}-{start + length - 1}",) if length else (),
        )


def _check_embedding(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    shape = tuple(request.prompt_embedding.shape)
    if len(shape) != 2 or shape[1] != config.hidden_size:
        problems.add(
            "request_prompt_embedding must be [virtual tokens, hidden size]",
            got=list(shape),
            choices=(f"[n, {config.hidden_size}]",),
        )
    elif not bool(request.prompt_embedding.isfinite().all()):
        problems.add("request_prompt_embedding has values that are no numbers")


def _has_prompt(request: GenerateRequest) -> bool:
    return request.prompt_task is not None or request.prompt_embedding is not None


def _length(request: GenerateRequest, config: ModelConfig) -> int:
    """Rows of the request's prompt table, 0 without one."""
    if request.prompt_embedding is not None:
        return int(request.prompt_embedding.shape[0])
    tasks = adapters_of(config).prompt_tasks
    if request.prompt_task is None or not 0 <= request.prompt_task < len(tasks):
        return 0
    return tasks[request.prompt_task].length


MAX_IDS = 1 << 32
ENCODER_DECODERS = (T5Config, BartConfig)
MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 32  # an exponent that every length still fits
MAX_PENALTY = 1e15  # what logits stay finite in float32 under, at any temperature
PENALTIES_EXCLUDE = (
    "Found ambiguous parameters repetition_penalty and presence_penalty which are mutually "
    "exclusive. Please provide one of repetition_penalty or presence_penalty."
)


def parts(request: GenerateRequest, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The request as the model sees it: what the encoder reads, and the (decoder's) prompt.

    Without an encoder there is no source. An empty prompt is the start token alone; an encoder
    alone has none. Virtual tokens are negative.
    """
    start = (config.start_id if request.start_id is None else request.start_id,)
    if not isinstance(config, ENCODER_DECODERS):
        return (), with_prompt(request, request.input_ids or start, config)
    source = with_prompt(request, request.input_ids, config)
    if config.encoder_only:
        return source, ()
    return source, request.decoder_input_ids or start


def may_grow(request: GenerateRequest, config: ModelConfig) -> bool:
    """Return whether a row can lose its place and be computed again from its ids alone, with the
    same answer.
    """
    return not (request.asks_of_prompt or _needs_every_step(request, config))


def _needs_every_step(request: GenerateRequest, config: ModelConfig) -> str:
    """Why the row's tokens have to be computed one by one and once; "" where they need not be."""
    sampling = request.sampling
    if isinstance(config, ENCODER_DECODERS):
        return "models with an encoder"
    if sampling.beam_width > 1:
        return "beam searches"
    changes = sampling.top_p_decay != 1 or sampling.top_p_min > sampling.top_p
    if changes and sampling.top_k == 0 and sampling.top_p > 0:
        return "a top_p that changes"
    if isinstance(config, GPTConfig) and config.rotary_scaling == "dynamic":
        return "models with dynamic NTK"
    return ""


def warm_up_request(config: ModelConfig, cache_tokens: int) -> GenerateRequest:
    """A few tokens, or one state of an encoder; fits the smallest cache that serves anything."""
    start = min(config.start_id, config.vocab_size - 1)
    if isinstance(config, T5Config) and config.encoder_only:
        return GenerateRequest((start,), output_len=0, return_hidden_state=True)
    longest = learned_positions(config) or cache_tokens
    length = max(1, min(4, cache_tokens - 1, longest))
    return GenerateRequest((start,), output_len=length, start_id=start, end_id=config.vocab_size)


def check_request(
    request: GenerateRequest,
    config: ModelConfig,
    cache_tokens: int,
    slots: int,
    session: Session | None = None,
    block_tokens: int = 1,
) -> None:
    """Raise one RequestError that names everything wrong with the request.

    cache_tokens, slots: what the engine has for all rows in flight, the tokens in blocks of
    block_tokens; a beam search takes as many slots as it is wide. session: what the request goes on
    with
    """
    problems = Problems("the request")
    _check_outputs(problems, request, config)
    check_adapters(problems, request, config)
    _check_ids(problems, request, config)
    if session is None:
        _check_lengths(problems, request, config, cache_tokens, block_tokens)
    else:
        prompt = len(prompt_in_session(session, request, parts(request, config)[1]))
        if not prompt:
            problems.add("input_ids is empty, and the session has no token to go on from")
        check_session(problems, session, request, prompt, config, cache_tokens, block_tokens)
    _check_sampling(problems, request.sampling)
    _check_biases(problems, request, config)
    _check_log_probs(problems, request, config)
    _check_beams(problems, request.sampling, slots)
    if request.num_speculative_tokens:
        _check_speculation(problems, request, config, session)
    problems.raise_if_any(RequestError)


def _check_outputs(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    """Check that the model has the parts that the request is about."""
    if not isinstance(config, ENCODER_DECODERS):
        if request.decoder_input_ids or request.return_hidden_state:
            problems.add("decoder_input_ids and hidden states need a model with an encoder")
        return
    if not config.encoder_only:
        return
    if request.output_len or request.decoder_input_ids:
        problems.add("an encoder alone generates nothing", got=request.output_len)
    if not request.return_hidden_state:
        problems.add("an encoder alone answers with its hidden states, which were not asked for")


def _check_ids(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    valid = (f"0-{config.vocab_size - 1}",)
    source, prompt = parts(request, config)
    started = not (request.decoder_input_ids if source else request.input_ids)
    values = {
        "input_ids": real_ids(request, prompt_start_id(config)),
        "decoder_input_ids": request.decoder_input_ids,
        "start_id": prompt[-1:] if started else (),
    }
    for name, ids in values.items():
        wrong = _beyond(ids, config.vocab_size)
        if wrong:
            message = f"{name} is an id" if name == "start_id" else f"{name} has ids"
            problems.add(f"{message} outside of the vocabulary", got=wrong[:5], choices=valid)
    if isinstance(config, ENCODER_DECODERS) and not source:
        problems.add("input_ids is empty, and the encoder needs at least one token")
    if request.end_id is not None and not 0 <= request.end_id < MAX_IDS:
        problems.add("end_id is no token id", got=request.end_id)
    for name, words in (
        ("bad_words_list", request.bad_words),
        ("stop_words_list", request.stop_words),
    ):
        if any(not word for word in words):
            problems.add(f"{name} has an empty word")
        wrong = [token for word in words for token in _beyond(word, config.vocab_size)]
        if wrong:
            problems.add(f"{name} has ids outside of the vocabulary", got=wrong[:5], choices=valid)
    forbidden = {word[0] for word in request.bad_words if len(word) == 1}
    if request.sampling.min_length:
        forbidden.add(config.end_id if request.end_id is None else request.end_id)
    if len(forbidden) >= config.vocab_size and forbidden.issuperset(range(config.vocab_size)):
        problems.add("bad_words_list forbids every token of the vocabulary")


def _beyond(ids: Sequence[int], size: int) -> list[int]:
    """The ids that are not in a vocabulary of `size` tokens."""
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return []
    return [token for token in ids if not 0 <= token < size]


def _check_lengths(
    problems: Problems,
    request: GenerateRequest,
    config: ModelConfig,
    cache_tokens: int,
    block_tokens: int,
) -> None:
    source, prompt = (len(part) for part in parts(request, config))
    output_len = request.output_len
    output = "request_output_len" if isinstance(config, GPTConfig) else "max_output_len"
    if output_len < 0:
        problems.add(f"{output} is negative", got=output_len)
        return
    needed = prompt + max(output_len - 1, 0)
    max_positions = learned_positions(config)
    if max_positions is not None and source > max_positions:
        problems.add(
            f"input_ids has {source} tokens, and the encoder has {max_positions} positions"
        )
    if max_positions is not None and needed > max_positions:
        problems.add(
            f"the prompt's {prompt} tokens and {output} {output_len} need {needed} "
            f"positions, and the model has {max_positions}"
        )
        return
    width = max(1, request.sampling.beam_width) if output_len else 1
    # Hypotheses share the full blocks of the prompt.
    blocks = [-(-tokens // block_tokens) for tokens in (source, needed)]
    shared = prompt // block_tokens * (width - 1)
    total = (blocks[0] + width * blocks[1] - shared) * block_tokens
    if total > cache_tokens:
        before = f"the input's {source} tokens, " if source else ""
        times = f" and beam_width {width}" if width > 1 else ""
        problems.add(
            f"{before}the prompt's {prompt} tokens and {output} {output_len}{times} need "
            f"{total} tokens in the key/value cache, which holds {cache_tokens}"
        )


def _check_sampling(problems: Problems, sampling: SamplingParameters) -> None:
    at_min_zero = (
        "temperature",
        "top_k",
        "min_length",
        "random_seed",
        "no_repeat_ngram_size",
    )
    for name in at_min_zero:
        _check_range(problems, name, getattr(sampling, name), 0, math.inf)
    repetition, presence = sampling.repetition_penalty, sampling.presence_penalty
    _check_range(problems, "repetition_penalty", repetition, 1 / MAX_PENALTY, MAX_PENALTY)
    _check_range(problems, "presence_penalty", presence, -MAX_PENALTY, MAX_PENALTY)
    for name in ("frequency_penalty", "output_presence_penalty"):
        _check_range(problems, name, getattr(sampling, name), -MAX_PENALTY, MAX_PENALTY)
    _check_range(problems, "min_p", sampling.min_p, 0, 1)
    _check_range(problems, "runtime_top_p", sampling.top_p, 0, 1)
    _check_range(problems, "top_p_decay", sampling.top_p_decay, 0, 1, True)
    _check_range(problems, "top_p_min", sampling.top_p_min, 0, 1)
    if repetition != 1 and presence != 0:
        problems.add(PENALTIES_EXCLUDE)


def _check_biases(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    if not request.logit_bias:
        return
    ids = [token for token, _ in request.logit_bias]
    wrong = _beyond(ids, config.vocab_size)
    if wrong:
        problems.add(
            "logit_bias_ids has ids outside of the vocabulary",
            got=wrong[:5],
            choices=(f"0-{config.vocab_size - 1}",),
        )
    twice = [token for token, times in Counter(ids).items() if times > 1]
    if twice:
        problems.add("logit_bias_ids has an id more than once", got=twice[:5])
    for _, value in request.logit_bias:
        _check_range(problems, "logit_bias_values", value, -MAX_PENALTY, MAX_PENALTY)


def _check_log_probs(problems: Problems, request: GenerateRequest, config: ModelConfig) -> None:
    max_count = min(MAX_LOG_PROBS, config.vocab_size)
    for name in ("num_log_probs", "num_prompt_log_probs"):
        _check_range(problems, name, getattr(request, name), -1, max_count)
    width = request.sampling.beam_width
    if request.guided_grammar is not None and width > 1:
        problems.add("guided_grammar is not for beam searches", got=f"beam_width {width}")
    if request.num_log_probs >= 0 and width > 1:
        problems.add(
            "num_log_probs is not for beam searches; is_return_log_probs is",
            got=f"beam_width {width}",
        )


def _check_beams(problems: Problems, sampling: SamplingParameters, slots: int) -> None:
    _check_range(problems, "beam_width", sampling.beam_width, 1, MAX_BEAMS)
    if slots < sampling.beam_width <= MAX_BEAMS:
        problems.add(
            f"a beam search takes beam_width rows, and the engine runs {slots} at a time",
            got=sampling.beam_width,
            change="max_batch_size in config.pbtxt",
        )
    _check_range(
        problems, "len_penalty", sampling.len_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
    )
    rate = sampling.beam_search_diversity_rate
    _check_range(problems, "beam_search_diversity_rate", rate, -math.inf, math.inf)


def _check_speculation(
    problems: Problems, request: GenerateRequest, config: ModelConfig, session: Session | None
) -> None:
    name, number = "num_speculative_tokens", request.num_speculative_tokens
    _check_range(problems, name, number, 0, MAX_SPECULATIVE_TOKENS)
    reason = _needs_every_step(request, config)
    if request.guided_grammar is not None:
        reason = "guided_grammar"
    if session is not None:
        reason = "sessions"
    if reason:
        problems.add(f"{name} is not for {reason}", got=number, choices=("0",))


def _check_range(
    problems: Problems,
    name: str,
    value: float,
    low: float,
    high: float,
    above_low: bool = False,
) -> None:
    """A finite number in [low, high], or in (low, high]."""
    in_range = low <= value <= high and not (above_low and value == low)
    if not (math.isfinite(value) and in_range):
        bracket = "(" if above_low or low == -math.inf else "["
        end = ")" if high == math.inf else "]"
        problems.add(
            f"{name} is out of range", got=value, choices=(f"{bracket}{low:g}, {high:g}{end}",)
        )
