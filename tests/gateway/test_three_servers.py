"""A gateway before three real servers on the CPU, one of which is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.config.settings import ExportSettings
from tests.gateway.processes import RunningGateway, gateway_job
from tests.server.processes import RunningStep, running, wait_for
from tests.server.repositories import export, text_config

openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("pytriton") is None,
        reason="the pip-installable tritonserver is not there",
    ),
]
FIRST = 9  # streams, a third of which every server has begun when the others come
CLIENTS = 48
ASKED = {
    "model": "tiny",
    "prompt": "Hello the people",
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
TOKENS, LONG = 300, 2000


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportSettings:
    folder = tmp_path_factory.mktemp("replicas")
    return export(folder, text_config(max_positions=2048), name="tiny", decoupled=True)


def replica(
    folder: Path, exported: ExportSettings, number: int, run: int = 0
) -> contextlib.AbstractContextManager[RunningStep]:
    """A server that writes its ready file where the others do."""
    own = folder / f"{number}-{run}"
    own.mkdir()
    (folder / "results").mkdir(exist_ok=True)
    (own / "results").symlink_to(folder / "results")
    return running(own, Path(exported.model_repository), replica=number)


def servers(started: RunningGateway) -> dict[str, Any]:
    with urllib.request.urlopen(f"{started.address}/servers") as answer:
        return {each["address"]: each for each in json.load(answer)["servers"]}


def healthy(started: RunningGateway) -> set[str]:
    return {address for address, each in servers(started).items() if each["healthy"]}


@pytest.fixture
def three(tmp_path: Path, exported: ExportSettings) -> Iterator[list[RunningStep]]:
    with contextlib.ExitStack() as stack:
        steps = [stack.enter_context(replica(tmp_path, exported, each)) for each in range(3)]
        for step in steps:
            step.wait_until_ready()
        yield steps


async def whole(client: Any) -> str:
    return (await client.completions.create(**ASKED, max_tokens=TOKENS)).choices[0].text


async def streamed(client: Any, tokens: int, begun: list[None]) -> str | None:
    """The text; None for a stream that had begun and broke."""
    text, first = "", True
    try:
        asked = {**ASKED, "max_tokens": tokens, "stream": True}
        async for event in await client.completions.create(**asked):
            if first:
                first = False
                begun.append(None)
            text += event.choices[0].text
    except openai.APIError:
        if first:
            raise
        return None
    return text


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_for, condition, 120)


def test_a_server_that_is_killed_takes_no_request_with_it_that_had_not_begun(
    tmp_path: Path, exported: ExportSettings, three: list[RunningStep]
) -> None:
    address = json.loads(three[1].settings.ready_file.read_text())["grpc"]
    (victim,) = (pid for pid, command in three[1].survivors() if "tritonserver" in command)

    async def load(started: RunningGateway) -> list[list[str | None]]:
        begun: list[None] = []
        async with openai.AsyncOpenAI(
            base_url=started.facts["openai"], api_key="none", max_retries=0, timeout=600
        ) as client:
            first = [asyncio.create_task(streamed(client, LONG, begun)) for _ in range(FIRST)]
            await until(lambda: len(begun) == FIRST)
            texts = [asyncio.create_task(whole(client)) for _ in range(CLIENTS // 2)]
            streams = [
                asyncio.create_task(streamed(client, TOKENS, begun)) for _ in range(CLIENTS // 2)
            ]
            await until(lambda: servers(started)[address]["running"] >= CLIENTS // 4)
            os.kill(victim, signal.SIGKILL)
            return [await asyncio.gather(*each) for each in (first, texts, streams)]

    with gateway_job(tmp_path / "run", tmp_path / "results", restarts=1) as started:
        started.wait_until_ready()
        wait_for(lambda: len(healthy(started)) == 3, 60)
        first, texts, streams = asyncio.run(load(started))
        assert None in first
        assert len({*first, None}) == 2
        assert len(set(texts)) == 1
        assert texts[0] is not None
        assert texts[0] in streams
        assert {*streams, None} == {texts[0], None}
        wait_for(lambda: address not in servers(started), 60)
        assert len(healthy(started)) == 2
        with replica(tmp_path, exported, 1, run=1) as again:
            new = again.wait_until_ready()["grpc"]
            wait_for(lambda: new in healthy(started), 60)

            async def more() -> list[str]:
                async with openai.AsyncOpenAI(
                    base_url=started.facts["openai"], api_key="none", max_retries=0, timeout=600
                ) as client:
                    found = [asyncio.create_task(whole(client)) for _ in range(6)]
                    await until(lambda: servers(started)[new]["running"] == 2)
                    return await asyncio.gather(*found)

            assert set(asyncio.run(more())) == {texts[0]}
            # A replica that is cancelled leaves; the others go on.
            assert again.stop() == 0
            wait_for(lambda: new not in servers(started), 60)
            assert len(healthy(started)) == 2
