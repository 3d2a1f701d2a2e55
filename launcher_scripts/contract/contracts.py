"""The serving contract of every model_type: its tensors, and those of the text models around it.

Names, types and shapes are those of the FasterTransformer backend's gpt, t5 and t5-encoder models;
rows marked `extension` are this project's own.

Interactive text generation: the contract of a model whose requests go on where others ended.

Triton's sequence batcher takes one request of a session at a time, so every tensor has an axis of
one in front of the rows of the session; the original's clients send it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.contract.tensors import (
    ENSEMBLE_INPUTS,
    ENSEMBLE_OUTPUTS,
    GPT_INPUTS,
    GPT_OUTPUTS,
    GUIDED_GRAMMAR,
    INPUT_IDS,
    IS_RETURN_PROGRESS,
    LOG_PROBS,
    MODEL_LOG_PROBS,
    NUM_LOG_PROBS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    PROGRESS,
    SAMPLING_EXTENSIONS,
    TOKEN_DELTAS,
    Tensor,
    array,
    ensemble_passes_on,
    scalar,
)
from launcher_scripts.contract.text import LANGUAGES, TextContract, changed, declared


def _named(tensors: tuple[Tensor, ...], *names: str) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.name in names)


def _without(tensors: tuple[Tensor, ...], *names: str) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.name not in names)


_PROMPT_TABLES = (
    "prompt_learning_task_name_ids",
    "request_prompt_embedding",
    "request_prompt_lengths",
)
# What T5 takes under the same names and with the same meaning.
_T5_SHARED = (
    "runtime_top_k",
    "runtime_top_p",
    "beam_search_diversity_rate",
    "temperature",
    "len_penalty",
    "repetition_penalty",
    "random_seed",
    "is_return_log_probs",
    "beam_width",
    "start_id",
    "end_id",
    "stop_words_list",
    "bad_words_list",
    *_PROMPT_TABLES,
    "top_p_decay",
    "top_p_min",
    "top_p_reset_ids",
    "presence_penalty",
    "min_length",
    "no_repeat_ngram_size",
    *(tensor.name for tensor in (*SAMPLING_EXTENSIONS, GUIDED_GRAMMAR, *NUM_LOG_PROBS)),
)

_T5_ENCODED = (
    replace(INPUT_IDS, meaning="the encoder's token ids, right-padded"),
    scalar("sequence_length", "UINT32", None, "how many of the row's ids count", optional=False),
)
_IA3_TASKS = scalar("ia3_tasks", "INT32", None, "which loaded IA3 adapter to use; -1: none")

T5_INPUTS = (
    *_T5_ENCODED,
    scalar("max_output_len", "UINT32", None, "how many tokens to generate", optional=False),
    *_named(GPT_INPUTS, *_T5_SHARED),
    _IA3_TASKS,
    array(
        "decoder_input_ids",
        "UINT32",
        (-1,),
        "what the decoder is given before it generates, start token included; 4294967295 pads",
        extension=True,
    ),
    scalar("is_return_context_logits", "BOOL", False, "return context_logits", extension=True),
    IS_RETURN_PROGRESS,
)

T5_OUTPUTS = (
    array("output_ids", "INT32", (-1, -1), "[beam, time]: generated, end_id, then 0"),
    array("sequence_length", "INT32", (-1,), "[beam]: generated tokens, the end token included"),
    *LOG_PROBS,
    array(
        "context_logits",
        "FP32",
        (-1, -1),
        "[decoder tokens, vocab]: logits at every position of decoder_input_ids",
        extension=True,
    ),
    *MODEL_LOG_PROBS,
    *PROGRESS,
    TOKEN_DELTAS,
)

T5_ENCODER_INPUTS = (
    *_T5_ENCODED,
    scalar("is_return_attentions", "BOOL", False, "return output_attentions"),
    _IA3_TASKS,
    *(replace(tensor, extension=True) for tensor in _named(GPT_INPUTS, *_PROMPT_TABLES)),
)

T5_ENCODER_OUTPUTS = (
    array("output_hidden_state", "FP32", (-1, -1), "[tokens, hidden]: states of the encoder"),
    array("output_attentions", "FP32", (-1, -1, -1, -1), "[layers, heads, tokens, tokens]"),
)

# What other models take and Agm, of one fork of the FasterTransformer backend, does not.
_NOT_IN_AGM = (
    INPUT_IDS.name,
    "input_lengths",
    "request_output_len",
    "is_return_context_embeddings",
    *_PROMPT_TABLES,
    "request_prompt_type",
    "ia3_tasks",
    "lora_task_id",
)
AGM_INPUTS = (
    INPUT_IDS,
    scalar("sequence_length", "UINT32", None, "prompt length of the row", optional=False),
    scalar("max_output_len", "UINT32", None, "most tokens, the prompt's included", optional=False),
    *_without(GPT_INPUTS, *_NOT_IN_AGM),
)

AGM_OUTPUTS = changed(
    _without(GPT_OUTPUTS, "context_embeddings"), ("output_ids", "sequence_length"), dtype="INT32"
)

_GENERATING = {
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "is_return_progress": "RETURN_PROGRESS",
}

GPT_TEXT = TextContract(
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    ENSEMBLE_INPUTS,
    ENSEMBLE_OUTPUTS,
    {
        INPUT_IDS.name: "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        **_GENERATING,
    },
    todays_names=True,
)


_OUTPUT_LEN = ("REQUEST_OUTPUT_LEN", "INPUT_1")
_TEXT_INPUTS = ("INPUT_0", "INPUT_1", "INPUT_2", "INPUT_3")

T5_TEXT = TextContract(
    changed(PREPROCESSING_INPUTS, _OUTPUT_LEN, dims=(1,)),
    changed(PREPROCESSING_OUTPUTS, _OUTPUT_LEN, dims=(1,)),
    changed(
        _without(POSTPROCESSING_INPUTS, "RESPONSE_INPUT_LENGTHS", "text_start"),
        ("TOKENS_BATCH", "sequence_length"),
        dtype="INT32",
    ),
    changed(POSTPROCESSING_OUTPUTS, ("OUTPUT",), meaning="[beam, 1]: generated text"),
    (
        *changed(_named(ENSEMBLE_INPUTS, *_TEXT_INPUTS), _OUTPUT_LEN, dims=(1,)),
        *ensemble_passes_on(T5_INPUTS),
    ),
    (
        *changed(
            _named(ENSEMBLE_OUTPUTS, "OUTPUT_0", "OUTPUT_DELTA"),
            ("OUTPUT_0",),
            meaning="[beam, 1]: generated text",
        ),
        *_named(T5_OUTPUTS, "sequence_length", "cum_log_probs", "output_log_probs"),
    ),
    {
        INPUT_IDS.name: "INPUT_ID",
        "sequence_length": "REQUEST_INPUT_LEN",
        "max_output_len": "REQUEST_OUTPUT_LEN",
        **_GENERATING,
    },
    todays_names=True,
)

AGM_TEXT = replace(
    GPT_TEXT,
    preprocessing_inputs=T5_TEXT.preprocessing_inputs,
    preprocessing_outputs=T5_TEXT.preprocessing_outputs,
    postprocessing_inputs=changed(
        POSTPROCESSING_INPUTS, ("TOKENS_BATCH", "sequence_length"), dtype="INT32"
    ),
    ensemble_inputs=(
        *changed(_named(ENSEMBLE_INPUTS, *_TEXT_INPUTS), _OUTPUT_LEN, dims=(1,)),
        *ensemble_passes_on(AGM_INPUTS),
    ),
    ensemble_outputs=changed(ENSEMBLE_OUTPUTS, ("sequence_length",), dtype="INT32"),
    model_inputs=T5_TEXT.model_inputs,
    prompt_counts=True,
)

T5_ENCODER_TEXT = TextContract(
    _named(PREPROCESSING_INPUTS, "QUERY"),
    _named(PREPROCESSING_OUTPUTS, "INPUT_ID", "REQUEST_INPUT_LEN"),
    (),
    (),
    (
        *_named(ENSEMBLE_INPUTS, "INPUT_0"),
        *(tensor for tensor in T5_ENCODER_INPUTS if tensor.optional),
    ),
    T5_ENCODER_OUTPUTS,
    {INPUT_IDS.name: "INPUT_ID", "sequence_length": "REQUEST_INPUT_LEN"},
)


@dataclass(frozen=True)
class Contract:
    """Inputs and outputs of a served model; a row of CONTRACTS.

    family:       the model family it serves
    text:         the text models around it
    encoder_only: only the encoder of an encoder-decoder is loaded
    batched:      Triton may merge requests, rows of different lengths included
    """

    family: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    text: TextContract
    encoder_only: bool = False
    batched: bool = False

    @cached_property
    def by_name(self) -> Mapping[str, Tensor]:
        """Every input by its name."""
        return {tensor.name: tensor for tensor in self.inputs}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The inputs that every request has."""
        return tuple(tensor.name for tensor in self.inputs if not tensor.optional)

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """The inputs that a request's parameters may stand for, and their types."""
        return {
            tensor.name: tensor.dtype for tensor in self.inputs if tensor.scalar and tensor.optional
        }

    @cached_property
    def lengths(self) -> str:
        """The input that says how many of a row's ids count."""
        return "input_lengths" if "input_lengths" in self.by_name else "sequence_length"

    @cached_property
    def output_len(self) -> str | None:
        """The input that says how many tokens to generate, if the model generates any."""
        names = ("request_output_len", "max_output_len")
        return next((name for name in names if name in self.by_name), None)

    @cached_property
    def returns_prompts(self) -> bool:
        """Return whether output_ids begin with the prompt."""
        return any(tensor.name == "response_input_lengths" for tensor in self.outputs)

    @property
    def counts_prompts(self) -> bool:
        """Return whether the number of tokens that a request asks for includes its prompt's."""
        return self.text.prompt_counts

    @property
    def scores_prompts(self) -> bool:
        """Return whether context_logits are the prompt's; an encoder-decoder's are its output's."""
        return self.returns_prompts

    def declared_inputs(self, data_type: str) -> tuple[Tensor, ...]:
        """The inputs as config.pbtxt declares them for a model that computes in `data_type`."""
        return declared(self.inputs, data_type)

    def declared_outputs(self, data_type: str) -> tuple[Tensor, ...]:
        """The outputs as config.pbtxt declares them for a model that computes in `data_type`."""
        return declared(self.outputs, data_type)


_NOT_IN_BART = (*_PROMPT_TABLES, "ia3_tasks")
BART_INPUTS = _without(T5_INPUTS, *_NOT_IN_BART)
BART_TEXT = replace(
    T5_TEXT, ensemble_inputs=(*_without(T5_TEXT.ensemble_inputs, *_NOT_IN_BART), *LANGUAGES)
)

# model_type in config.pbtxt -> its contract
CONTRACTS = {
    "GPT": Contract("gpt", GPT_INPUTS, GPT_OUTPUTS, GPT_TEXT, batched=True),
    "T5": Contract("t5", T5_INPUTS, T5_OUTPUTS, T5_TEXT),
    "T5-Encoder": Contract(
        "t5",
        T5_ENCODER_INPUTS,
        T5_ENCODER_OUTPUTS,
        T5_ENCODER_TEXT,
        encoder_only=True,
    ),
    "Agm": Contract("agm", AGM_INPUTS, AGM_OUTPUTS, AGM_TEXT),
    "BART": Contract("bart", BART_INPUTS, T5_OUTPUTS, BART_TEXT),
}


# The sequence batcher's own tensors, which no client sends: INT32 [1, 1].
CONTROLS = {"START": "CONTROL_SEQUENCE_START", "END": "CONTROL_SEQUENCE_END"}
MAX_SEQUENCE_IDLE_MICROSECONDS = 60_000_000

_SESSION_INPUTS = (
    scalar("session_len", "UINT32", None, "most tokens of the session; its first request says it"),
    scalar("memory_len", "UINT32", None, "how many of the last tokens attention covers"),
)
_SESSION_MEANING = {
    "output_ids": "[beam, time]: the whole session, end_id padding",
    "sequence_length": "[beam]: tokens of the whole session",
    "response_input_lengths": "[beam]: tokens of the session before what is generated now",
    "context_embeddings": "[beam, hidden]: summed context states of this request's prompt",
}


SESSION_MODEL_TYPES = ("GPT",)


def served_contract(model_type: str, *, sessions: bool) -> Contract:
    """The contract of a model_type, with or without sessions. Raises ConfigError."""
    if sessions and model_type not in SESSION_MODEL_TYPES:
        raise ConfigError(
            problem(
                "interactive text generation needs a decoder-only model",
                got=model_type,
                choices=SESSION_MODEL_TYPES,
                change="export.triton_deployment.interactive or sequence_batching in config.pbtxt",
            )
        )
    contract = CONTRACTS[model_type]
    return in_sessions(contract) if sessions else contract


def in_sessions(contract: Contract) -> Contract:
    """The contract of the same model with sessions."""
    text = contract.text
    return replace(
        contract,
        inputs=_led((*contract.inputs, *_SESSION_INPUTS)),
        outputs=_led(contract.outputs),
        text=TextContract(
            _led(text.preprocessing_inputs),
            _led(text.preprocessing_outputs),
            _led(text.postprocessing_inputs),
            _led(text.postprocessing_outputs),
            _led((*text.ensemble_inputs, *_SESSION_INPUTS)),
            _led(text.ensemble_outputs),
            text.model_inputs,
        ),
        batched=False,
    )


def _led(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors with one more axis in front."""
    return tuple(
        replace(
            tensor,
            dims=(-1, *tensor.dims),
            ragged=False,
            meaning=_SESSION_MEANING.get(tensor.name, tensor.meaning),
        )
        for tensor in tensors
    )
