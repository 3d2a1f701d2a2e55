"""Command lines: a parser whose errors are not a verdict, and values as Hydra reads them."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from launcher_scripts.common.exit_codes import ERROR

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./-]*")


class CommandParser(argparse.ArgumentParser):
    """argparse's parser; it ends with 3, since 2 is the verdict INCONCLUSIVE."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ERROR, f"{self.prog}: error: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        with_open_output(sys.stdout.flush)
        super().exit(status, message)


def with_open_output(body: Callable[[], int | None]) -> int:
    """Returns the exit code of `body`, or that of SIGPIPE if the reader of stdout, for example
    `head`, closes it before `body` ends. Other broken pipes are errors of `body`.
    """
    code = 128 + signal.SIGPIPE
    try:
        code = body() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):
            raise
        # Python would complain about unwritten output at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _is_closed(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def installed_packages(command: str) -> Iterator[None]:
    """End the process with one line if an import inside finds no package."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("launcher_scripts"):
            raise
        print(
            f"error: {command}: {sys.executable} has no package {missing.name}; `make setup` "
            "installs all packages into .venv, and `. .venv/bin/activate` selects its python3",
            file=sys.stderr,
        )
        raise SystemExit(ERROR) from None


def hydra_value(text: str) -> str:
    """A text as a value on Hydra's command line, where a backslash counts only before a quote."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text)
    return "'" + escaped.replace("${", "\\${") + "'"
