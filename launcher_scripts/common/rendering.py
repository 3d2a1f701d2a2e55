"""The only door to jinja2: text files from the templates folder; and plain tables.

Shell text and protobuf text exist only in templates/. Every value passes through one quoting
filter there: `quote` for the shell, `quote_sbatch` for the lines that sbatch reads itself, `pbtxt`
for protobuf text format. HTML escapes every value by itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"


def render(template: str, **values: Any) -> str:
    """The text of templates/<template>; a value that the template lacks is an error."""
    return _environment(TEMPLATES).get_template(template).render(**values)


@cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=jinja2.select_autoescape(("html.j2",)),
    )
    environment.filters["quote"] = quote
    environment.filters["quote_sbatch"] = quote_sbatch
    environment.filters["pbtxt"] = pbtxt
    return environment


def quote(value: object) -> str:
    """`value` as one word of a POSIX shell command."""
    return shlex.quote(str(value))


def quote_sbatch(value: object) -> str:
    """`value` as one word of a line that starts with #SBATCH.

    As in a shell, except that sbatch takes a backslash for an escape within single quotes, too.
    """
    return quote(str(value).replace("\\", "\\\\"))


def pbtxt(value: object) -> str:
    """`value` as a quoted string of protobuf text format.

    Bytes outside printable ASCII are written as octal escapes of their UTF-8 form, which every
    reader of the format accepts.
    """
    plain = {ord('"'): '\\"', ord("\\"): "\\\\", ord("\n"): "\\n", ord("\t"): "\\t"}
    encoded = str(value).encode("utf-8")
    escaped = (
        plain.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in encoded
    )
    return '"' + "".join(escaped) + '"'


def align(rows: Sequence[Sequence[str]], *, left: bool = False) -> str:
    """Columns as wide as they need: the first to the left, the others to the right or left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    others_to = str.ljust if left else str.rjust
    lines = []
    for first, *others in rows:
        cells = [others_to(cell, width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
