"""Interactive text generation: the contract of a model whose requests go on where others ended.

Triton's sequence batcher takes one request of a session at a time, so every tensor has an axis of
one in front of the rows of the session; the original's clients send it.
"""

from __future__ import annotations

from dataclasses import replace

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.contract.contracts import CONTRACTS, Contract
from launcher_scripts.contract.tensors import Tensor, scalar
from launcher_scripts.contract.text import TextContract

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
