"""Serve a model repository in the foreground until stopped.

    python3 -m launcher_scripts.steps.start_server --settings <file>.yaml

The file holds DeploySettings; --replica says which of several servers with these settings this is.
Being stopped by SIGINT, SIGTERM or SIGHUP is how a service ends:
exit status 0. A server that does not become ready or dies gives 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from launcher_scripts.server.service import serve
from launcher_scripts.settings import DeploySettings
from launcher_scripts.steps.command import run_step


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; `--replica` is taken out of argv, the rest is every step's."""
    numbered = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    numbered.add_argument("--replica", type=int)
    given, rest = numbered.parse_known_args(argv)

    def body(settings: DeploySettings) -> None:
        serve(replace(settings, replica=given.replica))

    return run_step("Serve a model repository until stopped.", DeploySettings, body, rest)


if __name__ == "__main__":
    sys.exit(main())
