"""A gateway before three real servers on the CPU, one of which is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.jobs.status import query_load as load_of
from tests.gateway.processes import RunningGateway, gateway_job
from tests.http_requests import receive
from tests.lazy_modules import LazyModule
from tests.processes import wait_for
from tests.server.processes import RunningStep, running
from tests.server.repositories import export, text_config

openai = LazyModule("openai")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]
FIRST = 9  # streams, a third of which every server has begun when the others come
CLIENTS = 48
ASKED = {
    "model": "tiny",
    "prompt": "Hello the people",
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
TOKENS, LONG = 300, 16000  # the long streams are broken or left, and never reach their end


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportSettings:
    folder = tmp_path_factory.mktemp("replicas")
    return export(folder, text_config(max_positions=16384), name="tiny", decoupled=True)


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
    return {each["address"]: each for each in receive(f"{started.address}/servers")["servers"]}


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


async def streamed(client: Any, tokens: int, pieces: list[str]) -> str | None:
    """The text, whose pieces are also put into `pieces`; None where it broke after the first."""
    try:
        asked = {**ASKED, "max_tokens": tokens, "stream": True}
        async for event in await client.completions.create(**asked):
            pieces.append(event.choices[0].text)
    except openai.APIError:
        if not pieces:
            raise
        return None
    return "".join(pieces)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_for, condition, 120)


def test_a_server_that_is_killed_takes_no_request_with_it_that_had_not_begun(
    tmp_path: Path, exported: ExportSettings, three: list[RunningStep]
) -> None:
    addresses = [json.loads(each.settings.ready_file.read_text())["grpc"] for each in three]

    async def load(started: RunningGateway) -> tuple[str, list[str], list[str], list[str | None]]:
        """Whom it killed, the unbroken long streams, whole answers, and the streams that came
        last."""
        long: list[list[str]] = [[] for _ in range(FIRST)]
        async with openai.AsyncOpenAI(
            base_url=started.facts["openai"], api_key="none", max_retries=0, timeout=600
        ) as client:
            first = [asyncio.create_task(streamed(client, LONG, pieces)) for pieces in long]
            await until(lambda: all(long))
            seen = servers(started)
            address = min(seen, key=lambda each: seen[each]["outstanding_tokens"])  # gets the next
            running = three[addresses.index(address)].survivors()
            (victim,) = (pid for pid, command in running if "tritonserver" in command)
            texts = [asyncio.create_task(whole(client)) for _ in range(CLIENTS // 2)]
            streams = [
                asyncio.create_task(streamed(client, TOKENS, [])) for _ in range(CLIENTS // 2)
            ]
            await until(lambda: servers(started)[address]["running"] > seen[address]["running"])
            os.kill(victim, signal.SIGKILL)
            counts = list(map(len, long))
            broken, going = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result() for task in broken} == {None}
            found = [await asyncio.gather(*each) for each in (texts, streams)]
            await until(
                lambda: all(
                    task.done() or len(pieces) > count
                    for task, pieces, count in zip(first, long, counts, strict=True)
                )
            )
            left = [
                "".join(pieces)
                for task, pieces in zip(first, long, strict=True)
                if task in going and task.cancel()
            ]
            await asyncio.gather(*going, return_exceptions=True)
            return address, left, *found

    with gateway_job(tmp_path / "run", tmp_path / "results", restarts=1) as started:
        started.wait_until_ready()
        wait_for(lambda: len(healthy(started)) == 3)
        address, long, texts, streams = asyncio.run(load(started))
        assert len(set(texts)) == 1
        assert long and all(texts[0].startswith(each[: len(texts[0])]) for each in long)
        assert texts[0] in streams
        assert {*streams, None} == {texts[0], None}
        wait_for(lambda: address not in servers(started))
        assert len(healthy(started)) == 2
        wait_for(lambda: not any(each["running"] for each in servers(started).values()))
        with replica(tmp_path, exported, addresses.index(address), run=1) as again:
            ready = again.wait_until_ready()
            new = ready["grpc"]
            wait_for(lambda: new in healthy(started))

            async def more() -> list[str]:
                async with openai.AsyncOpenAI(
                    base_url=started.facts["openai"], api_key="none", max_retries=0, timeout=600
                ) as client:
                    return await asyncio.gather(*(whole(client) for _ in range(6)))

            assert set(asyncio.run(more())) == {texts[0]}
            wait_for(lambda: load_of(ready["metrics"]).requests)
            # A replica that is cancelled leaves; the others go on.
            assert again.stop() == 0
            wait_for(lambda: new not in servers(started))
            assert len(healthy(started)) == 2
