"""Command lines: a parser whose errors are not a verdict, and values as Hydra reads them."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from launcher_scripts.common.exit_codes import ERROR

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./-]*")


class CommandParser(argparse.ArgumentParser):
    """argparse's parser; it ends with 3, since 2 is the verdict INCONCLUSIVE."""

    def error(self, message: str) -> NoReturn:
        self.print_usage()
        self.exit(ERROR, f"{self.prog}: error: {message}\n")


def hydra_value(text: str) -> str:
    """A text as a value on Hydra's command line, where a backslash counts only before a quote."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text)
    return "'" + escaped.replace("${", "\\${") + "'"
