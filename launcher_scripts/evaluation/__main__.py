"""What reports say.

    python3 -m launcher_scripts.evaluation compare /results/monday /results/tuesday

compare explains two reports; exit codes: 0: the same results, 1: others, 2: not comparable.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher_scripts.common.errors import LauncherError
from launcher_scripts.evaluation import compare

BROKEN_PIPE = 141  # the shell's exit code of a program whose reader has left
CANNOT = 2


class Command(NamedTuple):
    """A word of the command line: its help, its arguments, and what it does: to an exit code."""

    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "compare": Command("what differs between two reports", compare.add_arguments, compare.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher_scripts.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(words.add_parser(name, help=command.about, description=command.about))
    given = parser.parse_args(argv)
    try:
        return COMMANDS[given.command].run(given)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT
    except BrokenPipeError:
        # The reader has seen enough; Python would complain about the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
