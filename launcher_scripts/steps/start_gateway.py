"""Serve OpenAI's interface before one or several servers until stopped.

    python3 -m launcher_scripts.steps.start_gateway --ready results/deploy/ready.json --port 8080

Stopped by SIGINT or SIGTERM, it answers what is running first, and exits with 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher_scripts.steps.packages import GATEWAY_PACKAGES, check_packages

if __name__ == "__main__":
    check_packages("start_gateway", *GATEWAY_PACKAGES)

from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.gateway.service import serve
from launcher_scripts.steps.command import run_step
from launcher_scripts.steps.flags import Flag, FlagTable

FLAGS = FlagTable(
    GatewaySettings,
    {
        "ready": Flag("ready files of the servers, or their job folders", metavar="PATH"),
        "host": Flag("the address to listen on"),
        "port": Flag("0: a free one"),
        "models": Flag("names of those to serve; by default all that generate", metavar="NAME"),
        "tokenizer_dir": Flag(
            "tokenizer and config.ini, if not the repository's", metavar="FOLDER"
        ),
        "chat_template": Flag("Jinja, for models whose checkpoint has none", metavar="FILE"),
        "api_keys": Flag("lines NAME=key; only their owner may read it", metavar="FILE"),
        "max_running": Flag("rows that the servers are given at a time"),
        "max_waiting": Flag("rows that wait for that; more are answered with 429"),
        "max_body": Flag("bytes of a request"),
        "max_model_len": Flag("tokens of prompt and answer; by default the model's positions"),
        "chat_tokens": Flag("tokens of a chat's answer that does not say how many"),
        "request_timeout": Flag("seconds for an answer, unless the request says its timeout"),
        "ready_timeout": Flag("seconds to wait for the servers"),
        "drain_timeout": Flag("seconds for running requests after SIGTERM"),
        "cors_origins": Flag("web pages' origins that may ask", metavar="URL"),
        "tls_certificate": Flag("PEM, for HTTPS", metavar="FILE"),
        "tls_key": Flag("PEM, of that certificate", metavar="FILE"),
        "server_ca": Flag("PEM, whom to trust as a server's gRPC", metavar="FILE"),
        "server_certificate": Flag("PEM, the gateway's own for the servers", metavar="FILE"),
        "server_key": Flag("PEM, of that certificate", metavar="FILE"),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_step("Serve OpenAI's interface.", GatewaySettings, serve, argv, FLAGS)


if __name__ == "__main__":
    sys.exit(main())
