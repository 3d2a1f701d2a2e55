"""The serving contract: every tensor once.

config.pbtxt, the backend and the client read this table, so the three cannot disagree. Names,
types and shapes are those of the FasterTransformer backend's gpt model (contracts.py has the
others); rows marked `extension` are this project's own optional additions, which clients of the
original never see.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

_TYPES: dict[str, type] = {"BOOL": bool, "FP32": float}  # of values; all others are integers


@dataclass(frozen=True)
class Tensor:
    """One tensor of the contract.

    name, dtype: Triton's (dtype without the TYPE_ prefix)
    dims:        without the batch axis
    scalar:      dims [1] for the client, reshaped to [] for the backend
    optional:    may be left out of a request
    ragged:      rows of different lengths are batched
    default:     value when left out; None where absence has its own meaning
    meaning:     one sentence
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    scalar: bool = True
    optional: bool = True
    ragged: bool = False
    default: float | int | bool | None = None
    extension: bool = False
    meaning: str = ""

    def value(self, value: Any) -> Any:
        """One of the tensor's values as Python's type for the dtype.

        Integers beyond 63 bits may arrive as the signed numbers of the same bits.
        """
        if self.dtype == "UINT64":
            return int(value) & ((1 << 64) - 1)
        return _TYPES.get(self.dtype, int)(value)


def array(name: str, dtype: str, dims: tuple[int, ...], meaning: str, **more: Any) -> Tensor:
    """A tensor with axes of its own."""
    return Tensor(name, dtype, dims, scalar=False, meaning=meaning, **more)


def scalar(name: str, dtype: str, default: Any, meaning: str, **more: Any) -> Tensor:
    """One value per row."""
    return Tensor(name, dtype, default=default, meaning=meaning, **more)


# Per token of the top k or, with top_p alone and in a beam search, of the whole vocabulary.
LOG_PROBS = (
    array("cum_log_probs", "FP32", (-1,), "[beam]: sum over the tokens, of the whole vocabulary"),
    array("output_log_probs", "FP32", (-1, -1), "[beam, generated]: per token; 0 if of top k 1"),
)

# What a row draws its tokens by, beside FasterTransformer's parameters; reference_sampling.py says
# in which order.
SAMPLING_EXTENSIONS = (
    scalar(
        "frequency_penalty",
        "FP32",
        0.0,
        "subtracted from a token's logit as often as it was generated",
        extension=True,
    ),
    scalar(
        "output_presence_penalty",
        "FP32",
        0.0,
        "subtracted from logits of generated tokens; those of the prompt do not count",
        extension=True,
    ),
    scalar(
        "min_p",
        "FP32",
        0.0,
        "tokens less likely than min_p times the likeliest are not sampled",
        extension=True,
    ),
    array(
        "logit_bias_ids", "INT32", (-1,), "tokens whose logits are changed; -1 pads", extension=True
    ),
    array(
        "logit_bias_values",
        "FP32",
        (-1,),
        "added to the logits of logit_bias_ids",
        extension=True,
    ),
)

MAX_GRAMMAR_BYTES = 256 * 1024
GUIDED_GRAMMAR = array(
    "guided_grammar",
    "UINT8",
    (-1,),
    "UTF-8 of a JSON object that says what the text has to be: json_schema, json_object, regex, "
    "choice or grammar, and maybe reasoning; zeros pad",
    extension=True,
)

MAX_LOG_PROBS = 20
MAX_SPECULATIVE_TOKENS = 32
# Log-softmax of the unmodified logits over the whole vocabulary.
NUM_LOG_PROBS = (
    scalar(
        "num_log_probs",
        "INT32",
        -1,
        f"how many of the likeliest tokens come with each generated one, at most {MAX_LOG_PROBS}; "
        "0: its own log-probability alone; -1: none",
        extension=True,
    ),
    scalar(
        "num_prompt_log_probs",
        "INT32",
        -1,
        "as num_log_probs, of the tokens of the prompt (of an encoder-decoder: of the decoder's)",
        extension=True,
    ),
)
MODEL_LOG_PROBS = (
    array("token_log_probs", "FP32", (-1, -1), "[beam, generated]", extension=True),
    array("token_ranks", "INT32", (-1, -1), "[beam, generated]: 1: the likeliest", extension=True),
    array(
        "top_log_prob_ids",
        "INT32",
        (-1, -1, -1),
        "[beam, generated, num_log_probs]: the likeliest tokens",
        extension=True,
    ),
    array(
        "top_log_probs",
        "FP32",
        (-1, -1, -1),
        "[beam, generated, num_log_probs]: of the likeliest tokens",
        extension=True,
    ),
    array(
        "prompt_log_probs",
        "FP32",
        (-1,),
        "[prompt]: 0 for the first, which has none",
        extension=True,
    ),
    array("prompt_ranks", "INT32", (-1,), "[prompt]: 1: the likeliest", extension=True),
    array(
        "prompt_top_ids",
        "INT32",
        (-1, -1),
        "[prompt, num_prompt_log_probs]: the likeliest tokens",
        extension=True,
    ),
    array(
        "prompt_top_log_probs",
        "FP32",
        (-1, -1),
        "[prompt, num_prompt_log_probs]: of the likeliest tokens",
        extension=True,
    ),
)

# What the text models need to send text as it comes; the ensemble asks for it.
IS_RETURN_PROGRESS = scalar(
    "is_return_progress", "BOOL", False, "return streamed_length and is_finished", extension=True
)
PROGRESS = (
    array(
        "streamed_length",
        "INT32",
        (-1,),
        "[beam]: how many generated tokens the request's earlier responses held",
        extension=True,
    ),
    array("is_finished", "BOOL", (-1,), "[beam]: no more tokens will come", extension=True),
)

# What text models are sent, in one tensor; see backends/fastertransformer/streams.py.
TOKEN_DELTAS = array(
    "news",
    "INT32",
    (-1, -1),
    "[beam, 4 + n]: tokens, of them prompt, place of the first id here, 1 after the last; the ids",
    extension=True,
)

NUM_CACHED_TOKENS = array(
    "num_cached_tokens",
    "INT32",
    (1,),
    "prompt tokens that were in the prefix cache; in the first response (enable_prefix_caching)",
    extension=True,
)

TEXT_START = array(
    "text_start", "INT32", (-1,), "[beam]: the first token that becomes text", extension=True
)

INPUT_IDS = array("input_ids", "UINT32", (-1,), "prompt token ids, right-padded", optional=False)

GPT_INPUTS = (
    replace(INPUT_IDS, ragged=True),
    scalar("input_lengths", "UINT32", None, "prompt length of the row", optional=False),
    array("request_output_len", "UINT32", (-1,), "how many tokens to generate", optional=False),
    scalar("runtime_top_k", "UINT32", 0, "sample among the k likeliest tokens; 0: see top_p"),
    scalar("runtime_top_p", "FP32", 0.0, "sample from the nucleus of mass p; 0 with k 0: greedy"),
    scalar("beam_search_diversity_rate", "FP32", 0.0, "added per sibling rank in beam search"),
    scalar("temperature", "FP32", 1.0, "divides the logits"),
    scalar("len_penalty", "FP32", 0.0, "exponent of the length in beam scores"),
    scalar("repetition_penalty", "FP32", 1.0, "divides or multiplies logits of seen tokens"),
    scalar("random_seed", "UINT64", 0, "seed of the row's own random stream"),
    scalar("is_return_log_probs", "BOOL", False, "return cum_log_probs and output_log_probs"),
    scalar("is_return_context_embeddings", "BOOL", False, "return context_embeddings"),
    scalar("beam_width", "UINT32", 1, "number of beams; 1: sampling"),
    scalar("start_id", "UINT32", None, "token that starts an empty prompt; config.ini's"),
    scalar("end_id", "UINT32", None, "token that ends a sequence; config.ini's"),
    array("stop_words_list", "INT32", (2, -1), "words that end a sequence: ids, end offsets"),
    array("bad_words_list", "INT32", (2, -1), "words never generated: ids, end offsets"),
    scalar("prompt_learning_task_name_ids", "UINT32", None, "which loaded prompt table to use"),
    array("request_prompt_embedding", "FP16", (-1, -1), "prompt embeddings of this request"),
    scalar("request_prompt_lengths", "UINT32", None, "rows of request_prompt_embedding in use"),
    scalar("request_prompt_type", "UINT32", None, "0 none, 1 soft, 2 prefix, 3 p/prompt tuning"),
    scalar("top_p_decay", "FP32", 1.0, "factor of top_p after every token"),
    scalar("top_p_min", "FP32", 1e-6, "lower bound of the decaying top_p"),
    scalar("top_p_reset_ids", "UINT32", None, "token that resets the decaying top_p"),
    scalar("presence_penalty", "FP32", 0.0, "subtracted from logits of seen tokens"),
    scalar("min_length", "UINT32", 0, "tokens to generate before end_id may come"),
    scalar(
        "no_repeat_ngram_size",
        "UINT32",
        0,
        "no run of this many tokens comes twice; 0: any may",
        extension=True,
    ),
    *SAMPLING_EXTENSIONS,
    GUIDED_GRAMMAR,
    *NUM_LOG_PROBS,
    scalar("is_return_context_logits", "BOOL", False, "return context_logits", extension=True),
    scalar("ia3_tasks", "INT32", None, "which loaded IA3 adapter to use; -1: none", extension=True),
    scalar("lora_task_id", "INT32", None, "which LoRA adapter to use; -1: none", extension=True),
    scalar(
        "cache_salt",
        "UINT64",
        0,
        "only prompts of the same salt share what is computed (enable_prefix_caching)",
        extension=True,
    ),
    scalar(
        "num_speculative_tokens",
        "UINT32",
        0,
        f"tokens that a step may try at once (drafts), {MAX_SPECULATIVE_TOKENS} at most; 0: none",
        extension=True,
    ),
    IS_RETURN_PROGRESS,
    scalar(
        "is_return_prompt",
        "BOOL",
        False,
        "the text of the row is to hold its prompt",
        extension=True,
    ),
)

GPT_OUTPUTS = (
    array("output_ids", "UINT32", (-1, -1), "[beam, time]: prompt, generated, end_id padding"),
    array("sequence_length", "UINT32", (-1,), "[beam]: prompt and generated tokens"),
    array("response_input_lengths", "INT32", (-1,), "[beam]: prompt length"),
    *LOG_PROBS,
    array("context_embeddings", "FP32", (-1, -1), "[beam, hidden]: summed context states"),
    array(
        "context_logits",
        "FP32",
        (-1, -1),
        "[prompt tokens, vocab]: logits at every prompt position",
        extension=True,
    ),
    *MODEL_LOG_PROBS,
    *PROGRESS,
    TEXT_START,
    TOKEN_DELTAS,
    NUM_CACHED_TOKENS,
)


def text(name: str, meaning: str, **more: Any) -> Tensor:
    """One text per row."""
    return Tensor(name, "STRING", (-1,), scalar=False, meaning=meaning, **more)


PREPROCESSING_INPUTS = (
    text("QUERY", "the prompt", optional=False),
    text("BAD_WORDS_DICT", "comma separated words that are never generated"),
    text("STOP_WORDS_DICT", "comma separated words that end the text"),
    array("REQUEST_OUTPUT_LEN", "UINT32", (-1,), "how many tokens to generate", optional=False),
)

PREPROCESSING_OUTPUTS = (
    array("INPUT_ID", "UINT32", (-1,), "token ids, right-padded"),
    array("REQUEST_INPUT_LEN", "UINT32", (1,), "prompt length of the row"),
    array("BAD_WORDS_IDS", "INT32", (2, -1), "ids, end offsets"),
    array("STOP_WORDS_IDS", "INT32", (2, -1), "ids, end offsets"),
    array("REQUEST_OUTPUT_LEN", "UINT32", (-1,), "as asked for"),
    array("RETURN_PROGRESS", "BOOL", (1,), "always: postprocessing needs it", extension=True),
)

POSTPROCESSING_INPUTS = (
    array("TOKENS_BATCH", "UINT32", (-1, -1), "[beam, time]: output_ids", optional=False),
    array("RESPONSE_INPUT_LENGTHS", "INT32", (-1,), "[beam]: prompt length"),
    array("sequence_length", "UINT32", (-1,), "[beam]: how many of the tokens are text"),
    *(replace(tensor, optional=True) for tensor in (*PROGRESS, TEXT_START)),
)

POSTPROCESSING_OUTPUTS = (
    array("OUTPUT", "STRING", (-1, -1), "[beam, 1]: generated text, after the prompt if asked"),
    array("OUTPUT_DELTA", "STRING", (-1, -1), "[beam, 1]: what is new of it", extension=True),
)

# The ensemble makes these itself, or has no output for what they ask for.
_NOT_IN_ENSEMBLE = (
    "bad_words_list",
    "stop_words_list",
    "is_return_context_embeddings",
    "is_return_context_logits",
    "is_return_progress",
    GUIDED_GRAMMAR.name,
    *(tensor.name for tensor in NUM_LOG_PROBS),
)


def ensemble_passes_on(inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the model's inputs that its ensemble accepts under their own names."""
    return tuple(t for t in inputs if t.optional and t.name not in _NOT_IN_ENSEMBLE)


# The ensemble's own tensors; the optional inputs of the model follow them under their own names.
ENSEMBLE_INPUTS = (
    text("INPUT_0", "the prompt"),
    array("INPUT_1", "UINT32", (-1,), "how many tokens to generate"),
    text("INPUT_2", "comma separated words that are never generated"),
    text("INPUT_3", "comma separated words that end the text"),
    *ensemble_passes_on(GPT_INPUTS),
)

ENSEMBLE_OUTPUTS = (
    array("OUTPUT_0", "STRING", (-1, -1), "[beam, 1]: generated text, after the prompt if asked"),
    array(
        "OUTPUT_DELTA",
        "STRING",
        (-1, -1),
        "[beam, 1]: generated text that earlier responses did not have",
        extension=True,
    ),
    *(t for t in GPT_OUTPUTS if t.name in ("sequence_length", "cum_log_probs", "output_log_probs")),
)
