"""Text to text, through a FasterTransformer model, as a model of Triton's Python backend.

Runs in the server from a repository folder that also holds the package tokenizer, text_*.py and the
tokenizer's files. It sends each request on to the token model itself, since Triton does not tell
the steps of an ensemble that their client has gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from older_servers import FINAL, require_new_enough, response_sender, returned
from text_answers import TextAnswer
from text_forwards import Forwards
from text_parameters import seconds_allowed
from text_requests import Reader
from text_tensors import Tensors, error_response, require_working_arrays
from tokenizer import load_tokenizer


class TritonPythonModel:
    """Prompts -> texts; the tensors are those of config.pbtxt.

    The parameter token_model names the model behind it.
    """

    def initialize(self, args: dict[str, str]) -> None:
        require_new_enough()
        require_working_arrays()
        self.tokenizer = load_tokenizer(Path(__file__).parent)
        self.tensors = Tensors(args["model_config"])
        self.reader = Reader(self.tensors, self.tokenizer)
        self.forwards = Forwards(self.reader.token_model, generates=self.reader.generates)

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Send every request on; answers follow through response senders."""
        senders = [response_sender(request) for request in requests]
        for request, sender in zip(requests, senders, strict=True):
            try:
                self.begin(request, sender)
            except Exception as error:
                sender.send(error_response(error), flags=FINAL)
        return returned(senders)

    def begin(self, request: Any, sender: Any) -> None:
        answer = TextAnswer(
            self.reader.read(request),
            self.reader,
            self.tensors,
            sender,
            self.tokenizer.decode,
            seconds_allowed(request),
        )
        session = {"correlation_id": request.correlation_id(), "flags": request.flags()}
        self.forwards.start(answer, session)

    def finalize(self) -> None:
        self.forwards.close()
