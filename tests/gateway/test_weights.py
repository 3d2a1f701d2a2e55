"""New weights through the gateway: who may ask for it, and what clients see of it."""

from __future__ import annotations

import json

import pytest

from launcher_scripts.gateway.backend import Increment, Replica, Replicas, RowWeights
from tests.gateway.fakes import FakeBackend, client_of, served

KEYS = {"alice": "sk-alice-0123", "bob": "sk-bob-4567"}
BODY = {"checkpoint": "/exports/new", "mode": "mixed"}
DIGESTS = {"system_fingerprint": "fp_new", "manifest": "00", "source": {}}
DONE = {"version": 1, "digests": DIGESTS}


def post(client, body=BODY, key: str | None = "sk-alice-0123", path: str = "/admin/weights"):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client.post(path, json=body, headers=headers)


def admin_client(*backends: FakeBackend):
    replicas = [
        Replica(f"node{number}:8001#secret", {"tiny": backend}, healthy=True)
        for number, backend in enumerate(backends)
    ]
    return client_of(
        served(backends[0]), keys=KEYS, admins=("alice",), api_keys="k", replicas=replicas
    )


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("sk-bob-4567", 403), ("wrong", 401)])
def test_the_keys_of_others_than_admins_are_refused(key, status):
    backend = FakeBackend(reply=DONE)
    assert post(admin_client(backend), key=key).status_code == status
    assert backend.operations == []


def test_without_keys_nobody_may():
    backend = FakeBackend(reply=DONE)
    response = post(client_of(served(backend)), key=None)
    assert response.status_code == 403
    assert "deploy.gateway.api_keys" in response.json()["error"]["message"]
    assert backend.operations == []


def test_every_server_of_the_model_gets_the_weights():
    backends = [FakeBackend(reply=DONE), FakeBackend(reply=DONE)]
    response = post(admin_client(*backends))
    assert response.status_code == 200
    servers = response.json()["servers"]
    assert [server["server"] for server in servers] == ["node0:8001", "node1:8001"]
    operation = {**BODY, "operation": "swap", "drain_timeout": 30.0}
    assert [backend.operations for backend in backends] == [[operation]] * 2


@pytest.mark.parametrize(
    ("kind", "status"), [("ConfigError", 400), ("OperationError", 409), ("ServerError", 500)]
)
def test_an_error_says_which_servers_have_them(kind, status):
    failing = FakeBackend(reply={"error": "ffn_size is another one", "kind": kind})
    response = post(admin_client(FakeBackend(reply=DONE), failing, FakeBackend(reply=DONE)))
    assert response.status_code == status
    message = response.json()["error"]["message"]
    assert "node1:8001: " in message
    assert "ffn_size is another one" in message
    assert message.endswith("these have the new weights already: node0:8001")


def test_wrong_bodies_are_refused():
    client = admin_client(FakeBackend(reply=DONE))
    assert post(client, {"checkpoint": "/new", "mode": "now"}).status_code == 400
    assert post(client, {"mode": "mixed"}).status_code == 400
    assert post(client, {**BODY, "model": "other"}).status_code == 404


REFIT = {"folder": "/checkpoints/step", "version": "step-9"}


@pytest.mark.parametrize("path", ["/admin/refit", "/admin/refit_socket", "/sleep", "/wake_up"])
def test_refit_and_sleep_are_for_admins(path):
    backend = FakeBackend(reply=DONE)
    client = admin_client(backend)
    assert post(client, REFIT, "sk-bob-4567", path).status_code == 403
    assert backend.operations == []


def test_a_refit_reaches_every_server():
    backends = [FakeBackend(reply=DONE), FakeBackend(reply=DONE)]
    response = post(admin_client(*backends), REFIT, path="/admin/refit")
    assert response.json()["model"] == "tiny"
    operation = {
        **REFIT,
        "operation": "refit",
        "mode": "mixed",
        "drain_timeout": 30.0,
        "probe": False,
    }
    assert [backend.operations for backend in backends] == [[operation]] * 2
    assert post(admin_client(*backends), {"version": "x"}, path="/admin/refit").status_code == 400


@pytest.mark.parametrize("body", [b"", b'{"model": "tiny"}'])
def test_a_socket_needs_no_body(body):
    backend = FakeBackend(reply={"socket": "/dev/shm/socket"})
    headers = {"Authorization": "Bearer sk-alice-0123"}
    client = admin_client(backend)
    answer = client.post("/admin/refit_socket", content=body, headers=headers)
    assert answer.json()["servers"][0]["socket"] == "/dev/shm/socket"
    assert backend.operations == [{"operation": "refit_socket"}]
    assert client.post("/admin/refit_socket?model=other", headers=headers).status_code == 404


def test_a_model_that_sleeps_is_said_to_and_can_be_woken():
    backend = FakeBackend(sleeping=True)
    replicas = [Replica("node0:8001", {"tiny": backend}, healthy=True)]
    model = served(Replicas("tiny", replicas))
    client = client_of(model, keys=KEYS, admins=("alice",), api_keys="k", replicas=replicas)
    headers = {"Authorization": "Bearer sk-alice-0123"}
    body = {"prompt": "Hello", "max_tokens": 5}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert "POST /wake_up" in answer.json()["error"]["message"]
    assert backend.requests == []
    assert client.get("/is_sleeping", headers=headers).json() == {"is_sleeping": True}
    assert client.post("/wake_up?model=tiny", headers=headers).status_code == 200
    assert client.post("/wake_up?model=other", headers=headers).status_code == 404
    assert backend.operations[-1] == {"operation": "wake"}


class Swapped(FakeBackend):
    """Its rows end with other weights than they began with."""

    async def generate(self, request):
        async for increment in super().generate(request):
            weights = RowWeights("fp_new", mixed=True) if increment.finished else None
            yield Increment(*increment)._replace(weights=weights)


def test_answers_name_the_weights():
    client = client_of(served(Swapped()))
    body = {"prompt": "Hello", "max_tokens": 5}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["system_fingerprint"] == "fp_new"
    assert answer["mixed_weights"] is True
    text = client.post("/v1/completions", json={**body, "stream": True}).text
    *_, last, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    last_words = json.loads(last.removeprefix("data: "))
    assert (last_words["system_fingerprint"], last_words["mixed_weights"]) == ("fp_new", True)
    assert last_words["choices"] == []


def test_the_version_and_later_answers_name_the_digests():
    client = client_of(served(FakeBackend(digests=DIGESTS)))
    assert client.get("/version").json()["models"] == {"tiny": DIGESTS}
    answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 5}).json()
    assert answer["system_fingerprint"] == "fp_new"
    assert "mixed_weights" not in answer
    named = {**DIGESTS, "weights_version": "step-9"}
    client = client_of(served(FakeBackend(digests=named)))
    body = {"prompt": "Hello", "max_tokens": 5}
    assert client.post("/v1/completions", json=body).json()["weights_version"] == "step-9"
