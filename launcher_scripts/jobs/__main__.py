"""Commands on the jobs that main.py started.

    python3 -m launcher_scripts.jobs list
    python3 -m launcher_scripts.jobs status deploy_gpt3_126m
    python3 -m launcher_scripts.jobs wait --ready --timeout 600 deploy_gpt3_126m

A job is named by its folder, its id, its name (the latest run), name/run, or its model (the latest
job of each stage). Exit codes:
status 0: serves, or is done; 1: has failed; 3: not so far; 5: nobody knows; wait: that of the job,
124: the time is over. 4: no such job.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher_scripts.common.command_line import CommandParser, installed_packages, with_open_output
from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.hosts import LoginNode

with installed_packages("jobs"):
    from launcher_scripts.jobs.commands import COMMANDS, Request


def main(argv: Sequence[str] | None = None) -> int:
    options = vars(_parser().parse_args(argv))
    ssh, python = options.pop("ssh"), options.pop("ssh_python")
    command = COMMANDS[options.pop("command")]
    options["jobs"] = tuple(options.get("jobs", ()))
    try:
        if ssh is not None:
            return _run_over_ssh(
                LoginNode(ssh, python), options, sys.argv[1:] if argv is None else argv
            )
        return with_open_output(lambda: command(Request(**options)))
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run_over_ssh(node: LoginNode, options: dict[str, Any], argv: Sequence[str]) -> int:
    """The same command on a login node; a tunnel is opened from here."""
    position = next(number for number, word in enumerate(argv) if word in COMMANDS)
    words = ["-m", "launcher_scripts.jobs", *argv[position:]]
    if "via" not in options:
        return node.run(words)[0]
    words = [word for word in words if word != "--open"]
    code, text = node.run([*words, f"--via={options['via'] or node.host}"], capture=True)
    print(text, end="", flush=True)
    if code or not options["open"]:
        return code
    return subprocess.run(shlex.split(text.partition("\n")[0]), check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python3 -m launcher_scripts.jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ssh", metavar="USER@HOST", help="run the command on this login node of a cluster"
    )
    parser.add_argument(
        "--ssh-python", default="python3", metavar="PATH", help="its interpreter (%(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, names, described in (
        ("list", "", "every job and its state"),
        ("status", "*", "servers, nodes and load; of all that have not ended"),
        ("logs", "+", "what jobs have printed"),
        ("info", "+", "paths, ids, command and configuration of jobs"),
        ("resume", "1", "run the command line of a job again, which continues where it stopped"),
        ("wait", "+", "until jobs have ended, or servers are ready"),
        ("tunnel", "1", "the ssh command by which a laptop reaches a ready server"),
        ("swap", "1", "serve the weights of another export of the same sizes, without a restart"),
        ("stop", "+", "end in order: servers finish their requests"),
        ("cancel", "+", "end at once"),
    ):
        command = commands.add_parser(name, help=described, description=described)
        command.add_argument(
            "--results",
            type=Path,
            metavar="DIR",
            help="base_results_dir of the jobs (all of yours; first ./results, the checkout's)",
        )
        if name not in ("logs", "resume", "swap", "tunnel"):
            command.add_argument("--json", dest="as_json", action="store_true", help="as JSON")
        if names:
            about = "folder, id, name, name/run or model"
            nargs = 1 if names == "1" else names
            command.add_argument("jobs", metavar="JOB", nargs=nargs, help=about)
        _add_specific(command, name)
    return parser


def _seconds(text: str) -> float:
    """A time from the command line; argparse names the option that has another."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds: {text}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number: {text}")
    return int(text)


def _add_specific(command: argparse.ArgumentParser, name: str) -> None:
    """The options of a single command."""
    if name == "status":
        command.add_argument(
            *("-w", "--watch"),
            dest="every",
            type=_seconds,
            nargs="?",
            const=2.0,
            metavar="SECONDS",
            help="show it again and again (every %(const)s s)",
        )
    elif name == "logs":
        command.add_argument("-f", "--follow", action="store_true", help="until the jobs end")
        command.add_argument(
            "-n", "--lines", type=_count, metavar="N", help="only the last N lines"
        )
        command.add_argument("--stage", metavar="STAGE", help="only of this stage's jobs")
    elif name == "swap":
        command.add_argument(
            "checkpoint", type=Path, metavar="CHECKPOINT", help="a model repository, or its shards"
        )
        command.add_argument(
            "--mode",
            choices=("drain", "mixed"),
            default="drain",
            help="requests that run end before, or go on with the new weights (%(default)s)",
        )
        command.add_argument(
            "--drain-timeout",
            type=_seconds,
            default=30.0,
            metavar="SECONDS",
            help="that requests have to end; then nothing is exchanged (%(default)s)",
        )
        command.add_argument(
            "--ca", metavar="FILE", help="a gateway with TLS: certificates to trust (the system's)"
        )
    elif name == "tunnel":
        command.add_argument(
            "--via", metavar="USER@HOST", help="login node of the cluster (you on this machine)"
        )
        command.add_argument(
            "--port", type=_count, metavar="PORT", help="port of the laptop (the server's)"
        )
        command.add_argument("--open", action="store_true", help="run it here, until Ctrl-C")
    elif name == "wait":
        command.add_argument("--ready", action="store_true", help="servers: until they are ready")
        command.add_argument(
            "--timeout", type=_seconds, metavar="SECONDS", help="give up then: 124"
        )


if __name__ == "__main__":
    sys.exit(main())
