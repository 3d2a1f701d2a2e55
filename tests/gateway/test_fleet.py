"""Servers that come, fail, come back and go, by their ready files and what they answer."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.files import replica_file, request_publication
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.gateway import fleet as fleets
from launcher_scripts.gateway.fleet import Fleet
from launcher_scripts.server.addresses import ReadyFiles

CONFIG: dict[str, Any] = {"backend": "fastertransformer", "input": []}


class FakeServer:
    """Takes the place of a TritonServer: answers while its address is `up`, with the models there.

    checks: every address that was asked, in order
    """

    up: dict[str, list[str]] = {}  # noqa: RUF012
    checks: list[str] = []  # noqa: RUF012
    closed: list[str] = []  # noqa: RUF012

    def __init__(self, address: str, _tls: Any = None) -> None:
        self.address = address

    def _answer(self) -> list[str]:
        if self.address not in self.up:
            raise InferenceServerException("connection refused", "StatusCode.UNAVAILABLE")
        return self.up[self.address]

    async def models(self) -> list[str]:
        self.checks.append(self.address)
        return self._answer()

    async def model_config(self, model: str) -> dict[str, Any]:
        return {**CONFIG, "name": model}

    async def is_ready(self, model: str) -> bool:
        return model in self.up.get(self.address, ())

    async def close(self) -> None:
        self.closed.append(self.address)


@pytest.fixture(autouse=True)
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("up", {}), ("checks", []), ("closed", [])):
        monkeypatch.setattr(FakeServer, name, empty)
    monkeypatch.setattr(fleets, "TritonServer", FakeServer)


def start(
    folder: Path, replica: int | None, address: str, *models: str, age: float = 0, **more: str
) -> None:
    """A server that writes its ready file and answers."""
    path = replica_file(folder / "ready.json", replica)
    alive = (datetime.now(timezone.utc) - timedelta(seconds=age)).isoformat()
    path.write_text(json.dumps({"grpc": address, "alive_at": alive, **more}))
    FakeServer.up[address] = list(models or ("tiny",))


def states(fleet: Fleet) -> dict[str, bool]:
    return {each["address"]: each["healthy"] for each in (r.facts() for r in fleet.replicas)}


def with_fleet(work: Callable[[Fleet], Awaitable[None]], *places: Path, timeout: float = 0) -> None:
    async def run() -> None:
        settings = GatewaySettings(tuple(map(str, places)), ready_timeout=timeout)
        await work(Fleet(settings))

    asyncio.run(run())


def test_a_folder_has_all_replicas(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1")
    start(tmp_path, 1, "b:1", "tiny", "other")
    start(tmp_path, 10, "c:1")
    (tmp_path / "ready-0.json.partial").write_text("{")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "ready-2.json").write_text("[]")
    (tmp_path / "ready-3.json").write_text('{"grpc": "d:1", "alive_at": 5}')

    async def work(fleet: Fleet) -> None:
        assert sorted(await fleet.until_ready()) == ["other", "tiny"]
        assert states(fleet) == {"a:1": True, "b:1": True, "c:1": True}
        assert [sorted(r.backends) for r in fleet.replicas] == [
            ["tiny"],
            ["other", "tiny"],
            ["tiny"],
        ]

    with_fleet(work, tmp_path)


def test_places_may_name_a_server_twice(tmp_path: Path) -> None:
    start(tmp_path, None, "a:1")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        assert states(fleet) == {"a:1": True}

    with_fleet(work, tmp_path, tmp_path / "ready.json")


def test_every_place_needs_a_server_at_the_start(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    start(tmp_path / "first", 0, "a:1")
    start(tmp_path / "second", 0, "b:1")
    del FakeServer.up["b:1"]

    async def work(fleet: Fleet) -> None:
        with pytest.raises(ServerError) as failed:
            await fleet.until_ready()
        message = str(failed.value)
        assert "the server at b:1 does not answer: connection refused" in message
        assert "third has no ready.json or ready-[0-9]*.json" in message
        assert "a:1" not in message

    with_fleet(work, *(tmp_path / name for name in ("first", "second", "third")))


def test_replicas_come_and_go_while_it_runs(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        start(tmp_path, 1, "b:1")
        await fleet.find()
        await fleet.check(1)
        assert states(fleet) == {"a:1": True, "b:1": True}
        # A server that is stopped takes its file back first, and ends its rows.
        (tmp_path / "ready-0.json").unlink()
        fleet.replicas[0].running = 1
        await fleet.find()
        await fleet.check(2)
        assert states(fleet) == {"a:1": False, "b:1": True}
        assert FakeServer.closed == []
        fleet.replicas[0].running = 0
        await fleet.check(3)
        assert states(fleet) == {"b:1": True}
        assert FakeServer.closed == ["a:1"]
        # It comes back with other ports.
        start(tmp_path, 0, "a:2")
        await fleet.find()
        await fleet.check(4)
        assert states(fleet) == {"b:1": True, "a:2": True}

    with_fleet(work, tmp_path)


def test_a_file_that_was_away_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        fleet.replicas[0].running = 1
        (tmp_path / "ready-0.json").unlink()
        await fleet.find()
        assert states(fleet) == {"a:1": False}
        start(tmp_path, 0, "a:1")
        await fleet.find()
        await fleet.check(1)
        assert states(fleet) == {"a:1": True}

    with_fleet(work, tmp_path)


def test_a_file_that_cannot_be_opened_says_nothing_of_its_server(tmp_path: Path) -> None:
    """As where no descriptor is left; a link to itself fails in the same way, also for root."""
    start(tmp_path, 0, "a:1")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        file = tmp_path / "ready-0.json"
        file.unlink()
        file.symlink_to(file)
        await fleet.find()
        await fleet.check(1)
        assert states(fleet) == {"a:1": True}
        file.unlink()
        await fleet.find()
        assert states(fleet) == {"a:1": False}

    with_fleet(work, tmp_path)


def test_a_server_that_fails_is_used_again_when_it_answers(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1")
    start(tmp_path, 1, "b:1")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        first = fleet.replicas[0]
        old = first.backends["tiny"]
        del FakeServer.up["a:1"]
        await fleet.check(100)
        assert states(fleet) == {"a:1": False, "b:1": True}
        FakeServer.up["a:1"] = ["tiny", "new"]
        await fleet.check(100.5)
        assert not first.healthy
        await fleet.check(101)
        assert first.healthy
        assert sorted(first.backends) == ["new", "tiny"]
        assert first.backends["tiny"] is not old

    with_fleet(work, tmp_path)


def test_a_server_that_stays_away_is_asked_ever_less_often(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        del FakeServer.up["a:1"]
        asked = []
        for second in range(100):
            FakeServer.checks.clear()
            was = fleet.replicas[0].healthy
            await fleet.check(second)
            asked += [second] if FakeServer.checks or was else []
        assert asked == [0, 1, 3, 7, 15, 31, 47, 63, 79, 95]

    with_fleet(work, tmp_path)


def test_a_model_that_is_not_ready_makes_its_server_wait(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1", "tiny", "other")

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        FakeServer.up["a:1"].remove("other")
        await fleet.check(1)
        assert states(fleet) == {"a:1": False}

    with_fleet(work, tmp_path)


def test_a_row_that_fails_has_its_server_looked_at_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, 0, "a:1")
    monkeypatch.setattr(fleets, "_CHECK_SECONDS", 3600.0)

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        (replica,) = fleet.replicas
        watching = asyncio.create_task(fleet.watch())
        await asyncio.sleep(0)
        replica.healthy = False
        replica.on_failure()
        while not replica.healthy:
            await asyncio.sleep(0.01)
        watching.cancel()

    with_fleet(work, tmp_path)


def test_watching_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, 0, "a:1")
    monkeypatch.setattr(fleets, "_CHECK_SECONDS", 0.001)

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        start(tmp_path, 1, "b:1")
        FakeServer.up["b:1"] = None  # type: ignore[assignment]
        watching = asyncio.create_task(fleet.watch())
        while FakeServer.checks.count("b:1") < 2:
            await asyncio.sleep(0.01)
        FakeServer.up["b:1"] = ["tiny"]
        while states(fleet) != {"a:1": True, "b:1": True}:
            await asyncio.sleep(0.01)
        watching.cancel()

    with_fleet(work, tmp_path)


@contextmanager
def metrics_of_server(text: str) -> Iterator[str]:
    """host:port of a server that shows `text` as its metrics."""

    class Shown(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shown) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_caches_of_healthy_servers_are_looked_at(tmp_path: Path) -> None:
    text = """# TYPE launcher_kv_cache_tokens gauge
launcher_kv_cache_tokens{model="a"} 300
launcher_kv_cache_tokens{model="b"} 100
launcher_kv_cache_tokens_used{model="a"} 90
launcher_kv_cache_tokens_used{model="b"} 10
launcher_batch_size{model_name="a"} 5
"""

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        await fleet.check_loads()
        assert uses(fleet) == {"a:1": 0.25, "b:1": None, "c:1": None, "d:1": None}
        fleet.replicas[0].healthy = False
        await fleet.check_loads()
        assert uses(fleet)["a:1"] is None

    def uses(fleet: Fleet) -> dict[str, Any]:
        return {each["address"]: each["cache_use"] for each in (r.facts() for r in fleet.replicas)}

    with (
        metrics_of_server(text) as shown,
        metrics_of_server("nv_cpu_utilization 0.5\n") as without,
        metrics_of_server('launcher_kv_cache_tokens{model="a} 5\n') as damaged,
        socket.create_server(("127.0.0.1", 0)) as closing,
    ):
        nobody = f"127.0.0.1:{closing.getsockname()[1]}"
        closing.close()
        for number, metrics in enumerate((shown, without, damaged, nobody)):
            start(tmp_path, number, f"{'abcd'[number]}:1", metrics=metrics)
        with_fleet(work, tmp_path)


def test_old_files_bring_no_server_and_take_none_away(tmp_path: Path) -> None:
    start(tmp_path, 0, "a:1")
    start(tmp_path, 1, "killed:1", age=3600)

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        assert states(fleet) == {"a:1": True}
        # Its disk is full, or its clock is wrong, and it answers.
        start(tmp_path, 0, "a:1", age=3600)
        await fleet.find()
        await fleet.check(1)
        assert states(fleet) == {"a:1": True}

    with_fleet(work, tmp_path)


def test_a_server_that_is_promoted_takes_the_older_ones_requests(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    where = {"results_dir": str(tmp_path), "job_folder": str(job), "host": "127.0.0.1"}
    start(tmp_path, None, "older:1")
    newer = ReadyFiles(DeploySettings("repository", **where, promote="after_gate"))
    newer.prepare()
    newer.write({"grpc": "newer:1"})
    FakeServer.up["newer:1"] = ["tiny"]

    async def work(fleet: Fleet) -> None:
        await fleet.until_ready()
        assert states(fleet) == {"older:1": True}
        fleet.replicas[0].running = 1
        request_publication(job)
        newer.publish()
        for _ in range(2):
            await fleet.find()
            await fleet.check(0.0)
        assert states(fleet) == {"older:1": False, "newer:1": True}
        fleet.replicas[0].running = 0
        await fleet.check(0.0)
        assert states(fleet) == {"newer:1": True}

    with_fleet(work, tmp_path)
