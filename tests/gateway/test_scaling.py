"""Command lines on this machine: a gateway, and servers that join and leave it under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_requests import receive
from tests.lazy_modules import LazyModule
from tests.processes import wait_for
from tests.server.processes import CHECKOUT
from tests.server.repositories import export, text_config

openai = LazyModule("openai")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tritonserver")]
CLIENTS = 12
TOKENS = 60
MORE = 40  # answers that the load goes on for after each change

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start main.py on this machine, in the background; whatever a test leaves is ended."""
    exported = export(tmp_path, text_config(max_positions=512), name="tiny", decoupled=True)
    ports = (f"deploy.server.{name}_port=0" for name in ("http", "grpc", "metrics"))
    arguments = [
        "cluster_type=interactive",
        f"base_results_dir={tmp_path / 'results'}",
        "export.run.model_train_name=tiny",
        f"deploy.model_repository={exported.model_repository}",
        "deploy.server.device=cpu",
        *ports,
    ]
    with contextlib.ExitStack() as started:

        def start_main(*more: str) -> subprocess.Popen[str]:
            log = started.enter_context(
                (tmp_path / f"{len(list(tmp_path.iterdir()))}.log").open("w")
            )
            process = subprocess.Popen(
                [sys.executable, str(CHECKOUT / "main.py"), *arguments, *more],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.callback(process.wait)
            started.callback(process.terminate)
            return process

        yield start_main


def ready(folder: Path, name: str) -> dict[str, Any]:
    """The ready file, once it is there."""

    def found() -> list[Path]:
        return list(folder.glob(f"results/tiny/{name}"))

    wait_for(lambda: bool(found()))
    return json.loads(found()[0].read_text())


def servers(address: str) -> dict[str, dict[str, Any]]:
    found = receive(f"{address.removesuffix('/v1')}/servers")
    return {each["address"]: each for each in found["servers"]}


async def load(address: str, change: Callable[[list[str]], None]) -> list[str]:
    """The texts of CLIENTS that ask one request after another while `change` runs."""
    texts: list[str] = []
    ending = asyncio.Event()

    async def ask(client: Any, stream: bool) -> None:
        asked = {"model": "tiny", "prompt": "Hello", "max_tokens": TOKENS, "temperature": 0}
        while not ending.is_set():
            answer = await client.completions.create(
                **asked, stream=stream, extra_body={"ignore_eos": True}
            )
            if stream:
                texts.append("".join([event.choices[0].text async for event in answer]))
            else:
                texts.append(answer.choices[0].text)

    async with openai.AsyncOpenAI(
        base_url=address, api_key="none", max_retries=0, timeout=600
    ) as client:
        asking = [asyncio.create_task(ask(client, number % 2 > 0)) for number in range(CLIENTS)]
        changing = asyncio.create_task(asyncio.to_thread(change, texts))
        await asyncio.wait({*asking, changing}, return_when=asyncio.FIRST_COMPLETED)
        ending.set()
        await asyncio.gather(*asking)
        await changing
    return texts


def test_servers_join_and_leave_and_no_request_fails(tmp_path: Path, start: Start) -> None:
    first = start("stages=[deploy]", "deploy.first_replica=0")
    before = ready(tmp_path, "deploy_*/ready-0.json")["grpc"]
    gateway = start("stages=[gateway]", "gateway.port=0")
    address = ready(tmp_path, "gateway_*/ready.json")["openai"]
    later: list[subprocess.Popen[str]] = []

    def change(texts: list[str]) -> None:
        later.append(start("stages=[deploy]", "deploy.first_replica=1"))
        joined = ready(tmp_path, "deploy_*/ready-1.json")["grpc"]
        wait_for(lambda: servers(address).get(joined, {}).get("running", 0) > 0)
        assert set(servers(address)) == {before, joined}
        some = len(texts) + MORE
        wait_for(lambda: len(texts) > some)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 0
        wait_for(lambda: set(servers(address)) == {joined})
        some = len(texts) + MORE
        wait_for(lambda: len(texts) > some)

    texts = asyncio.run(load(address, change))
    assert len(set(texts)) == 1
    assert texts[0]
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(120) == 0
    later[0].send_signal(signal.SIGTERM)
    assert later[0].wait(120) == 0
    assert not list(tmp_path.glob("results/tiny/*/ready*.json"))
