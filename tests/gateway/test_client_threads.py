"""Threads that clients share: none has them all, and who leaves is not waited for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from launcher_scripts.gateway import admission
from launcher_scripts.gateway.admission import CLIENT_THREADS, ClientThreads
from launcher_scripts.gateway.api_errors import ApiError


@pytest.fixture
def gate():
    """Opened at the end, so that no thread waits indefinitely."""
    event = threading.Event()
    yield event
    event.set()


def test_a_client_with_much_work_does_not_hold_up_another(gate) -> None:
    async def main() -> None:
        threads = ClientThreads()
        greedy = [asyncio.ensure_future(threads.run("greedy", gate.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.run("other", lambda: "done"), 60) == "done"
        assert not any(task.done() for task in greedy)
        gate.set()
        assert await asyncio.gather(*greedy) == [True] * 20

    asyncio.run(main())


def test_work_of_a_client_that_has_left_is_not_done(gate) -> None:
    async def main() -> None:
        threads = ClientThreads()
        calls: list[int] = []
        running = [
            asyncio.ensure_future(threads.run("a", gate.wait)) for _ in range(CLIENT_THREADS)
        ]
        left = [asyncio.ensure_future(threads.run("a", lambda: calls.append(1))) for _ in range(9)]
        await asyncio.sleep(0)
        for task in (*left, running[0]):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert not threads._waiting
        gate.set()
        await asyncio.gather(*running[1:])
        assert await asyncio.wait_for(threads.run("a", lambda: "done"), 60) == "done"
        assert calls == []

    asyncio.run(main())


def test_a_client_may_have_so_much_in_line(gate, monkeypatch) -> None:
    monkeypatch.setattr(admission, "MAX_WAITING", 3)

    async def main() -> None:
        threads = ClientThreads()
        tasks = [
            asyncio.ensure_future(threads.run("a", gate.wait)) for _ in range(CLIENT_THREADS + 3)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="3 requests of this client wait") as refused:
            await threads.run("a", gate.wait)
        assert refused.value.status == 429
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_an_error_is_the_works_own_and_frees_the_thread() -> None:
    async def main() -> None:
        threads = ClientThreads()
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                await threads.run("a", lambda: 1 / 0)
        assert await threads.run("a", lambda: 1, size=5) == 1

    asyncio.run(main())
