"""Code shared by all steps: settings in, by a file or by flags, and one exit status out.

Command-line flags from a settings dataclass, for people who run a step without a stage.

Every option becomes a flag of its name, a nested dataclass one flag per member. What is given goes
through the same checks as a settings file; what is not keeps the dataclass's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import os
import re
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from launcher_scripts.common.command_line import CommandParser, with_open_output
from launcher_scripts.common.errors import LauncherError, problem
from launcher_scripts.common.processes import bus_errors_as, process_name, signal_when_parent_dies
from launcher_scripts.config.options import Option, build, option_of
from launcher_scripts.config.settings import (
    ExportSettings,
    Settings,
    read_settings,
)

Values = dict[str, Any]
# Of a disk or of a user's share of it, not of a program.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# A key of the export's configuration, and the fields that have other names than their keys.
_KEY = re.compile(r"export\.(?:model|triton_deployment|run)\.(?P<name>\w+)(?:=(?P<value>[\w.]+))?")
_FIELDS = {
    "tensor_model_parallel_size": "parallelism.tp_size",
    "pipeline_model_parallel_size": "parallelism.pp_size",
    "tokenizer": "tokenizer.source",
    "results_dir": "triton_model_dir",
    "model_train_name": "triton_model_dir",
}
_WORDS = {str: "TEXT", int: "N", float: "N"}


@dataclass(frozen=True)
class FlagTable:
    """The flags of a settings dataclass: one for every field that is an option.

    own:      field (of a nested dataclass: `field.member`) -> its option, where the flag differs
    left_out: fields that the step does not use
    complete: fills in what the flags leave open, before the checks
    """

    kind: type
    own: Mapping[str, Option] = field(default_factory=dict)
    left_out: Collection[str] = ()
    complete: Callable[[Values], Values] = dict

    @property
    def options(self) -> dict[str, tuple[Option, Any, Any]]:
        """Field -> its option, type and default."""
        result = {}
        for key, hint, item in fields(self.kind):
            field_option = self.own.get(key) or option_of(item)
            if field_option is not None and key not in self.left_out:
                result[key] = (field_option, hint, item.default)
        return result

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """One argument per field; those without a default come first and are required."""
        needed = parser.add_argument_group("required")
        others = parser.add_argument_group("optional")
        for key, (field_option, hint, default) in self.options.items():
            required = default is dataclasses.MISSING
            text = (
                field_option.help
                if required or default in (None, ())
                else f"{field_option.help} [{default}]"
            )
            (needed if required else others).add_argument(
                _spelled(key, field_option),
                dest=key,
                default=argparse.SUPPRESS,
                required=required,
                help=text.replace("%", "%%"),
                **_options(hint, field_option),
            )

    def settings(self, args: argparse.Namespace) -> Any:
        """The settings that the flags say; raises ConfigError with every problem."""
        values: Values = {}
        for key in self.options:
            if not hasattr(args, key):
                continue
            outer, _, member = key.partition(".")
            if member:
                values.setdefault(outer, {})[member] = getattr(args, key)
            else:
                values[outer] = getattr(args, key)
        return build(self.kind, self.complete(values), "the command line")

    def in_flags(self, message: str) -> str:
        """A message of the configuration's keys with the flags in their place."""
        spelled = {
            key: _spelled(key, field_option) for key, (field_option, _, _) in self.options.items()
        }
        names = {
            **spelled,
            **{name: spelled[key] for name, key in _FIELDS.items() if key in spelled},
        }

        def flag(match: re.Match[str]) -> str:
            name, value = names.get(match["name"]), match["value"]
            if name is None:
                return match[0]
            return name if value in (None, "True") else f"{name} {value}"

        return _KEY.sub(flag, message)


def fields(kind: type, prefix: str = "") -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """(key, type, field) of every field, with nested dataclasses opened."""
    hints = typing.get_type_hints(kind)
    result: list[tuple[str, Any, dataclasses.Field[Any]]] = []
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            result += fields(typing.cast(type, hint), f"{prefix}{item.name}.")
        else:
            result.append((f"{prefix}{item.name}", hint, item))
    return result


def _options(hint: Any, field_option: Option) -> Values:
    """Return argparse's options for a type: a switch, a list, or one value."""
    arguments = typing.get_args(hint)
    many = typing.get_origin(hint) is tuple
    if arguments:  # of a tuple, or of X | None
        hint = next(argument for argument in arguments if argument is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    metavar = field_option.metavar or "|".join(field_option.choices) or _WORDS[hint]
    return {"type": hint, "metavar": metavar, **({"nargs": "+"} if many else {})}


def _spelled(key: str, field_option: Option) -> str:
    return "--" + (field_option.flag or key.replace("_", "-").replace(".", "-"))


_SHORTENED = (
    "a file became shorter, or its disk failed, while it was read; nothing may write to a "
    "checkpoint that is in use"
)


def run_step(
    description: str,
    kind: type[Settings],
    body: Callable[[Settings], int | None],
    argv: Sequence[str] | None = None,
    flags: FlagTable | None = None,
) -> int:
    """Read the settings that argv names, do `body` with them, and return the exit status.

    With `flags`, argv may say the settings itself instead of naming a file. The status is what
    the body returns, or 0. A LauncherError is printed without a traceback, any other exception with
    it; both give `kind.error_code`, or 1 where the kind has none. Ctrl-C and SIGTERM unwind the
    body like an exception and give the shell's 130 and 143.
    """
    args = _parsed(description, sys.argv[1:] if argv is None else argv, flags)
    _end_with_parent(getattr(args, "settings", None))
    failed: int = getattr(kind, "error_code", 1)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with bus_errors_as(_SHORTENED, failed):
            if flags is None or "settings" in args:
                return with_open_output(lambda: body(read_settings(kind, args.settings)))
            return with_open_output(lambda: body(flags.settings(args)))
    except LauncherError as error:
        by_flags = flags is not None and "settings" not in args
        print(flags.in_flags(str(error)) if flags and by_flags else error, file=sys.stderr)
        return failed
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            print(_disk_problem(error), file=sys.stderr)
        else:
            traceback.print_exc()
        return failed
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def _disk_problem(error: OSError) -> str:
    file = "" if error.filename is None else f": {error.filename}"
    change = "base_results_dir, or free some room there: the same command continues"
    return problem(f"cannot write{file}: {error.strerror}", change=change)


def resumed(settings: ExportSettings) -> ExportSettings:
    """Settings with `reuse` in a job that Slurm started again: its first start may have finished
    this step.
    """
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return replace(settings, reuse=True) if restarts else settings


def _parsed(description: str, argv: Sequence[str], flags: FlagTable | None) -> argparse.Namespace:
    """The arguments: --settings alone, or the flags alone where a step has some."""
    by_file = CommandParser(description=description, allow_abbrev=False)
    by_file.add_argument(
        "--settings", type=Path, required=True, metavar="FILE", help="YAML that the stage wrote"
    )
    if flags is None or any(word.partition("=")[0] == "--settings" for word in argv):
        return by_file.parse_args(argv)
    by_flags = CommandParser(
        description=description,
        allow_abbrev=False,
        usage=f"{by_file.prog} --settings FILE\n       {by_file.prog} FLAGS",
    )
    flags.add_to(by_flags)
    return by_flags.parse_args(argv)


def _end_with_parent(settings: Path | None) -> None:
    """Ask the kernel for SIGTERM when what runs the job dies: it alone ends the job's processes.

    That is Slurm's daemon of this step, or the job's script, which dies with its launcher.
    """
    parent = os.getppid()
    try:
        name = process_name(parent)
        command = os.fsdecode(Path(f"/proc/{parent}/cmdline").read_bytes()).split("\0")
    except OSError:
        return
    folder = None if settings is None else settings.parent
    of_job = any(Path(part).parent == folder and part.endswith(".sh") for part in command)
    if name == "slurmstepd" or of_job:
        signal_when_parent_dies(signal.SIGTERM)
        if os.getppid() != parent:
            raise SystemExit(128 + signal.SIGTERM)


class _Terminated(SystemExit):
    """SIGTERM came; a SystemExit, so that no library on the way takes it for an error."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise _Terminated
