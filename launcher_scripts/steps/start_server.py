"""Serve a model repository in the foreground until stopped.

    python3 -m launcher_scripts.steps.start_server --settings <file>.yaml

The file holds DeploySettings. Being stopped by SIGINT, SIGTERM or SIGHUP is how a service ends:
exit status 0. A server that does not become ready or dies gives 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher_scripts.server.service import serve
from launcher_scripts.settings import DeploySettings
from launcher_scripts.steps.command import run_step


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Serve a model repository until stopped.", DeploySettings, serve, argv)


if __name__ == "__main__":
    sys.exit(main())
