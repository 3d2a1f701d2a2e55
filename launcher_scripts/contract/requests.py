"""A request and its answer: the same objects in the client, the backend and the engine.

The tables say which tensor of the contract is which field, so client and backend cannot disagree.

One stream of responses that serves many requests of one client.

A response costs a server and its client some tens of microseconds, whatever it holds. A client with
many requests at once opens a shared stream: a request of a decoupled model whose id is `open_id()`.
Requests whose ids are `row_id()` then get their tokens in that stream, one response for all that
have any. Their own streams have one empty response at the end, or the error, and cancelling them
frees their rows. A stream that has had no requests for a while is ended by the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

# Parameter of a request with which a gateway names its client.
CLIENT_PARAMETER = "client"
# Parameter of a request with which a gateway asks for an operation on the model's server, as JSON;
# its reply is JSON, too: the bytes are the numbers of the tensor `news`, [1, 1, n].
OPERATION_PARAMETER = "launcher_operation"
# Of an exchange of weights.  drain: requests that have begun end before, new ones wait;
# mixed: they go on with new weights
ExchangeMode = Literal["drain", "mixed"]
SLEEPS = "the model sleeps: POST /wake_up makes it serve again"
EXCHANGE_MODES: tuple[ExchangeMode, ...] = get_args(ExchangeMode)
DRAIN_SECONDS = 30.0
# Metadata of a refit whose values stay in the memory of GPUs; JSON, a tensor's name -> the GPU's
# uuid; the handle, bytes and offset of its storage, and the handle and offset of that's counter,
# the handle of an event and whether it is waited for, all as torch's processes share them, bytes
# as hexadecimal digits; the tensor's first byte in the storage, and its bytes.
HANDLES = "cuda_ipc"
# Inputs with one value per row -> field of SamplingParameters.
SAMPLING_FIELDS = {
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "output_presence_penalty": "output_presence_penalty",
    "min_p": "min_p",
    "min_length": "min_length",
    "random_seed": "random_seed",
    "top_p_decay": "top_p_decay",
    "top_p_min": "top_p_min",
    "top_p_reset_ids": "top_p_reset_id",
    "beam_width": "beam_width",
    "len_penalty": "len_penalty",
    "beam_search_diversity_rate": "beam_search_diversity_rate",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
# Inputs with one value per row -> field of GenerateRequest.
REQUEST_FIELDS = {
    "start_id": "start_id",
    "end_id": "end_id",
    "is_return_log_probs": "return_log_probs",
    "num_log_probs": "num_log_probs",
    "num_prompt_log_probs": "num_prompt_log_probs",
    "is_return_context_logits": "return_context_logits",
    "is_return_context_embeddings": "return_context_embeddings",
    "is_return_attentions": "return_attentions",
    "prompt_learning_task_name_ids": "prompt_task",
    "cache_salt": "cache_salt",
    "num_speculative_tokens": "num_speculative_tokens",
}
# The same of inputs of which NO_TASK, -1, is None.
TASK_FIELDS = {"ia3_tasks": "ia3_task", "lora_task_id": "lora_adapter"}
NO_TASK = -1
# Words lists -> field of GenerateRequest.
WORD_FIELDS = {"bad_words_list": "bad_words", "stop_words_list": "stop_words"}
# Outputs -> field of ModelLogProbs: of GenerateOutput.token_log_probs, and of prompt_log_probs.
TOKEN_LOG_PROBS = {
    "token_log_probs": "log_probs",
    "token_ranks": "ranks",
    "top_log_prob_ids": "top_ids",
    "top_log_probs": "top_log_probs",
}
PROMPT_LOG_PROBS = {
    "prompt_log_probs": "log_probs",
    "prompt_ranks": "ranks",
    "prompt_top_ids": "top_ids",
    "prompt_top_log_probs": "top_log_probs",
}
NO_TOKEN = (1 << 32) - 1  # pads decoder_input_ids


class PromptType(IntEnum):
    """request_prompt_type: what request_prompt_embedding is.

    SOFT:  it comes in front of input_ids
    TABLE: p-tuning and prompt tuning: ids from prompt_learning_start_id on are its rows
    """

    NONE = 0
    SOFT = 1
    PREFIX = 2
    TABLE = 3


@dataclass(frozen=True)
class SamplingParameters:
    """Sampling parameters of one row; defaults are the contract's."""

    top_k: int = 0
    top_p: float = 0.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    output_presence_penalty: float = 0.0
    min_p: float = 0.0
    min_length: int = 0
    random_seed: int = 0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int | None = None
    beam_width: int = 1
    len_penalty: float = 0.0
    beam_search_diversity_rate: float = 0.0
    no_repeat_ngram_size: int = 0

    @property
    def penalizes(self) -> bool:
        """Return whether tokens that are there change the logits."""
        added = self.presence_penalty or self.frequency_penalty or self.output_presence_penalty
        return self.repetition_penalty != 1 or bool(added)


@dataclass(frozen=True)
class GenerateRequest:
    """One row to generate: the same object in the client, the backend and the engine.

    start_id and end_id None mean the checkpoint's. Words are tuples of token ids, logit_bias is
    pairs of a token id and what is added to its logit. num_log_probs and num_prompt_log_probs ask
    for the log-probabilities of generated and prompt tokens, and of so many of the likeliest ones
    at each place; -1: for none. guided_grammar is JSON text that says what the generated text has
    to be.
    input_ids is the encoder's input where a model has one; decoder_input_ids is then what the
    decoder is given before it generates, its start token included (empty: start_id alone).
    return_hidden_state and return_attentions ask for the encoder's own results.

    prompt_task is the number of a loaded prompt table; prompt_embedding, float [virtual tokens,
    hidden], is a table of the request's own and wins over it. Ids of input_ids from the model's
    prompt_start_id on are rows of the table; with soft_prompt the whole table comes in front of
    input_ids instead. ia3_task is the number of a loaded IA3 adapter; None: the model as it is.
    lora_adapter is the number of a loaded LoRA adapter; None: none.
    Keys and values of a prompt are shared with requests of the same cache_salt only.
    num_speculative_tokens is how many tokens a step may try at once: drafts of the text so far, or
    of the draft model.
    """

    input_ids: tuple[int, ...]
    output_len: int
    sampling: SamplingParameters = SamplingParameters()
    start_id: int | None = None
    end_id: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    guided_grammar: str | None = None
    return_log_probs: bool = False
    num_log_probs: int = -1
    num_prompt_log_probs: int = -1
    return_context_logits: bool = False
    return_context_embeddings: bool = False
    decoder_input_ids: tuple[int, ...] = ()
    return_hidden_state: bool = False
    return_attentions: bool = False
    prompt_task: int | None = None
    prompt_embedding: Any = None
    soft_prompt: bool = False
    ia3_task: int | None = None
    lora_adapter: int | None = None
    cache_salt: int = 0
    num_speculative_tokens: int = 0

    @property
    def asks_of_prompt(self) -> bool:
        """Return whether more is wanted of the prompt than what follows it."""
        scored = self.num_prompt_log_probs >= 0
        return scored or self.return_context_logits or self.return_context_embeddings


@dataclass(frozen=True, eq=False)
class ModelLogProbs:
    """Log-probabilities of n tokens by the model's own logits, in tensors.

    log_probs: float32 [n];  ranks: int32 [n], 1 for the likeliest token
    top_ids:   int32 [n, K], the likeliest tokens at each place;  top_log_probs: float32 [n, K]
    """

    log_probs: Any
    ranks: Any
    top_ids: Any
    top_log_probs: Any


@dataclass(frozen=True)
class Beam:
    """One hypothesis of a beam search; the fields are those of GenerateOutput."""

    output_ids: tuple[int, ...]
    cum_log_probs: float | None = None
    output_log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class GenerateOutput:
    """The output of one row.

    output_ids:       generated ids, an end token included
    cum_log_probs:    sum of log p over the generated tokens, p over the whole vocabulary after
                      temperature and penalties; None unless asked for
    output_log_probs: one value per generated token, as LOG_PROBS says
    context_logits:   float32 [prompt tokens, vocab], or None; the prompt is the decoder's
    context_embeddings: float32 [hidden], the sum of the prompt's states before the final norm, or
                      None
    hidden_state:     float32 [input tokens, hidden], what the encoder made of them, or None
    attentions:       float32 [layers, heads, input tokens, input tokens] of the encoder, or None
    token_log_probs:  ModelLogProbs of output_ids, or None
    prompt_log_probs: ModelLogProbs of the prompt's tokens, 0 where one has none, or None; the
                      prompt is the decoder's
    beams:            the hypotheses of a beam search, best first, whose values are the row's above
    num_cached_tokens: of the prompt, whose keys and values were in the prefix cache
    weights_versions: of the weights that the row began with, and of those that it ended with: how
                      often weights had been exchanged since the start
    """

    output_ids: tuple[int, ...]
    cum_log_probs: float | None = None
    output_log_probs: tuple[float, ...] = ()
    context_logits: Any = None
    context_embeddings: Any = None
    hidden_state: Any = None
    attentions: Any = None
    token_log_probs: ModelLogProbs | None = None
    prompt_log_probs: ModelLogProbs | None = None
    beams: tuple[Beam, ...] = ()
    num_cached_tokens: int = 0
    weights_versions: tuple[int, int] = (0, 0)

    @property
    def hypotheses(self) -> tuple[Beam, ...]:
        """All of them, also the only one without a beam search."""
        return self.beams or (Beam(self.output_ids, self.cum_log_probs, self.output_log_probs),)


_OPEN = "launcher-shared-stream"
_ROW = "launcher-shared-row"
# What the error says of a request whose stream has ended; it may be sent again without one.
NO_STREAM = "the shared stream has ended"


class SharedId(NamedTuple):
    """The contents of a request's ID. number: of the row; None: the request opens the stream."""

    stream: str
    number: int | None


class RowDelta(NamedTuple):
    """New tokens of one row; finished: 0, or the EndCode's number where those were the last.

    num_cached_tokens: prompt tokens that were in the prefix cache, with the first tokens
    """

    number: int
    ids: Sequence[int]
    finished: int
    num_cached_tokens: int = 0


PlainDelta = tuple[
    int, Sequence[int], int, int
]  # a RowNews, or a tuple like it, which is made faster


class EndCode(NamedTuple):
    """The number in a shared stream that says that a row has ended: 1, and more where its weights
    are not those of the server's start.

    version: of the weights, see GenerateOutput;  mixed: whether the row began with others
    """

    version: int = 0
    mixed: bool = False

    @classmethod
    def of(cls, versions: tuple[int, int]) -> EndCode:
        """Return the code of a row that has ended with such weights_versions."""
        return cls(versions[1], versions[0] != versions[1])

    @classmethod
    def read(cls, number: int) -> EndCode:
        """Return the code of a number other than 0."""
        return cls((number - 1) // 2, (number - 1) % 2 == 1)

    @property
    def number(self) -> int:
        """As it stands in `news`."""
        return 1 + 2 * self.version + self.mixed


def open_id(stream: str) -> str:
    """The id of a request that opens a stream. stream: a word that nobody guesses"""
    return f"{_OPEN} {stream}"


def row_id(stream: str, number: int, name: str) -> str:
    """The id of a request that takes its tokens from the stream. name: its id for people"""
    return f"{_ROW} {stream} {number} {name}"


def shared_id(request_id: str) -> SharedId | None:
    """Return the contents of an ID that `open_id` or `row_id` wrote; None for any other."""
    words = request_id.split(" ", 3)
    if words[0] == _OPEN and len(words) == 2:
        return SharedId(words[1], None)
    if words[0] == _ROW and len(words) == 4 and words[2].isdecimal():
        return SharedId(words[1], int(words[2]))
    return None


def pack(rows: Iterable[PlainDelta]) -> NDArray[np.int32]:
    """The tensor `news` of a shared stream, [1, 1, n]: of every row number, end, count, ids.

    Cached tokens are in front, as the only id of -1 - number, which older gateways skip.
    """
    numbers: list[int] = []
    for number, ids, finished, cached in rows:
        if cached:
            numbers += (-1 - number, 0, 1, cached)
        numbers += (number, finished, len(ids))
        numbers += ids
    return np.fromiter(numbers, np.int32, len(numbers)).reshape(1, 1, -1)


def unpack_deltas(packed: NDArray[np.int32]) -> Iterator[RowDelta]:
    """The rows of `pack`."""
    numbers = packed.reshape(-1).tolist()
    offset = 0
    cached: dict[int, int] = {}
    while offset < len(numbers):
        number, finished, count = numbers[offset : offset + 3]
        offset += 3 + count
        ids = tuple(numbers[offset - count : offset])
        if number < 0:
            cached[-1 - number] = ids[0]
            continue
        yield RowDelta(number, ids, finished, cached.pop(number, 0))
