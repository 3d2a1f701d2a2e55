"""Run one gateway before the servers of a deployment, in a job of its own, until stopped.

    python3 -m launcher_scripts.steps.run_gateway --settings <file>.yaml

The file holds GatewayJobSettings. Being stopped by SIGINT, SIGTERM or SIGHUP is how it ends:
exit status 0. A gateway that cannot start, or dies too often, gives 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("run_gateway")

from launcher_scripts.config.gateway import GatewayJobSettings
from launcher_scripts.server.gateway_process import serve_gateway
from launcher_scripts.steps.command import run_step


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Run a gateway until stopped.", GatewayJobSettings, serve_gateway, argv)


if __name__ == "__main__":
    sys.exit(main())
