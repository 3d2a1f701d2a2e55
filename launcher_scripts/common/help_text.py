"""The text of --help: every key with its comment, as the files of conf/ have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

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
    chosen = {match["group"]: match["choice"] for match in _DEFAULT.finditer(main)}
    for argument in arguments:
        group, _, choice = argument.partition("=")
        if group in chosen and (conf / group / f"{choice}.yaml").is_file():
            chosen[group] = choice
    chosen["cluster"] = chosen.pop("cluster_type")
    for group, choice in sorted(chosen.items(), key=lambda item: item[0] != "cluster"):
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
