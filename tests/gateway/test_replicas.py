"""Who gets a row, and what becomes of it when its server fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from launcher_scripts.gateway.api_errors import ApiError, ServerLost, bad_request
from launcher_scripts.gateway.backend import Increment, Replica, Replicas, RowRequest
from tests.gateway.fakes import GPT2, FakeBackend, client_of, served

ROW = RowRequest("row", (1, 2, 3), 5)
WORDS = GPT2.encode(" some words to say")


@dataclass(eq=False)
class BreakingBackend(FakeBackend):
    """Its server is lost after so many tokens of every row."""

    after: int = 0

    async def generate(self, request: RowRequest) -> AsyncIterator[Increment]:
        self.requests.append(request)
        for token_id in WORDS[: self.after]:
            yield Increment((token_id,), self._log_probs(request, (token_id,)))
        raise ServerLost("the server takes no requests now: Socket closed")


def servers(*backends: Any) -> list[Replica]:
    return [
        Replica(f"node{number}:8001", {"tiny": backend}, healthy=True)
        for number, backend in enumerate(backends)
    ]


def all_of(rows: Replicas, request: RowRequest = ROW) -> list[Increment]:
    async def increments() -> list[Increment]:
        return [increment async for increment in rows.generate(request)]

    return asyncio.run(increments())


def test_rows_go_where_the_fewest_tokens_are_outstanding() -> None:
    async def spread() -> None:
        all_servers = servers(*(FakeBackend(waits=True) for _ in range(3)))
        rows = Replicas("tiny", all_servers)

        async def begin(prompt: int, tokens: int) -> Any:
            row = rows.generate(RowRequest("row", (1,) * prompt, tokens))
            await anext(row)
            return row

        def outstanding() -> list[int]:
            return [server.outstanding_tokens for server in all_servers]

        long = await begin(10, 90)
        assert outstanding() == [99, 0, 0]
        others = [await begin(10, 20), await begin(40, 2)]
        assert outstanding() == [99, 29, 41]
        # Four short rows weigh less than the long one.
        others += [await begin(1, 2) for _ in range(4)]
        assert [server.running for server in all_servers] == [1, 5, 1]
        assert outstanding() == [99, 29 + 4 * 2, 41]
        await long.aclose()
        assert outstanding()[0] == all_servers[0].running == 0
        for row in others:
            await row.aclose()
        assert outstanding() == [0, 0, 0]

    asyncio.run(spread())


def test_servers_with_the_same_load_take_turns() -> None:
    backends = [FakeBackend() for _ in range(3)]
    rows = Replicas("tiny", servers(*backends))
    for _ in range(6):
        all_of(rows)
    assert [len(backend.requests) for backend in backends] == [2, 2, 2]


def prompt(first: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(first, first + tokens))


def test_a_prompt_goes_where_its_beginning_was() -> None:
    backends = [FakeBackend(shares_prefixes=True) for _ in range(3)]
    rows = Replicas("tiny", servers(*backends))
    texts = [prompt(0, 200), prompt(1000, 200), prompt(2000, 200)]
    for text in texts:
        all_of(rows, replace(ROW, prompt_ids=text))
    for at in (1, 0, 2, 2, 1):
        texts[at] = (*texts[at], *prompt(5000, 70))
        all_of(rows, replace(ROW, prompt_ids=texts[at]))
    assert [len(backend.requests) for backend in backends] == [2, 3, 3]
    other = replace(ROW, prompt_ids=texts[1], cache_salt=7)
    for _ in range(3):
        all_of(rows, other)  # which the others' keys and values are not for
    assert backends[0].requests[-1] == backends[0].requests[-3] == other


def test_a_server_with_much_more_to_do_does_not_get_it() -> None:
    async def spread() -> None:
        all_servers = servers(*(FakeBackend(waits=True, shares_prefixes=True) for _ in range(2)))
        rows = Replicas("tiny", all_servers)
        begun = []
        for text in (prompt(0, 100), (*prompt(0, 100), 7), (*prompt(0, 100), 8)):
            begun.append(rows.generate(replace(ROW, prompt_ids=text)))
            await anext(begun[-1])
        # The second would save 64 of the first's 104 tokens; the third one's server has the fewest.
        assert [server.running for server in all_servers] == [2, 1]
        for row in begun:
            await row.aclose()

    asyncio.run(spread())


def test_a_server_that_failed_has_nothing_any_more() -> None:
    good, bad = FakeBackend(shares_prefixes=True), BreakingBackend(shares_prefixes=True)
    replicas = servers(bad, good)
    rows = Replicas("tiny", replicas)
    request = replace(ROW, prompt_ids=prompt(0, 200))
    all_of(rows, request)
    replicas[0].healthy = True
    for _ in range(2):
        all_of(rows, request)
    assert len(bad.requests) == 1
    assert len(good.requests) == 3


def test_beams_count_each() -> None:
    async def spread() -> None:
        (server,) = servers(BreakingBackend(after=1))
        row = Replicas("tiny", [server]).generate(replace(ROW, beam_width=4))
        await anext(row)
        assert server.outstanding_tokens == 3 + 4 * 5 - 1
        await row.aclose()  # type: ignore[attr-defined]

    asyncio.run(spread())


def test_a_row_that_has_not_begun_goes_elsewhere() -> None:
    broken, whole = BreakingBackend(), FakeBackend()
    all_servers = servers(broken, whole)
    told = []
    all_servers[0].on_failure = lambda: told.append("node0")
    rows = Replicas("tiny", all_servers)
    ids = [token for increment in all_of(rows) for token in increment.token_ids]
    assert ids == WORDS[:5]
    assert [len(broken.requests), len(whole.requests)] == [1, 1]
    assert [server.healthy for server in all_servers] == [False, True]
    assert told == ["node0"]
    assert {server.outstanding_tokens for server in all_servers} == {0}
    all_of(rows)
    assert len(broken.requests) == 1


def test_every_server_is_tried_once() -> None:
    backends = [BreakingBackend() for _ in range(3)]
    rows = Replicas("tiny", servers(*backends))
    with pytest.raises(ApiError, match="Socket closed") as failed:
        all_of(rows)
    assert failed.value.status == 503
    assert [len(backend.requests) for backend in backends] == [1, 1, 1]
    with pytest.raises(ApiError, match="no server of tiny is healthy") as failed:
        all_of(rows)
    assert (failed.value.status, failed.value.headers) == (503, {"Retry-After": "1"})


def test_what_is_wrong_with_the_request_is_no_servers_fault() -> None:
    backends = [FakeBackend(error=bad_request("no such token")), FakeBackend()]
    all_servers = servers(*backends)
    with pytest.raises(ApiError, match="no such token"):
        all_of(Replicas("tiny", all_servers))
    assert all(server.healthy for server in all_servers)
    assert not backends[1].requests


def test_a_server_that_leaves_or_lacks_the_model_gets_nothing() -> None:
    backends = [FakeBackend(), FakeBackend(), FakeBackend()]
    all_servers = servers(*backends)
    all_servers[0].leaving = True
    all_servers[1].backends = {"other": backends[1]}
    rows = Replicas("tiny", all_servers)
    for _ in range(3):
        all_of(rows)
    assert [len(backend.requests) for backend in backends] == [0, 0, 3]
    assert [server.takes("tiny") for server in all_servers] == [False, False, True]


def test_a_failure_of_old_says_nothing_of_a_server_that_has_recovered() -> None:
    async def fail_late() -> None:
        (server,) = servers(BreakingBackend(after=1))
        row = Replicas("tiny", [server]).generate(ROW)
        await anext(row)
        server.backends = {"tiny": FakeBackend()}
        with pytest.raises(ServerLost):
            await anext(row)
        assert server.healthy

    asyncio.run(fail_late())


def completion(replicas: list[Replica], **body: Any) -> Any:
    client = client_of(served(Replicas("tiny", replicas)), replicas=replicas)
    return client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, **body})


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    whole = FakeBackend()
    lines = completion(servers(BreakingBackend(after=2), whole), stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == GPT2.decode(WORDS[:2])
    assert events[-1]["error"]["code"] == "unavailable"
    assert "data: [DONE]" in lines
    assert not whole.requests


def test_a_stream_that_has_not_begun_is_answered() -> None:
    answer = completion(servers(BreakingBackend(), FakeBackend()), stream=True)
    assert answer.status_code == 200
    assert "error" not in answer.text


def test_an_answer_of_which_nothing_was_shown_begins_again() -> None:
    answer = completion(servers(BreakingBackend(after=2), FakeBackend()), logprobs=1, echo=True)
    content = answer.json()
    assert content["choices"][0]["text"] == "Hello" + GPT2.decode(WORDS[:4])
    assert len(content["choices"][0]["logprobs"]["tokens"]) == len(GPT2.encode("Hello")) + 4
    assert content["usage"]["completion_tokens"] == 4
    answer = completion(servers(BreakingBackend(after=2), BreakingBackend(after=2)))
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"


def test_one_row_of_several_may_begin_elsewhere() -> None:
    answer = completion(servers(BreakingBackend(after=2), FakeBackend()), n=4)
    texts = {choice["text"] for choice in answer.json()["choices"]}
    assert texts == {GPT2.decode(WORDS[:4])}


def test_operators_see_the_servers() -> None:
    replicas = [*servers(FakeBackend(), FakeBackend(), FakeBackend()), Replica("node3:8001")]
    replicas[1].healthy = False
    replicas[2].leaving = True
    replicas[2].running, replicas[2].outstanding_tokens = 2, 70
    client = client_of(served(Replicas("tiny", replicas)), replicas=replicas)
    known = {"running": 0, "outstanding_tokens": 0, "cache_use": None, "models": ["tiny"]}
    assert client.get("/servers").json() == {
        "servers": [
            {"address": "node0:8001", "healthy": True, **known},
            {"address": "node1:8001", "healthy": False, **known},
            {
                "address": "node2:8001",
                "healthy": False,
                **known,
                "running": 2,
                "outstanding_tokens": 70,
            },
            {"address": "node3:8001", "healthy": False, **known, "models": []},
        ]
    }
    assert client.get("/ready").status_code == 200
    replicas[0].healthy = False
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
