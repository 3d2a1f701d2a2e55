"""LoRA adapters as models of the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.backend import prompt_digests
from launcher_scripts.gateway.loading import adapters_in
from launcher_scripts.gateway.served_model import Models
from launcher_scripts.models.adapters import Adapters
from launcher_scripts.models.repository import FILE_NAME
from tests.engine.small_models import small_config
from tests.gateway.fakes import FakeBackend, client_of, served

NAMES = ("sql", "law")


def test_requests_choose_an_adapter_by_its_name() -> None:
    backend = FakeBackend()
    client = client_of(served(backend, lora_names=NAMES))
    for name, adapter in (("tiny", None), ("law", 1), ("tiny:sql", 0), (None, None)):
        body = {"prompt": "Hello", "max_tokens": 4} | ({"model": name} if name else {})
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert backend.requests[-1].lora_adapter == adapter
        assert answer.json()["model"] == (name or "tiny").removeprefix("tiny:")


def test_adapters_are_listed_with_their_base() -> None:
    client = client_of(served(FakeBackend(), lora_names=NAMES))
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None),
        ("sql", "tiny"),
        ("law", "tiny"),
    ]
    assert client.get("/v1/models/tiny:law").json()["id"] == "law"
    assert client.get("/ready").json()["models"] == {"tiny": True}
    answer = client.post("/v1/completions", json={"prompt": "Hello", "model": "poems"})
    assert answer.status_code == 404
    assert "choices: tiny, sql, law" in answer.json()["error"]["message"]


def test_a_name_that_is_not_of_one_adapter_alone_needs_its_model() -> None:
    models = Models(
        [
            served(FakeBackend(), "a", lora_names=("sql", "b")),
            served(FakeBackend(), "b", lora_names=("sql",)),
        ]
    )
    assert [model.name for model in models.listed] == ["a", "b", "a:sql", "a:b", "b:sql"]
    assert models.find("b").lora_adapter is None
    assert (models.find("b:sql").parent, models.find("a:b").lora_adapter) == ("b", 1)
    with pytest.raises(ApiError, match="there is no model 'sql'"):
        models.find("sql")


def test_the_names_are_those_of_config_ini(tmp_path: Path) -> None:
    assert adapters_in(tmp_path) == ()
    parts = Adapters(lora_names=NAMES, lora_rank=4, lora_targets=("attention.dense",))
    (tmp_path / FILE_NAME).write_text(format_config(small_config(parts=parts), 1, "fp32"))
    assert adapters_in(tmp_path) == NAMES


def test_servers_are_chosen_by_prompts_of_the_same_adapter() -> None:
    assert len({prompt_digests(range(64), "tiny", 0, adapter) for adapter in (None, 0, 1)}) == 3
