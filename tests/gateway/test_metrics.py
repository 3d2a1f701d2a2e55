"""The gateway's metrics, read as Prometheus reads them, against the answers that it gave."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import parser

from launcher_scripts.contract.metric_names import (
    GATEWAY_GENERATION_TOKENS,
    GATEWAY_METRICS,
    HISTOGRAM,
)
from launcher_scripts.gateway.generation import RequestRecord
from launcher_scripts.gateway.metrics import MAX_CLIENTS, ClientTable, Metrics, with_servers
from tests.gateway.fakes import FakeBackend, client_of, served


def families(client: Any) -> dict[str, Any]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in parser.text_string_to_metric_families(answer.text)}


def value(client: Any, name: str, **labels: str) -> float:
    """One sample; 0 where it is not shown yet."""
    for family in families(client).values():
        for sample in family.samples:
            if (sample.name, sample.labels) == (name, labels):
                return sample.value
    return 0.0


def test_the_metrics_are_those_of_the_table() -> None:
    with client_of(served(FakeBackend())) as client:
        found = families(client)
        kinds = {name: family.type for name, family in found.items()}
        assert kinds == {
            metric.name.removesuffix("_total"): metric.kind for metric in GATEWAY_METRICS
        }
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        for metric in GATEWAY_METRICS:
            family = families(client)[metric.name.removesuffix("_total")]
            labels = {name for sample in family.samples for name in sample.labels}
            assert labels == {*metric.labels, *({"le"} if metric.kind == HISTOGRAM else ())}
            assert {sample.name for sample in family.samples} == set(metric.samples)


def test_answers_are_counted_with_their_tokens() -> None:
    with client_of(served(FakeBackend())) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        usage = [
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3}).json()["usage"]
            for prompt in ("Hello", "Hello the people")
        ]
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "Hello", "max_tokens": 2, "stream": True}
        ) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("data: {")]
        assert events
        route = {"route": "/v1/completions", "status": "200"}
        assert value(client, "launcher_gateway_requests_total", **route) == 3
        prompt = sum(each["prompt_tokens"] for each in usage) + usage[0]["prompt_tokens"]
        generated = sum(each["completion_tokens"] for each in usage) + 2
        of = {"model_name": model}
        assert value(client, "launcher_gateway_prompt_tokens_total", **of) == prompt
        assert value(client, "launcher_gateway_generation_tokens_total", **of) == generated
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert value(client, f"launcher_gateway_{name}_count", **of) == 3


def test_tokens_are_counted_as_they_come() -> None:
    """Once each, also where a row begins anew and has fewer for a while."""
    metrics = Metrics()
    record = RequestRecord("mine", "somebody", model="tiny")
    metrics.begin(record)

    def counted() -> float:
        lines = metrics.response().body.decode().splitlines()
        (line,) = (line for line in lines if line.startswith(f"{GATEWAY_GENERATION_TOKENS.name}{{"))
        return float(line.rpartition(" ")[2])

    for generated, expected in ((5, 5), (5, 5), (2, 5), (7, 7)):
        record.generated_tokens = generated
        assert counted() == expected
    record.generated_tokens = 9
    metrics.count("/v1/completions", record, 200)
    assert counted() == 9
    record.generated_tokens = 20
    assert counted() == 9


def test_refusals_are_counted_by_their_status() -> None:
    with client_of(served(FakeBackend()), max_body=100) as client:
        client.post("/v1/completions", json={"prompt": "Hello", "no_such": 1})
        client.post("/v1/completions", json={"prompt": "x" * 200})
        client.get("/v1/models/absent")
        client.get("/made/up/1")
        client.get("/made/up/2")
        for route, status, count in (
            ("/v1/completions", "400", 1),
            ("/v1/completions", "413", 1),
            ("/v1/models/", "404", 1),
            ("other", "404", 2),
        ):
            labels = {"route": route, "status": status}
            assert value(client, "launcher_gateway_requests_total", **labels) == count
        family = families(client)["launcher_gateway_e2e_request_latency_seconds"]
        assert family.samples == []


def test_prometheus_needs_no_key() -> None:
    with client_of(served(FakeBackend()), keys={"alice": "sk-alice-0123"}) as client:
        assert client.post("/v1/completions", json={"prompt": "Hello"}).status_code == 401
        labels = {"route": "/v1/completions", "status": "401"}
        assert value(client, "launcher_gateway_requests_total", **labels) == 1


def test_nothing_runs_when_everything_is_answered() -> None:
    with client_of(served(FakeBackend())) as client:
        client.post("/v1/completions", json={"prompt": ["Hello", "you"], "max_tokens": 3})
        for name in ("requests_running", "rows_running", "rows_waiting"):
            assert value(client, f"launcher_gateway_{name}") == 0


def test_the_metrics_of_several_servers_are_one_text() -> None:
    head = "# HELP a_total All.\n# TYPE a_total counter\n"
    first = f'# a comment\n{head}a_total 1\na_total{{x="}} 2"}} 2.5\n'
    second = f"{head}a_total 3\n# HELP b Less.\n# TYPE b gauge\nb 4\n"
    text = bytes(with_servers({"n0:1": first, "n1:2": second, "n2:3": ""}).body).decode()
    assert text.count("# TYPE a_total counter") == 1
    found = {each.name: each for each in parser.text_string_to_metric_families(text)}
    assert [(each.labels, each.value) for each in found["a"].samples] == [
        ({"server": "n0:1"}, 1.0),
        ({"server": "n0:1", "x": "} 2"}, 2.5),
        ({"server": "n1:2"}, 3.0),
    ]
    assert [(each.labels, each.value) for each in found["b"].samples] == [({"server": "n1:2"}, 4.0)]


def test_clients_are_counted_by_their_keys() -> None:
    keys = {"alice": "sk-alice-0123", "bob": "sk-bob-01234", "root": "sk-root-0123"}
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    files = {"api_keys": "keys", "admins": ("root",)}
    with client_of(served(FakeBackend()), keys=keys, **files) as client:
        for name, tokens in (("alice", 3), ("bob", 2), ("alice", 1), ("alice", 0)):
            body = {"prompt": "Hello", "max_tokens": tokens}
            client.post("/v1/completions", json=body, headers=headers[name])
        client.post("/v1/completions", json={"prompt": "Hello"})
        assert client.get("/clients").status_code == 401
        rows = {
            name: client.get("/clients", headers=headers[name]).json()["clients"] for name in keys
        }
        assert [row["client"] for row in rows["root"]] == ["alice", "bob"]
        assert rows["alice"] == rows["root"][:1]
        assert rows["bob"] == rows["root"][1:]
        (bob,) = rows["bob"]
        assert abs(bob.pop("last_seen") - time.time()) < 600
        tokens = {"prompt_tokens": 1, "generated_tokens": 2}
        assert bob == {"client": "bob", "requests": 1, "errors": 0, **tokens}
        assert rows["alice"][0]["generated_tokens"] == 4


def test_clients_without_keys_are_counted_by_address_and_bounded() -> None:
    with client_of(served(FakeBackend())) as client:
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        (row,) = client.get("/clients").json()["clients"]
        assert (row["client"], row["requests"]) == ("testclient", 1)
    table = ClientTable()
    for number in range(MAX_CLIENTS + 5):
        table.count(RequestRecord("id", f"client {number}", model="m", prompt_tokens=7), 500)
    rows = table.rows()
    assert len(rows) == MAX_CLIENTS + 1
    assert rows[0]["client"] == f"client {MAX_CLIENTS + 4}"
    others = {name: rows[-1][name] for name in ("client", "requests", "errors", "prompt_tokens")}
    assert others == {"client": "(others)", "requests": 5, "errors": 5, "prompt_tokens": 35}
