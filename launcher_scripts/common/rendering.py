"""The only door to jinja2: text files from the templates folder; and plain tables.

Shell text and protobuf text exist only in templates/. Every value passes through one quoting
filter there: `quote` for the shell, `quote_sbatch` for the lines that sbatch reads itself, `pbtxt`
for protobuf text format. HTML escapes every value by itself.

Renders Jinja chat templates, in processes of limited time and memory: they come with
checkpoints, and are a stranger's programs.

The environment is the one in which transformers renders templates (its documentation "Writing a
chat template"): an immutable sandbox, blocks trimmed, loop controls, and the functions
raise_exception and strftime_now.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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


MAX_TEMPLATES = 16  # compiled ones that a process keeps
# Members of a result: a text, what the template refuses, what it cannot do, where it is no Jinja.
TEXT, REFUSAL, FAILURE, SYNTAX = "text", "refusal", "failure", "syntax"


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; it changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_renderer(_argument: None) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """For LimitedProcesses: renders {template, values, max_chars}; without values only compiles."""
    environment = _chat_environment()
    compiled = lru_cache(MAX_TEMPLATES)(environment.from_string)

    def render(item: Mapping[str, Any]) -> dict[str, str]:
        try:
            template = compiled(item["template"])
        except jinja2.TemplateSyntaxError as error:
            return {SYNTAX: f"line {error.lineno}: {error.message}"}
        except MemoryError:
            raise
        except Exception as error:  # nested too deeply, for example
            return {SYNTAX: f"{type(error).__name__}: {error}"}
        if "values" not in item:
            return {}
        try:
            return {TEXT: _limited(template, item["values"], item["max_chars"])}
        except jinja2.TemplateError as error:
            return {REFUSAL: str(error)}
        except MemoryError:
            raise
        except Exception as error:
            return {FAILURE: f"{type(error).__name__}: {error}"}

    return render


def _limited(template: jinja2.Template, values: Mapping[str, Any], max_chars: int) -> str:
    """The template's text. Raises ValueError for a longer one."""
    segments, size = [], 0
    for segment in template.generate(values):
        size += len(segment)
        if size > max_chars:
            raise ValueError(f"its text is longer than {max_chars} characters")
        segments.append(segment)
    return "".join(segments)


def _chat_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, with the characters of HTML as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
