"""What the gateway lets in, for how long, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette

from launcher_scripts.gateway.admission import Admission
from launcher_scripts.gateway.api_errors import ApiError
from launcher_scripts.gateway.app import make_app
from launcher_scripts.gateway.backend import Replica
from launcher_scripts.gateway.service import DrainingServer, uvicorn_config
from tests.gateway.fakes import SETTINGS, FakeBackend, client_of, listening, served, until
from tests.http_requests import send

KEYS = {"alice": "sk-alice-0123", "bob": "sk-bob-4567"}
BODY = {"prompt": "Hello", "max_tokens": 40}


class Connection:
    """One request to the application whose client may leave before its answer.

    whole: False: more of the body is to come, and never does
    """

    def __init__(
        self, app: Starlette, body: dict[str, Any], client: str = "10.0.0.1", full: bool = True
    ) -> None:
        self.status: int | None = None
        self.content = b""
        self.started = asyncio.Event()
        self._left = asyncio.Event()
        self._sent = False
        self._full = full
        self._body = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": (client, 1),
            "server": ("gateway", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": not self._full}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.content += message.get("body", b"")
            self.started.set()


def test_request_ids_come_back_and_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    client = client_of(served(backend))
    with caplog.at_level(logging.INFO, "gateway"):
        answer = client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine/1"})
    assert answer.headers["x-request-id"] == "mine/1"
    assert backend.requests[0].request_id == "mine/1"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gateway"]
    assert "request_id=mine/1" in line
    assert "status=200" in line
    assert f"generated_tokens={answer.json()['usage']['completion_tokens']}" in line


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\u00e9".encode("latin-1")])
def test_ids_that_are_none_are_replaced(given: Any) -> None:
    answer = client_of(served(FakeBackend())).get("/health", headers={"X-Request-Id": given})
    assert len(answer.headers["x-request-id"]) == 32


def test_errors_have_a_request_id_too() -> None:
    client = client_of(served(FakeBackend()), keys=KEYS)
    for path in ("/nothing", "/v1/models"):
        answer = client.get(path, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 401
        assert answer.headers["x-request-id"] == "mine"


def test_keys_are_asked_for() -> None:
    backend = FakeBackend()
    client = client_of(served(backend), keys=KEYS)
    for header in (None, "Bearer", "Bearer wrong", "Basic sk-alice-0123", "Bearer sk-alice-012"):
        headers = {} if header is None else {"Authorization": header}
        answer = client.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "sk-" not in answer.text
    assert backend.requests == []
    for key in KEYS.values():
        headers = {"Authorization": f"Bearer {key}"}
        assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    for path in ("/health", "/ready", "/version"):
        assert client.get(path).status_code == 200


def test_what_is_computed_is_shared_by_salt_and_key() -> None:
    salts = set()
    for keys in ({}, KEYS):
        backend = FakeBackend()
        client = client_of(served(backend), keys=keys)
        for key in keys.values() or ("",):
            headers = {"Authorization": f"Bearer {key}"}
            for body in (BODY, BODY, {**BODY, "cache_salt": "a"}, {**BODY, "cache_salt": "b"}):
                client.post("/v1/completions", json=body, headers=headers)
        given = [request.cache_salt for request in backend.requests]
        assert given[::4] == given[1::4]
        assert (given[0] == 0) == (not keys)
        assert all(0 <= salt < 1 << 64 for salt in given)
        salts.update(given)
    assert len(salts) == 3 * 3


def test_large_bodies_are_refused_before_they_are_read() -> None:
    client = client_of(served(FakeBackend()), max_body=1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()
    for content in (body, iter([body[:900], body[900:]])):
        answer = client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b"",
        b"null",
        b"[1]",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe",
        b'{"prompt": "a"',
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    answer = client_of(served(FakeBackend())).post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_compressed_bodies_are_refused() -> None:
    answer = client_of(served(FakeBackend())).post(
        "/v1/completions", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_encoding"


def test_pages_of_others_may_not_ask_unless_they_are_named() -> None:
    headers = {"Origin": "https://a.example"}
    plain = client_of(served(FakeBackend())).get("/v1/models", headers=headers)
    assert "access-control-allow-origin" not in plain.headers
    named = client_of(served(FakeBackend()), cors_origins=("https://a.example",))
    answer = named.get("/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "node7"}, 200),
        ({"Host": "LLM.Example.org.:443"}, 200),
        ({"Host": "evil.example:8080"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "node7:8080", "Origin": "http://node7:8080"}, 200),
        ({"Host": "10.0.0.7", "Origin": "https://llm.example.org"}, 200),
        ({"Host": "10.0.0.7", "Origin": "https://a.example"}, 200),
        ({"Host": "node7:8080", "Origin": "http://node7:9090"}, 403),
        ({"Host": "node7:8080", "Origin": "null"}, 403),
        ({"Host": "node7:8080", "Origin": "http://evil.example"}, 403),
    ],
)
def test_pages_of_other_sites_may_not_ask_where_there_are_no_keys(
    headers: dict[str, str], status: int
) -> None:
    """A browser would do it for them, also at an address that a name was made to mean."""
    more = {"allowed_hosts": ("llm.example.org",), "cors_origins": ("https://a.example",)}
    open_gateway = client_of(served(FakeBackend()), **more)
    assert open_gateway.get("/v1/models", headers=headers).status_code == status
    assert open_gateway.get("/health", headers=headers).status_code == 200
    keyed = client_of(served(FakeBackend()), keys=KEYS, **more)
    key = {"Authorization": "Bearer sk-bob-4567"}
    assert keyed.get("/v1/models", headers={**headers, **key}).status_code == 200


@pytest.mark.parametrize(("proxies", "client"), [((), "127.0.0.1"), (("127.0.0.0/8",), "10.9.8.7")])
def test_only_named_proxies_say_who_the_client_is(
    proxies: tuple[str, ...], client: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app([served(FakeBackend())], SETTINGS)
    with (
        caplog.at_level(logging.INFO, "gateway"),
        listening(app, trusted_proxies=proxies) as address,
    ):
        response = send(f"{address}v1/models", headers={"X-Forwarded-For": "10.9.8.7"})
        assert response.status_code == 200
    assert f"client={client} " in caplog.text


def test_a_client_writes_one_field_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app([served(FakeBackend())], SETTINGS)

    async def ask() -> None:
        await Connection(app, {**BODY, "max_tokens": 1}, "evil client=admin\n" + "x" * 900).task

    with caplog.at_level(logging.INFO, "gateway"):
        asyncio.run(ask())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gateway"]
    (client,) = re.findall(r"client=(\S+)", line)
    assert client.startswith(r"evil\x20client=admin\nxxx")
    assert len(client) == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_rows(streams: bool) -> None:
    backend = FakeBackend(waits=True)
    app = make_app([served(backend)], SETTINGS)

    async def leave() -> None:
        connection = Connection(app, {**BODY, "n": 3, "stream": streams})
        await until(lambda: backend.running == 3)
        if streams:
            await connection.started.wait()
        connection.leave()
        await connection.task
        assert backend.running == 0
        assert app.state.gateway.admission.running == 0
        assert app.state.gateway.life.working == 0

    asyncio.run(leave())


def test_a_client_may_leave_before_its_body_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """That is not a failure of the gateway."""
    caplog.set_level(logging.INFO)
    app = make_app([served(FakeBackend())], SETTINGS)

    async def run() -> None:
        connection = Connection(app, BODY, full=False)
        connection.leave()
        await connection.task
        assert connection.status == 499

    asyncio.run(run())
    assert [record.levelname for record in caplog.records if record.name == "gateway"] == ["INFO"]
    counted = 'launcher_gateway_requests_total{route="/v1/completions",status="499"} 1.0'
    assert counted in app.state.gateway.metrics.response().body.decode()


def test_a_wrong_method_is_told_the_right_one() -> None:
    answer = client_of(served(FakeBackend())).put("/v1/completions", json=BODY)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_has_its_time(streams: bool) -> None:
    backend = FakeBackend(waits=True)
    client = client_of(served(backend))
    answer = client.post("/v1/completions", json={**BODY, "timeout": 0.05, "stream": streams})
    if streams:
        *_, said, done, _ = answer.text.split("\n\n")
        error, done = json.loads(said.removeprefix("data: "))["error"], done.removeprefix("data: ")
        assert done == "[DONE]"
    else:
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("timeout", "timeout")
    assert backend.running == 0


def test_the_gateways_own_time_holds_where_the_request_says_none() -> None:
    client = client_of(served(FakeBackend(waits=True)), request_timeout=0.05)
    assert client.post("/v1/completions", json=BODY).status_code == 504


def test_too_many_rows_are_told_to_come_again() -> None:
    backend = FakeBackend(waits=True)
    app = make_app([served(backend)], replace(SETTINGS, max_running=2, max_waiting=2))

    async def crowd() -> None:
        first = Connection(app, {**BODY, "n": 3})
        await until(lambda: backend.running == 2)
        second = Connection(app, BODY)
        await second.task
        assert second.status == 429
        assert json.loads(second.content)["error"]["code"] == "rate_limit_exceeded"
        first.leave()
        await first.task
        assert (app.state.gateway.admission.running, app.state.gateway.admission.waiting) == (0, 0)
        third = Connection(app, {**BODY, "max_tokens": 1})
        await third.task
        assert third.status == 200

    asyncio.run(crowd())


def test_clients_take_turns() -> None:
    """One that came first with many rows holds up nobody."""

    async def turns() -> list[str]:
        admission = Admission(1, 100)
        order: list[str] = []

        async def row(name: str, place: Any) -> None:
            async with place.taken():
                order.append(name)
                await asyncio.sleep(0)

        places = [("many", place) for place in admission.reserve("many", 5)]
        places += [("one", place) for place in admission.reserve("one", 1)]
        places += [("two", place) for place in admission.reserve("two", 2)]
        await asyncio.gather(*(row(*each) for each in places))
        assert (admission.running, admission.waiting) == (0, 0)
        return order

    assert asyncio.run(turns()) == ["many", "many", "one", "two", "many", "two", "many", "many"]


def test_who_waits_may_leave() -> None:
    async def leave() -> None:
        admission = Admission(1, 10)
        (first,) = admission.reserve("a", 1)
        (second,) = admission.reserve("a", 1)
        (third,) = admission.reserve("b", 1)
        second.leave()
        second.leave()
        assert (admission.running, admission.waiting) == (1, 1)
        first.leave()
        assert third.let_in.is_set()
        third.leave()
        assert (admission.running, admission.waiting) == (0, 0)
        with pytest.raises(ApiError, match="at most 10 may wait"):
            admission.reserve("a", 12)

    asyncio.run(leave())


def test_a_gateway_drains() -> None:
    """New work is refused, what runs is answered, then the process may end."""
    backend = FakeBackend(waits=True)
    app = make_app([served(backend)], SETTINGS)

    async def drain() -> None:
        life = app.state.gateway.life
        running = Connection(app, BODY)
        await until(lambda: backend.running == 1)
        life.draining = True
        late = Connection(app, BODY)
        await late.task
        assert late.status == 503
        assert json.loads(late.content)["error"]["code"] == "unavailable"
        drained = asyncio.ensure_future(life.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        running.leave()
        await running.task
        await drained

    asyncio.run(drain())


@pytest.mark.parametrize("streams", [False, True])
def test_what_has_had_its_time_is_told_so(streams: bool) -> None:
    backend = FakeBackend(waits=True)
    app = make_app([served(backend)], SETTINGS)

    async def give_up() -> None:
        life = app.state.gateway.life
        running = Connection(app, {**BODY, "stream": streams})
        await until(lambda: backend.running == 1)
        if streams:
            await running.started.wait()
        life.draining = True
        life.abort()
        await running.task
        said = running.content.decode()
        if streams:
            *_, said, done, _ = said.split("\n\n")
            assert done == "data: [DONE]"
        assert running.status == (200 if streams else 503)
        assert json.loads(said.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert backend.running == app.state.gateway.admission.running == life.working == 0

    asyncio.run(give_up())


def test_ready_says_what_is_not() -> None:
    backend, replicas = FakeBackend(), [Replica("node0:8001"), Replica("node1:8001")]
    replicas[0].backends, replicas[1].backends = {"up": backend}, {"down": backend}
    replicas[0].healthy = True
    client = client_of(served(backend, "up"), served(backend, "down"), replicas=replicas)
    answer = client.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["models"] == {"up": True, "down": False}
    replicas[1].healthy = True
    assert client.get("/ready").status_code == 200
    client.app.state.gateway.life.draining = True
    assert client.get("/ready").json()["draining"] is True
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200


def test_a_second_signal_ends_at_once() -> None:
    import signal

    import uvicorn

    backend = FakeBackend(waits=True)
    app = make_app([served(backend)], SETTINGS)

    async def signals() -> None:
        config = uvicorn.Config(app, log_config=None)
        server = DrainingServer(config, app.state.gateway, 60.0, "ready")
        running = Connection(app, BODY)
        await until(lambda: backend.running == 1)
        server.handle_exit(signal.SIGTERM, None)
        assert app.state.gateway.life.draining
        assert not server.should_exit
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit
        assert server.force_exit
        running.leave()
        await running.task

    asyncio.run(signals())


def test_a_slash_at_the_end_of_a_path_and_an_empty_encoding_change_nothing() -> None:
    client = client_of(served(FakeBackend()), keys=KEYS)
    client.headers["Authorization"] = f"Bearer {KEYS['alice']}"
    for path in ("/v1/models/", "/v1/models/tiny/", "/health/", "/ready//"):
        assert client.get(path, follow_redirects=False).status_code == 200, path
    for encoding in ("", " identity "):
        headers = {"Content-Encoding": encoding}
        answer = client.post("/v1/completions/", json=BODY, headers=headers)
        assert answer.status_code == 200, answer.text
    headers = {"Content-Encoding": "gzip"}
    assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 400
    assert client.post("/health/").status_code == 405


def test_connections_stay_open_for_longer_than_clients_pools() -> None:
    """OpenAI's client keeps an idle connection for 5 s, proxies for 60 s."""
    assert uvicorn_config(Starlette(), SETTINGS).timeout_keep_alive == 75
    settings = replace(SETTINGS, keep_alive_timeout=5)
    assert uvicorn_config(Starlette(), settings).timeout_keep_alive == 5


def test_rows_that_leave_while_they_wait_are_not_kept() -> None:
    async def run() -> None:
        admission = Admission(4, 100)
        running = admission.reserve("a", 4)
        for _ in range(3):
            for place in admission.reserve("b", 20):
                place.leave()
                place.leave()
        assert (admission.waiting, len(admission._queues)) == (0, 0)
        for place in running:
            place.leave()
        assert admission.running == 0

    asyncio.run(run())


def test_no_client_takes_the_places_of_the_next_one() -> None:
    async def run() -> None:
        admission = Admission(20, 80)
        for client, most in (("a", 75), ("b", 18), ("c", 5), ("d", 1)):
            with pytest.raises(ApiError, match=f"one client has at most {most} now") as refused:
                admission.reserve(client, most + 1)
            assert refused.value.status == 429
            assert len(admission.reserve(client, most)) == most
        assert admission.running + admission.waiting == 99

    asyncio.run(run())
