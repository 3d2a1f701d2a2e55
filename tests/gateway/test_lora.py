"""LoRA adapters as models of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.backend import Replica, ServedLoRA, prompt_digests
from launcher_scripts.gateway.fleet import adapters_in
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


KEYS = {"root": "sk-root", "user": "sk-user"}
LOADED = {"number": 3}


def admin_client(*backends: FakeBackend, **more: Any) -> Any:
    """A client with the key of an admin, before a server for each of the backends."""
    replicas = [
        Replica(f"node{number}:8001#secret", {"tiny": backend}, healthy=True)
        for number, backend in enumerate(backends)
    ]
    model = served(backends[0], **more)
    client = client_of(model, keys=KEYS, admins=("root",), api_keys="k", replicas=replicas)
    client.headers["Authorization"] = "Bearer sk-root"
    return client


def change(client: Any, action: str, **body: str) -> tuple[int, str]:
    """Status and text of the answer."""
    answer = client.post(f"/v1/{action}_lora_adapter", json=body)
    return answer.status_code, answer.text


def listed(client: Any) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_an_adapter_is_added_and_removed() -> None:
    backend = FakeBackend(reply=LOADED)
    client = admin_client(backend, lora_names=("sql",))
    assert change(client, "load", lora_name="law", lora_path="/a/law") == (
        200,
        "Success: LoRA adapter 'law' added successfully.",
    )
    assert backend.operations == [{"operation": "load_lora", "name": "law", "path": "/a/law"}]
    assert listed(client) == ["tiny", "sql", "law"]
    law = ServedLoRA("law", "/a/law", 1)
    for name in ("law", "tiny:law"):
        body = {"prompt": "Hello", "max_tokens": 4, "model": name}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert backend.requests[-1].added_lora == law
    assert change(client, "unload", lora_name="law")[0] == 200
    assert backend.operations[-1] == {"operation": "unload_lora", "name": "law"}
    answer = client.post("/v1/completions", json={"prompt": "Hello", "model": "law"})
    assert answer.status_code == 404
    assert change(client, "load", lora_name="law", lora_path="/a")[0] == 200
    client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, "model": "law"})
    # Another number than the first: prompts are told apart.
    assert backend.requests[-1].added_lora == ServedLoRA("law", "/a", 2)


@pytest.mark.parametrize(
    ("action", "body", "status", "words"),
    [
        ("load", {"lora_name": "sql", "lora_path": "/b"}, 400, "has an adapter 'sql': unload it"),
        ("load", {"lora_name": "tiny", "lora_path": "/b"}, 400, "a model has the name 'tiny'"),
        ("load", {"lora_name": "b", "lora_path": "b"}, 400, "absolute path on the server; got 'b'"),
        ("load", {"lora_name": "b", "lora_path": "/b", "model": "sql"}, 400, "is an adapter of"),
        ("load", {"lora_name": "b"}, 400, "lora_path"),
        ("unload", {"lora_name": "sql"}, 404, "no such adapter was added: 'sql'; choices: none"),
    ],
)
def test_wrong_changes_reach_no_server(
    action: str, body: dict[str, str], status: int, words: str
) -> None:
    backend = FakeBackend(reply=LOADED)
    client = admin_client(backend, lora_names=("sql",))
    got, text = change(client, action, **body)
    assert (got, words in text) == (status, True), text
    assert backend.operations == []


@pytest.mark.parametrize(
    ("kind", "status"), [("ConfigError", 400), ("OperationError", 400), ("BusyError", 409)]
)
def test_all_servers_have_an_adapter_or_none(kind: str, status: int) -> None:
    good = FakeBackend(reply=LOADED)
    bad = FakeBackend(reply={"error": "all 1 slots are taken", "kind": kind})
    client = admin_client(good, bad)
    got, text = change(client, "load", lora_name="law", lora_path="/a/law")
    assert (got, "node1:8001: all 1 slots are taken" in text) == (status, True), text
    assert [item["operation"] for item in good.operations] == ["load_lora", "unload_lora"]
    assert listed(client) == ["tiny"]
    bad.reply = LOADED
    assert change(client, "load", lora_name="law", lora_path="/a/law")[0] == 200
    assert listed(client) == ["tiny", "law"]


@pytest.mark.parametrize("action", ["load", "unload"])
def test_admins_alone_change_adapters(action: str) -> None:
    backend = FakeBackend(reply=LOADED)
    body = {"lora_name": "law", "lora_path": "/a"} if action == "load" else {"lora_name": "law"}
    client = admin_client(backend)
    client.headers["Authorization"] = "Bearer sk-user"
    status, text = change(client, action, **body)
    assert (status, "deploy.gateway.admins" in text) == (403, True)
    del client.headers["Authorization"]
    assert change(client, action, **body)[0] == 401
    assert change(client_of(served(backend)), action, **body)[0] == 403
    assert backend.operations == []
