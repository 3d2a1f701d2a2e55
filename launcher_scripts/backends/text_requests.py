"""Requests for text: what each asks of the token model, and which outputs its client gets.

Copied beside the text models of a repository, so it imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray
from text_names import SAME_AS
from text_tensors import (
    BadRequestError,
    Tensors,
    input_tensor,
    language_ids,
    pad_right,
    split_words,
    word_table,
)
from tokenizer import SpecialIds, Tokenizer

TODAYS = {original: todays for todays, original in SAME_AS.items()}
WORDS = {"bad_words_list": "INPUT_2", "stop_words_list": "INPUT_3"}
# What the token model is not given as it comes.
READ_HERE = {
    *("INPUT_0", "INPUT_1", "INPUT_2", "INPUT_3"),
    *("stream", "exclude_input_in_output", "is_return_prompt"),
    *("source_language", "target_language"),
}
# What says how the decoder begins, instead of the checkpoint.
DECODER = ("decoder_input_ids", "start_id")
LOG_PROBS = ("cum_log_probs", "output_log_probs")
TODAYS_OUTPUTS = {"text_output", *LOG_PROBS}


@dataclass(frozen=True)
class TextRequest:
    """One request, encoded.

    inputs:      the token model's, those that it needs first
    asked:       the outputs asked of the token model
    outputs:     the client's outputs
    rows:        how many there are
    with_prompt: BOOL [rows], whose text begins with the prompt
    todays:      the request has today's names
    streams:     responses come as the text does, and text_output holds what is new; else one comes
    """

    inputs: list[Any]
    asked: list[str]
    outputs: frozenset[str]
    rows: int
    with_prompt: NDArray[Any]
    todays: bool
    streams: bool


class Reader:
    """Turns a request of Triton's into a TextRequest, as config.pbtxt says."""

    def __init__(self, tensors: Tensors, tokenizer: Tokenizer) -> None:
        config, parameters = tensors.config, tensors.parameters
        self.token_model = parameters["token_model"]
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.length_type = _type_of(config, "sequence_length")
        self.outputs = frozenset(output["name"] for output in config["output"])
        self._tensors = tensors
        self._tokenizer = tokenizer
        self._pad_id = int(parameters["pad_id"])
        self._special = SpecialIds.of(parameters)
        self._ids, self._lengths = parameters["INPUT_ID"], parameters["REQUEST_INPUT_LEN"]
        self._output_len = parameters.get("REQUEST_OUTPUT_LEN")
        self._prompt_counts = "prompt_counts" in parameters

    @property
    def generates(self) -> bool:
        """Return whether the token model makes text; else it is an encoder."""
        return self._output_len is not None

    def read(self, request: Any) -> TextRequest:
        """Raises BadRequestError or ParameterError."""
        request = self._tensors.complete(request)
        values = self._inputs(request)
        prompts = self._tensors.texts(request, values.get("INPUT_0", "INPUT_0"))
        if prompts is None:
            raise BadRequestError(f"the prompt is missing: {self._said('INPUT_0')}")
        languages = self._languages(request, "source_language", len(prompts))
        local: Sequence[int | None] = languages or [None] * len(prompts)
        rows = [
            self._special.between(language, None).surround(self._tokenizer.encode(prompt))
            for prompt, language in zip(prompts, local, strict=True)
        ]
        lengths = np.array([[len(row)] for row in rows], dtype=np.uint32)
        inputs = {
            self._ids: self._tensors.tensor(self._ids, pad_right(rows, self._pad_id)),
            self._lengths: self._tensors.tensor(self._lengths, lengths),
        }
        if self._output_len is not None:
            output_len = self._output_lengths(request, values, lengths)
            inputs[self._output_len] = self._tensors.tensor(self._output_len, output_len)
            for name, source in WORDS.items():
                more = self._end_ids(values) if name == "stop_words_list" else ()
                if source in values or more:
                    words = self._words(request, values.get(source), len(rows), more)
                    inputs[name] = self._tensors.tensor(name, words)
        for original, name in values.items():
            if original not in READ_HERE:
                inputs[original] = self._passed_on(request, original, name)
        started = self._started(request, values, len(rows))
        if started is not None:
            inputs["decoder_input_ids"] = self._tensors.tensor("decoder_input_ids", started)
        todays = values["INPUT_0"] == "text_input"
        outputs = self._requested(request, todays)
        streams = self.decoupled and self._flag(request, values, "stream", not todays)
        passed_on = sorted(name for name in outputs if not self.generates or name in LOG_PROBS)
        return TextRequest(
            inputs=list(inputs.values()),
            asked=["news", *passed_on] if self.generates else passed_on,
            outputs=outputs,
            rows=len(rows),
            with_prompt=self._with_prompt(request, values, len(rows)),
            todays=todays,
            streams=streams,
        )

    def _inputs(self, request: Any) -> dict[str, str]:
        """The original's name of each input -> the name that it came under."""
        inputs: dict[str, str] = {}
        for tensor in request.inputs():
            name = tensor.name()
            original = SAME_AS.get(name, name)
            if original in inputs:
                raise BadRequestError(f"{inputs[original]} and {name} are the same; send one")
            inputs[original] = name
        return inputs

    def _languages(self, request: Any, tensor: str, rows: int) -> list[int] | None:
        """The ids of the languages that a request names, one of each row."""
        names = self._tensors.texts(request, tensor)
        if names is not None and len(names) != rows:
            raise BadRequestError(f"{tensor} takes one per prompt; got {len(names)} for {rows}")
        return language_ids(names, tensor, self._special, self._tokenizer)

    def _started(self, request: Any, inputs: dict[str, str], rows: int) -> NDArray[Any] | None:
        """UINT32 [rows, n]: what the decoder begins with; None: as the model or the request says.

        All rows have as many.
        """
        decoder_names = [name for name in DECODER if name in inputs]
        languages = self._languages(request, "target_language", rows)
        if languages is not None:
            if decoder_names:
                raise BadRequestError(f"target_language and {decoder_names[0]} exclude each other")
            openings = [self._special.between(None, language).decoder for language in languages]
        elif self._special.decoder and not decoder_names:
            openings = [self._special.decoder] * rows
        else:
            return None
        return np.array(openings, dtype=np.uint32)

    def _said(self, original: str) -> str:
        """Both names of an input."""
        return f"{TODAYS[original]} or {original}"

    def _output_lengths(
        self, request: Any, inputs: dict[str, str], lengths: NDArray[Any]
    ) -> NDArray[Any]:
        """UINT32 [rows, 1]; max_tokens never counts the prompt."""
        if "INPUT_1" not in inputs:
            raise BadRequestError(
                f"how many tokens to generate is missing: {self._said('INPUT_1')}"
            )
        counts = self._counts(request, inputs["INPUT_1"])
        if self._prompt_counts and inputs["INPUT_1"] == "max_tokens":
            counts = counts + lengths
        return counts.astype(np.uint32)

    def _counts(self, request: Any, name: str) -> NDArray[Any]:
        """Numbers that may have come with a sign, unsigned."""
        counts = self._tensors.given(request, name)
        if counts.min() < 0:
            raise BadRequestError(f"{name} must be at least 0; got {counts.min()}")
        return counts.astype(np.uint32)

    def _passed_on(self, request: Any, original: str, name: str) -> Any:
        """An input for the token model, under its name there and with its type."""
        tensor = input_tensor(request, name)
        if name in SIGNED and tensor.as_numpy().dtype == np.int32:
            return self._tensors.tensor(original, self._counts(request, name))
        if name == original:
            return tensor
        return pb_utils.Tensor.from_dlpack(original, tensor.to_dlpack())

    def _end_ids(self, inputs: dict[str, str]) -> Sequence[int]:
        """The ids that end a text besides the model's; a request's own end_id stands alone."""
        return () if "end_id" in inputs else self._special.ends

    def _words(
        self, request: Any, name: str | None, rows: int, more: Sequence[int]
    ) -> NDArray[Any]:
        """The table of a words list: comma separated text of each row, or its words one by one.

        name: of the input, None where the request has none
        more: token ids that are words of every row
        """
        if name is None:
            words: list[Any] = [[] for _ in range(rows)]
        elif name in SAME_AS:
            words = self._tensors.word_rows(request, name)
        else:
            words = [split_words(line) for line in self._tensors.texts(request, name) or ()]
        if len(words) != rows:
            raise BadRequestError(f"{name} takes one row per prompt; got {len(words)} for {rows}")
        return word_table(words, self._tokenizer, more)

    def _flag(self, request: Any, inputs: dict[str, str], name: str, default: bool) -> bool:
        """A flag that holds for all rows: that of the first."""
        if name not in inputs:
            return default
        return bool(self._tensors.given(request, name).reshape(-1)[0])

    def _with_prompt(self, request: Any, inputs: dict[str, str], rows: int) -> NDArray[Any]:
        if "exclude_input_in_output" in inputs:
            flags = ~self._tensors.given(request, "exclude_input_in_output")
        elif "is_return_prompt" in inputs:
            flags = self._tensors.given(request, "is_return_prompt")
        else:
            return np.zeros(rows, dtype=np.bool_)
        return np.broadcast_to(flags.reshape(-1), rows)

    def _requested(self, request: Any, todays: bool) -> frozenset[str]:
        """The outputs named by the client; where it names none, those of its inputs' names."""
        named = frozenset(request.requested_output_names())
        if named != self.outputs or "OUTPUT_0" not in named:
            return named
        return named & TODAYS_OUTPUTS if todays else named - {"text_output"}


# Numbers that today's text models take with a sign, and the token model without.
SIGNED = {"top_k", "beam_width", "min_length", "end_id"}


def _type_of(config: dict[str, Any], output: str) -> Any:
    """The numpy type of an output; None of one that there is not."""
    output_config = pb_utils.get_output_config_by_name(config, output)
    return (
        None
        if output_config is None
        else pb_utils.triton_string_to_numpy(output_config["data_type"])
    )
