"""Work on reports: python3 -m launcher_scripts.evaluation COMMAND --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher_scripts.common.command_line import CommandParser, installed_packages, with_open_output
from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.packages import ERROR

with installed_packages("evaluation"):
    from launcher_scripts.config.policy import PolicySettings, read_policy
    from launcher_scripts.evaluation import gate, report_difference
    from launcher_scripts.evaluation.journal import read_content, report_file
    from launcher_scripts.evaluation.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python3 -m launcher_scripts.evaluation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report_difference.add_arguments(
        commands.add_parser("compare", help="what differs between two reports")
    )
    judge = commands.add_parser("judge", help="may the model go live?")
    judge.add_argument(
        "report", type=Path, help="report.json or its folder; its verdict is replaced"
    )
    judge.add_argument("--policy", type=Path, help="YAML file; by default the default policy")
    judge.set_defaults(run=_judge)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return with_open_output(lambda: int(args.run(args)))
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR


def _judge(args: argparse.Namespace) -> int:
    """0: GO, 1: NO-GO, 2: INCONCLUSIVE."""
    policy = read_policy(args.policy) if args.policy else PolicySettings()
    folder = report_file(args.report.absolute()).parent
    content = read_content(args.report, "the command line")
    verdict = gate.judge(content, policy, folder)
    print("\n".join(verdict.lines()))
    Report(folder, content["model"]).add_verdict(verdict)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
