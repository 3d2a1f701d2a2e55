"""What the gateway asks of an engine, whatever lies between the two."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class RowRequest:
    """One row to generate.

    prompt_ids:       of an encoder-decoder the encoder's input
    decoder_ids:      what the decoder of an encoder-decoder is given; (): its start token
    top_k:            0: of the whole vocabulary
    presence_penalty, frequency_penalty: for generated tokens, as OpenAI means them
    end_id:           the token that ends the row; None: none does
    stop_ids:         further tokens that do
    beam_width:       2 or more: a beam search, which has no log-probabilities
    grammar:          what the text has to be, the bytes of guided_grammar; None: anything
    grammar_parameter: of the client's request, where it says so
    client:           whose it is, so that a server can share its compilers among clients
    cache_salt:       prompts share keys and values with those of the same salt
    lora_adapter:     the number of one; None: none
    num_speculative_tokens: how many tokens a step may try at once (drafts)
    log_probs:        how many of the likeliest tokens come with each generated one; None: nothing,
                      0: the log-probability of the token alone
    prompt_log_probs: the same for the prompt's tokens
    timeout:          seconds
    whole:            nothing is shown before all of it is there: it may be begun again
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    decoder_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    min_tokens: int = 0
    end_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    beam_width: int = 1
    length_penalty: float = 1.0
    grammar: bytes | None = None
    grammar_parameter: str = "response_format"
    client: str = ""
    cache_salt: int = 0
    lora_adapter: int | None = None
    num_speculative_tokens: int = 0
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    timeout: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class TokenLogProb:
    """log p of one token by the unmodified logits; `top` has the likeliest (id, log p)."""

    token_id: int
    log_prob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Increment(NamedTuple):
    """What is new of a row.

    token_ids:        generated, the end token included
    log_probs:        of these tokens, where asked for
    prompt_log_probs: of the prompt's tokens, None for the first; in one increment, where asked for
    finished:         nothing comes after this one
    beams:            the ids of a beam search's hypotheses, best first, in its last increment; it
                      has no token_ids
    begins_again:     what has come so far does not count: another server begins the row again
    num_cached_tokens: prompt tokens that were in the server's prefix cache; in the first increment
    states:           of an encoder alone: float32 [prompt tokens, hidden]
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[TokenLogProb, ...] = ()
    prompt_log_probs: tuple[TokenLogProb | None, ...] | None = None
    finished: bool = False
    beams: tuple[tuple[int, ...], ...] = ()
    begins_again: bool = False
    num_cached_tokens: int = 0
    states: Any = None


class Backend(Protocol):
    """Generates rows of one model."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts that begin alike are computed once."""
        ...

    def generate(self, request: RowRequest) -> AsyncGenerator[Increment, None]:
        """An async generator; the row is given up when it is closed.

        Raises ApiError for what the engine refuses, ServerLost when it is gone.
        """
        ...
