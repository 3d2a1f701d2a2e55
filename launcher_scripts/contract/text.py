"""The text models around a model, and today's names of their tensors (text_names.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from launcher_scripts.contract.tensors import (
    ENSEMBLE_INPUTS,
    LOG_PROBS,
    Tensor,
    array,
    scalar,
    text,
)
from launcher_scripts.contract.text_names import SAME_AS

# What belongs to the text model alone.
_TEXT_ONLY = ("stream", "exclude_input_in_output")


def _signed(name: str) -> Tensor:
    """The ensemble's input under today's name, whole numbers with a sign."""
    original = SAME_AS.get(name, name)
    (tensor,) = (tensor for tensor in ENSEMBLE_INPUTS if tensor.name == original)
    return replace(tensor, name=name, dtype="INT32" if tensor.dtype == "UINT32" else tensor.dtype)


# Of a model of several languages.
LANGUAGES = (
    text("source_language", "code of the prompt's language; the checkpoint's", extension=True),
    text("target_language", "code of the text's language; the checkpoint's", extension=True),
)
_INPUTS = (
    replace(text("text_input", "the prompt", optional=False), dims=(1,)),
    scalar("max_tokens", "INT32", None, "how many tokens to generate", optional=False),
    text("bad_words", "[words]: never generated"),
    text("stop_words", "[words]: each ends the text"),
    *map(
        _signed,
        (
            "top_k",
            "top_p",
            "temperature",
            "length_penalty",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "output_presence_penalty",
            "min_p",
            "min_length",
            "random_seed",
            "beam_width",
            "end_id",
        ),
    ),
    scalar("stream", "BOOL", False, "a response for every piece of text, from a decoupled model"),
    scalar("exclude_input_in_output", "BOOL", True, "text_output begins after the prompt"),
    _signed("return_log_probs"),
    *LANGUAGES,
)
TEXT_OUTPUT = array(
    "text_output",
    "STRING",
    (-1,),
    "of every beam of every row: the text, or with stream what is new of it",
    extension=True,
)
TEXT_OUTPUTS = (
    TEXT_OUTPUT,
    *LOG_PROBS,
)


def _todays_inputs(supported: Iterable[str]) -> tuple[Tensor, ...]:
    """Return the inputs that are valid for a model with the inputs `supported`.

    supported: names of the ensemble's inputs
    """
    names = {*supported, *_TEXT_ONLY}
    return tuple(tensor for tensor in _INPUTS if SAME_AS.get(tensor.name, tensor.name) in names)


def _with_todays(ensemble: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The ensemble's inputs, and the new names of those beside them.

    All optional, and unsigned as the ensemble's own numbers are.
    """
    inputs = tuple(ensemble)
    names = {tensor.name for tensor in inputs}
    added = tuple(
        replace(
            tensor,
            dtype="UINT32" if tensor.dtype == "INT32" else tensor.dtype,
            optional=True,
            extension=True,
        )
        for tensor in _todays_inputs(names)
        if tensor.name not in names
    )
    return (*inputs, *added)


def declared(tensors: tuple[Tensor, ...], data_type: str) -> tuple[Tensor, ...]:
    """The tensors, with the compute type for a request's embeddings and an encoder's results."""
    computed = ("request_prompt_embedding", "output_hidden_state", "output_attentions")
    return changed(tensors, computed, dtype=data_type.upper())


def changed(
    tensors: tuple[Tensor, ...], names: tuple[str, ...], **changes: object
) -> tuple[Tensor, ...]:
    """The tensors, those called `names` with the changes."""
    return tuple(
        replace(tensor, **changes) if tensor.name in names else tensor  # type: ignore[arg-type]
        for tensor in tensors
    )


@dataclass(frozen=True)
class TextContract:
    """The text models around a model: preprocessing, postprocessing (if any), ensemble and text.

    model_inputs:  input of the model -> output of preprocessing; other optional inputs of the
                   ensemble go to the model under their own names
    prompt_counts: how many tokens to generate includes the prompt's
    todays_names:  there is a model that takes today's names, and the ensemble does, too
    """

    preprocessing_inputs: tuple[Tensor, ...]
    preprocessing_outputs: tuple[Tensor, ...]
    postprocessing_inputs: tuple[Tensor, ...]
    postprocessing_outputs: tuple[Tensor, ...]
    ensemble_inputs: tuple[Tensor, ...]
    ensemble_outputs: tuple[Tensor, ...]
    model_inputs: Mapping[str, str]
    prompt_counts: bool = False
    todays_names: bool = False

    def tensors(self, role: str, data_type: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs and outputs of a text model around a model that computes in `data_type`."""
        if role == "preprocessing":
            return self.preprocessing_inputs, self.preprocessing_outputs
        if role == "postprocessing":
            return self.postprocessing_inputs, self.postprocessing_outputs
        if role == "text":
            return _todays_inputs(tensor.name for tensor in self.ensemble_inputs), TEXT_OUTPUTS
        inputs, outputs = self.ensemble_inputs, self.ensemble_outputs
        if self.todays_names:
            inputs, outputs = _with_todays(inputs), (*outputs, TEXT_OUTPUT)
        # Outputs are FP32 in every model: HTTP has no JSON for FP16 and BF16.
        return declared(inputs, data_type), outputs

    @property
    def roles(self) -> tuple[str, ...]:
        """The text models there are."""
        role_names = {
            "preprocessing": self.preprocessing_outputs,
            "postprocessing": self.postprocessing_outputs,
            "ensemble": self.ensemble_outputs,
            "text": self.todays_names,
        }
        return tuple(role for role, exists in role_names.items() if exists)
