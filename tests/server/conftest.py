"""Fixtures of tests that ask a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def client(served: dict[str, Any]) -> Iterator[Any]:
    """A client over gRPC of the test file's own server, whose ready file says the addresses."""
    from tests.server.requests import Client

    with Client(served, "grpc") as client:
        yield client
