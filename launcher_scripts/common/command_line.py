"""Command lines: a parser, values as Hydra reads them, and the text of --help."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from launcher_scripts.common.packages import ERROR

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./-]*")


class CommandParser(argparse.ArgumentParser):
    """argparse's parser; it ends with 3, since 2 is the verdict INCONCLUSIVE."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ERROR, f"{self.prog}: error: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        with_open_output(sys.stdout.flush)
        super().exit(status, message)


def open_missing_streams() -> None:
    """Connect standard streams that are closed with /dev/null, also for other programs: files that
    are opened later would get their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "w" if number else "r", closefd=False))


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
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), text)
    return "'" + escaped.replace("${", "\\${") + "'"


HEADER = """\
Exports a trained checkpoint to a Triton model repository, deploys it and evaluates it.

python3 main.py 'stages=[export,deploy,evaluate]' cluster_type=interactive [KEY=VALUE ...]
"""
FOOTER = """\
dry_run=True shows every script and settings file and starts nothing.
--cfg job prints the configuration that would be used, --resolve with its values filled in.
eval "$(python3 main.py -sc install=bash)" enables tab completion of `python main.py`.
"""
_DEFAULT = re.compile(r"^  - (?P<group>\w+): (?P<choice>[\w/]+)", re.MULTILINE)
_BASE = re.compile(r"^  - /(?P<path>[\w/]+)@_here_$", re.MULTILINE)
# Blocks of Hydra's own: a line at the margin, and the indented ones after it.
_OF_HYDRA = re.compile(
    r"^(# @package \S+|(# Hydra [^\n]*\n)?(defaults|hydra):\n(  [^\n]*\n|\n)*)", re.MULTILINE
)


def help_text(conf: Path, arguments: Iterable[str]) -> str:
    """Returns the help for a command line, whose choices of files are those that are shown."""
    groups = sorted(path.name for path in conf.iterdir() if path.is_dir())
    lines = [HEADER, "Files that can be chosen (KEY=FILE):", ""]
    for group in groups:
        files = sorted(path.relative_to(conf / group) for path in (conf / group).rglob("*.yaml"))
        lines.append(f"  {group}: {', '.join(file.with_suffix('').as_posix() for file in files)}")
    lines += ["", "Keys (KEY=VALUE):", "", _text(conf / "config.yaml")]
    main = (conf / "config.yaml").read_text(encoding="utf-8")
    defaults = {match["group"]: match["choice"] for match in _DEFAULT.finditer(main)}
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if group in defaults and (conf / group / f"{choice}.yaml").is_file():
            defaults[group] = choice
    defaults["cluster"] = defaults.pop("cluster_type")
    for group, choice in sorted(defaults.items(), key=lambda item: item[0] != "cluster"):
        for file in _files(conf, conf / group / f"{choice}.yaml"):
            text = "\n".join(f"  {line}".rstrip() for line in _text(file).splitlines())
            lines += [f"{group}:  # conf/{file.relative_to(conf).as_posix()}", text, ""]
    return "\n".join([*lines, FOOTER])


def _files(conf: Path, file: Path) -> Iterator[Path]:
    """The files that one is based on, and the file."""
    for match in _BASE.finditer(file.read_text(encoding="utf-8")):
        base = conf / f"{match['path']}.yaml"
        if base.is_file():
            yield from _files(conf, base)
    yield file


def _text(file: Path) -> str:
    return _OF_HYDRA.sub("", file.read_text(encoding="utf-8")).strip("\n")
