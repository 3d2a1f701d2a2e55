"""One rank of an engine other than the first, run as a module.

Started by rank 0's process or by the host of another node, which say through standard input where
rank 0 is. It does what rank 0's plans say until it is told to stop or rank 0 is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher_scripts.common.errors import ServerError
from launcher_scripts.common.hosts import node_name
from launcher_scripts.engine.distributed.heartbeat import HEARTBEAT_SECONDS, RankProgress
from launcher_scripts.engine.messages.message import (
    Decoder,
    Failed,
    Loaded,
    Meet,
    OperationRequest,
    RankHello,
    Ready,
    Stop,
)
from launcher_scripts.engine.ranks.links import Link, connect
from launcher_scripts.engine.ranks.peers import RankOrder, die_with_parent

if TYPE_CHECKING:
    from launcher_scripts.engine.runner.loading import EngineSettings
    from launcher_scripts.engine.runner.runner import Runner

CONNECT_SECONDS = 30.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of who started this")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when a rank ends
        signal.signal(number, signal.SIG_IGN)
    order = RankOrder(**json.load(sys.stdin))
    try:
        link = connect(order.addresses, order.port, bytes.fromhex(order.token), CONNECT_SECONDS)
    except ServerError as error:
        print(f"rank {order.rank}: {error}", file=sys.stderr)
        return 1
    progress = RankProgress()
    link.send(RankHello(order.rank, os.getpid(), node_name(os.environ)))
    threading.Thread(target=_send_heartbeats, args=(link, progress), daemon=True).start()
    try:
        _serve(link, order, progress)
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        link.send(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _send_heartbeats(link: Link, progress: RankProgress) -> None:
    while True:
        try:
            link.send(progress.heartbeat())
        except ServerError as error:
            link.send(Failed(str(error)))
            return
        except OSError:
            os._exit(0)  # rank 0 is gone; the main thread may wait for it in a collective
        time.sleep(HEARTBEAT_SECONDS)


def _serve(link: Link, order: RankOrder, progress: RankProgress) -> None:
    """Imports here: torch takes seconds, and rank 0 hears of this one from the start."""
    from launcher_scripts.engine.messages.plan import Plan
    from launcher_scripts.engine.runner.loading import RankSetup
    from launcher_scripts.engine.runner.operations import RankOperations

    setup = link.receive(Decoder(RankSetup, Stop, Failed))
    if isinstance(setup, Failed):
        sys.exit(f"rank {order.rank}: {setup.reason}")
    if isinstance(setup, Stop):
        return
    settings = setup.settings
    for name in ("checkpoint_dir", "draft_checkpoint_dir"):
        if (folder := getattr(order, name)) is not None:
            settings = replace(settings, **{name: Path(folder)})
    runner = _load(settings, order.rank, link, progress)
    operations = RankOperations(runner, settings, order.rank, link.send)
    messages = Decoder(Plan, OperationRequest, Stop)
    while not isinstance(message := link.receive(messages), Stop):
        if isinstance(message, Plan):
            progress.begin_step()
            runner.execute(message)
            progress.end_step()
        else:
            operations.perform(message)
    runner.close()


def _load(settings: EngineSettings, rank: int, link: Link, progress: RankProgress) -> Runner:
    from launcher_scripts.engine.distributed.communicator import (
        ProcessGroupCommunicator,
        join_store,
    )
    from launcher_scripts.engine.runner.loading import (
        assemble_runner,
        load_both,
        open_checkpoints,
        prepare_process,
        rank_device,
        rank_info,
    )

    device = rank_device(settings, rank)
    prepare_process(settings, device)
    checkpoints = open_checkpoints(settings, verify=False)
    weights, draft = load_both(settings, checkpoints, rank, device)
    link.send(Loaded())
    meet = link.receive(Decoder(Meet, Stop))
    if isinstance(meet, Stop):
        raise EOFError("the engine is closed before its ranks met")
    communicator = ProcessGroupCommunicator(
        settings.parallelism,
        rank,
        join_store(meet.host, meet.port, settings.start_timeout),
        device,
        settings.start_timeout,
        host=meet.host,
        progress=progress,
    )
    runner = assemble_runner(weights, settings, communicator, device, draft=draft)
    progress.loaded()
    link.send(Ready(rank_info(rank, device)))
    return runner


if __name__ == "__main__":
    sys.exit(main())
