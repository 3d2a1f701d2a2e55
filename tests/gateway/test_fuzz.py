"""Requests that nobody would send: each gets an answer, or an error that names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.fakes import FakeBackend, client_of, served
from tests.gateway.fuzzing import BODIES, USUAL

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "json_object", "auto", "gpt"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "format", "name", "5", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def client() -> Any:
    return client_of(served(FakeBackend(), "gpt"), max_body=1 << 16)


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=50)
@given(data=st.data())
def test_no_body_makes_the_gateway_fail(client: Any, path: str, data: st.DataObject) -> None:
    names = st.sampled_from([*BODIES[path].model_fields, "unknown"])
    body = {**USUAL[path], **data.draw(st.dictionaries(names, VALUES, max_size=4))}
    answer = client.post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400, 404, 504), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert error["code"]
        assert len(answer.text) < 20_000
    gateway = client.app.state.gateway
    assert (gateway.admission.running, gateway.admission.waiting, gateway.life.working) == (0, 0, 0)


@settings(max_examples=100)
@given(body=st.binary(max_size=200))
def test_no_bytes_make_the_gateway_fail(client: Any, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
