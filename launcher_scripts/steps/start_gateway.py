"""Serve OpenAI's interface before one or several servers until stopped.

    python3 -m launcher_scripts.steps.start_gateway --ready results/deploy/ready.json --port 8080

Stopped by SIGINT or SIGTERM, it answers what is running first, and exits with 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher_scripts.common.packages import check_packages

if __name__ == "__main__":
    check_packages("start_gateway")

from launcher_scripts.common.processes import server_limits, set_limits
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.gateway.service import serve_gateway_settings
from launcher_scripts.steps.command import FlagTable, run_step

FLAGS = FlagTable(GatewaySettings)


def main(argv: Sequence[str] | None = None) -> int:
    return run_step(
        "Serve OpenAI's interface.", GatewaySettings, serve_gateway_settings, argv, FLAGS
    )


if __name__ == "__main__":
    set_limits(server_limits())  # also where it is started by hand
    sys.exit(main())
