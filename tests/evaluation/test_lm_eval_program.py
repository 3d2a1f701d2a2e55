"""What the model type gateway-completions asks, with lm_eval's own classes stood in for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from launcher_scripts.evaluation.lm_eval_program import register

KEY = "sk-of-the-tests"


class Answer:
    """Of a gateway, to any request."""

    def json(self) -> dict[str, Any]:
        return {"tokens": [1, 2], "prompt": "text", "bos_token": None}


class RemoteTokenizer:
    """As that of lm_eval 0.4.13, which asks its server in its constructor."""

    def __init__(self, base_url: str, auth_token: str | None = None) -> None:
        self.base_url = base_url.replace("/v1/completions", "")
        self.auth_token = auth_token
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self._request_with_retries("GET", f"{self.base_url}/tokenizer_info")

    def _request_with_retries(self, method: str, url: str, **more: Any) -> Answer:
        self.asked.append((method, url.removeprefix(self.base_url), more))
        return Answer()

    @property
    def bos_token(self) -> str | None:
        answer = self._request_with_retries("GET", f"{self.base_url}/tokenizer_info")
        return answer.json()["bos_token"]

    def decode(self, tokens: list[int]) -> str:
        body = {"tokens": tokens}
        answer = self._request_with_retries("POST", f"{self.base_url}/detokenize", json=body)
        return answer.json()["prompt"]


class LocalCompletionsAPI:
    """Takes what it is told."""

    def __init__(self, **more: Any) -> None:
        self.more = more


@pytest.fixture
def gateway_completions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The class that is registered as gateway-completions."""
    registered: dict[str, Any] = {}

    def register_model(name: str) -> Callable[[type], type]:
        def keep(each: type) -> type:
            registered[name] = each
            return each

        return keep

    for name, content in (
        ("lm_eval", {}),
        ("lm_eval.api", {}),
        ("lm_eval.api.registry", {"register_model": register_model}),
        ("lm_eval.models", {}),
        ("lm_eval.models.openai_completions", {"LocalCompletionsAPI": LocalCompletionsAPI}),
        ("lm_eval.utils", {"RemoteTokenizer": RemoteTokenizer}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    register()
    return registered["gateway-completions"]


def test_every_request_names_the_model(gateway_completions: Callable[..., Any]) -> None:
    """The first one, too: a gateway of several models answers none that does not."""
    model = gateway_completions("mine", "http://gateway/v1/completions")
    assert model.tok_encode("text") == [1, 2]
    assert model.tokenizer.decode([1, 2]) == "text"
    assert model.tokenizer.auth_token == KEY
    named = {"model": "mine"}
    assert model.tokenizer.asked == [
        ("GET", "/tokenizer_info", {"params": named}),
        ("GET", "/tokenizer_info", {"params": named}),
        (
            "POST",
            "/tokenize",
            {"json": {**named, "prompt": "text", "add_special_tokens": True}},
        ),
        ("POST", "/detokenize", {"json": {**named, "tokens": [1, 2]}}),
    ]
