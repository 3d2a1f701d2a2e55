"""Several servers of the same model as one: each request goes to the least busy of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher_scripts.clients.connection import Tensors
from launcher_scripts.clients.remote import RemoteServer


class SpreadServer:
    """What an evaluation asks of a server, asked of replicas. To be used from one thread."""

    def __init__(self, servers: Sequence[RemoteServer]) -> None:
        self._servers = tuple(servers)
        self._in_flight = [0] * len(self._servers)
        self._sent = [0] * len(self._servers)

    def is_ready(self, model_name: str) -> bool:
        """Whether all of them are."""
        return all(server.is_ready(model_name) for server in self._servers)

    def model_config(self, model_name: str) -> dict[str, Any]:
        """The first one's: they serve the same repository."""
        return self._servers[0].model_config(model_name)

    def models(self) -> list[str]:
        """The first one's, as well."""
        return self._servers[0].models()

    def streams(self, model_name: str) -> bool:
        """As the first one's."""
        return self._servers[0].streams(model_name)

    def requests_taken(self, model_name: str) -> int:
        """Of all of them together."""
        return sum(server.requests_taken(model_name) for server in self._servers)

    def submit(
        self, model_name: str, tensors: Tensors, outputs: Sequence[str] | None = None
    ) -> Callable[[], Tensors]:
        """Send one request to the server with the fewest in flight; those that had less come first.

        The result waits for the answer.
        """
        chosen = min(range(len(self._servers)), key=lambda n: (self._in_flight[n], self._sent[n]))
        answer = self._servers[chosen].submit(model_name, tensors, outputs)
        self._sent[chosen] += 1
        self._in_flight[chosen] += 1

        def outputs_of_server() -> Tensors:
            try:
                return answer()
            finally:
                self._in_flight[chosen] -= 1

        return outputs_of_server

    def close(self) -> None:
        for server in self._servers:
            server.close()
