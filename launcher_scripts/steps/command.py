"""What every step has in common: settings in, by a file or by flags, and one exit status out."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from launcher_scripts.common.command_line import CommandParser, with_open_output
from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.processes import bus_errors_as, process_name, signal_when_parent_dies
from launcher_scripts.config.settings import ExportSettings, Settings, read_settings
from launcher_scripts.steps.flags import FlagTable

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
    given = _parsed(description, sys.argv[1:] if argv is None else argv, flags)
    _end_with_parent(getattr(given, "settings", None))
    failed: int = getattr(kind, "error_code", 1)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with bus_errors_as(_SHORTENED, failed):
            if flags is None or "settings" in given:
                return with_open_output(lambda: body(read_settings(kind, given.settings)))
            return with_open_output(lambda: body(flags.settings(given)))
    except LauncherError as error:
        by_flags = flags is not None and "settings" not in given
        print(flags.in_flags(str(error)) if flags and by_flags else error, file=sys.stderr)
        return failed
    except Exception:
        traceback.print_exc()
        return failed
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


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
