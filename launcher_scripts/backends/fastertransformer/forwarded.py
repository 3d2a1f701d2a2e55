"""Requests that text models send on: each has a key by which it can be cancelled.

A text model of the same server gives its request the parameter `forwarded`, a key that nobody can
guess, and may later send another request whose parameter `cancel` is that key. Triton itself does
not hand a cancellation on to the requests that a model makes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class Errand:
    """What the parameters of a request say about it.

    key:     that of a request which a text model sends on; empty: it is a client's own
    cancels: the key of the request to be cancelled; empty: this is no cancellation
    streams: whether the text model wants tokens as they come
    """

    key: str
    cancels: str
    streams: bool


def errand_of(request: Any) -> Errand:
    """The parameters that text models set; others mean nothing."""
    parameters = json.loads(request.parameters() or "{}")
    key, cancels = (str(parameters.get(name, "")) for name in ("forwarded", "cancel"))
    return Errand(key, cancels, bool(parameters.get("stream", True)))


class Cancellable(Protocol):
    """A request on its way."""

    def cancel(self) -> None: ...


class Forwarded:
    """The requests of text models that are on their way, by key. Any thread may use it."""

    def __init__(self) -> None:
        self._open: dict[str, Cancellable] = {}

    def add(self, key: str, answer: Cancellable) -> None:
        self._open[key] = answer

    def remove(self, key: str) -> None:
        self._open.pop(key, None)

    def cancel(self, key: str) -> None:
        """End the request; one that has ended or is not there yet stays as it is."""
        answer = self._open.get(key)
        if answer is not None:
            answer.cancel()


def news(tensors: Mapping[str, torch.Tensor], progress: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor `news` of a response: INT32 [B, beam, 4 + n].

    Of every beam: how many tokens it has, how many of them are the prompt, the place of the first
    id that follows here, 1 where no more will come; then the ids from that place on, then zeros.
    A beam whose tokens are all news begins with its prompt.

    tensors:  output_ids, sequence_length and, of models that give it, response_input_lengths
    progress: streamed_length, is_finished
    """
    ids, lengths = tensors["output_ids"].numpy(), tensors["sequence_length"].numpy()
    prompts = np.zeros_like(lengths)
    if "response_input_lengths" in tensors:
        prompts = np.broadcast_to(tensors["response_input_lengths"].numpy(), lengths.shape)
    streamed = progress["streamed_length"].numpy()
    starts = np.where(streamed > 0, prompts + streamed, 0).astype(np.int64)
    longest = max(0, int((lengths - starts).max()))
    packed = np.zeros((*lengths.shape, 4 + longest), dtype=np.int32)
    for place in np.ndindex(lengths.shape):
        start, end = int(starts[place]), int(lengths[place])
        finished = bool(progress["is_finished"].numpy()[place])
        packed[place][:4] = end, prompts[place], start, finished
        packed[place][4 : 4 + max(0, end - start)] = ids[place][start:end]
    return torch.from_numpy(packed)
