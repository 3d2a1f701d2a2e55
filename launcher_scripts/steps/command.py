"""What every step has in common: one settings file in, one exit status out."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from launcher_scripts.errors import LauncherError
from launcher_scripts.settings import Settings, read_settings


def run_step(
    description: str,
    kind: type[Settings],
    body: Callable[[Settings], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Read the settings that argv names, do `body` with them, and return the exit status.

    A LauncherError is printed without a traceback and gives 1. Ctrl-C and SIGTERM unwind the body
    like an exception and give the shell's 130 and 143.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--settings", type=Path, required=True, help="YAML file that the stage wrote"
    )
    arguments = parser.parse_args(argv)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        body(read_settings(kind, arguments.settings))
    except LauncherError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


class _Terminated(SystemExit):
    """SIGTERM came; a SystemExit, so that no library on the way takes it for an error."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise _Terminated
