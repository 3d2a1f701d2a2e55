"""One run of a load by one or several client processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from launcher_scripts.common.errors import ServerError
from launcher_scripts.evaluation.load.driver import DriverResult, drive
from launcher_scripts.evaluation.load.paths import Target
from launcher_scripts.evaluation.load.plan import Plan

_START_SECONDS = 120.0  # for a process to import what it needs


def run_plan(target: Target, plan: Plan, processes: int) -> list[DriverResult]:
    """What each process saw; one process is this one.

    Raises ServerError when a process dies.
    """
    plans = plan.divided(processes)
    if len(plans) == 1:
        return [asyncio.run(_drive(target, plans[0]))]
    context = multiprocessing.get_context("spawn")  # a fork would share gRPC's threads
    barrier = context.Barrier(len(plans))
    started = []
    for each in plans:
        receiver, sender = context.Pipe(duplex=False)
        arguments = (target, each, barrier, sender)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        sender.close()
        started.append((process, receiver))
    try:
        return [receiver.recv() for _, receiver in started]
    except EOFError as error:
        raise ServerError("a client process of the load test died") from error
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def _work(target: Target, plan: Plan, barrier: Barrier, sender: Connection) -> None:
    barrier.wait(_START_SECONDS)
    sender.send(asyncio.run(_drive(target, plan)))
    sender.close()


async def _drive(target: Target, plan: Plan) -> DriverResult:
    path = target.open()
    try:
        return await drive(plan, path.ask)
    finally:
        await path.close()
