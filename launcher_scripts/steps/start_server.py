"""Serve a model repository in the foreground until stopped.

    python3 -m launcher_scripts.steps.start_server --settings <file>.yaml

The file holds DeploySettings; --replica says which of several servers with these settings this is,
where the file does not.
Text models whose code or tokenizer was altered since the export are refused, and repositories
without the wanted signature.
Being stopped by SIGINT, SIGTERM or SIGHUP is how a service ends:
exit status 0. A server that does not become ready or dies gives 1.

On several nodes (one task each) the server runs on the first; the others host ranks for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher_scripts.common.packages import CLOSED_PACKAGES, check_packages, note_slow_checksums

if __name__ == "__main__":
    check_packages("start_server")
    note_slow_checksums()

from launcher_scripts.checkpoint.model_repository import check_text_models
from launcher_scripts.checkpoint.verification import verify_signature
from launcher_scripts.common.command_line import CommandParser
from launcher_scripts.common.hosts import find_node_rank, unbind_from_core
from launcher_scripts.common.processes import StopRequest
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.engine.ranks.rank_host import NodeHost
from launcher_scripts.server.service import rendezvous_folder, serve_repository
from launcher_scripts.steps.command import run_step

# srun ends a step with its first failing task, and drops what that has only just said.
LAST_WORDS_SECONDS = 1.0


def start(settings: DeploySettings) -> None:
    """Serve, or host ranks for the node that serves; see find_node_rank."""
    node_rank = find_node_rank(os.environ)
    note = unbind_from_core(os.environ)
    if note is not None:
        print(f"note: {note}", flush=True)
    if node_rank.nodes > 1:
        print(
            f"node {node_rank.node} of {node_rank.nodes}, started by {node_rank.launcher}",
            flush=True,
        )
    if node_rank.serves:
        if settings.is_closed:
            check_packages("start_server", *CLOSED_PACKAGES)
        if settings.gateway is not None:
            check_packages("start_gateway")
        if settings.verify_signature is not None:
            verify_signature(Path(settings.model_repository), settings.verify_signature)
            print(f"the signature of {settings.model_repository} is valid", flush=True)
        check_text_models(settings.model_repository)
        serve_repository(settings, node_rank)
        return
    stop = StopRequest()
    folder = rendezvous_folder(settings)
    host = NodeHost(node_rank, [folder], restarts=settings.restarts, timeout=settings.ready_timeout)
    with stop.listening():
        host.run(lambda: stop.received is not None, settings.stop_timeout)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; `--replica` is taken out of argv, the rest is every step's."""
    numbered = CommandParser(add_help=False, allow_abbrev=False)
    numbered.add_argument("--replica", type=int)
    args, extra = numbered.parse_known_args(argv)

    def body(settings: DeploySettings) -> None:
        is_main = args.replica is None
        start(settings if is_main else replace(settings, replica=args.replica))

    code = run_step("Serve a model repository until stopped.", DeploySettings, body, extra)
    if code and "SLURM_STEP_ID" in os.environ:
        sys.stderr.flush()
        time.sleep(LAST_WORDS_SECONDS)
    return code


if __name__ == "__main__":
    sys.exit(main())
