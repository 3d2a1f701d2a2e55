"""Checks that this Python can run a step, before anything else is imported.

It is read by Pythons that are too old for the rest: standard library only, no new syntax.
"""

import os
import sys
from importlib.util import find_spec

from launcher_scripts.common.exit_codes import ERROR
from launcher_scripts.common.overlay import LATER_STEPS, STEP_PACKAGES, find_overlay, remedy

OLDEST = (3, 10)
# Without these the standard library does the same.
SAVE_TIME = ("blake3", "zlib_ng")


def check_packages(step: str, *modules: str) -> None:
    """End the process with one line unless this Python has what the step needs, and `modules`.

    The first step of a command line also looks for what the later ones need, before it writes
    anything: they are named in LATER_STEPS. The exit code is none of an evaluation's verdicts.
    """
    later = os.environ.get(LATER_STEPS, "").split(",")
    needed = [*STEP_PACKAGES.get(step, ()), *modules]
    for name in filter(None, later):
        needed += STEP_PACKAGES.get(name, (name,))
    reason = _unfit(step, tuple(sorted(set(needed))))
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        raise SystemExit(ERROR)


def _unfit(step: str, modules: "tuple[str, ...]") -> "str | None":
    here = version(sys.version_info[:2])
    python = f"{sys.executable} (Python {here})"
    if sys.version_info[:2] < OLDEST:
        return (
            f"{step} needs Python {version(OLDEST)} or later; got {python}; change "
            "cluster.python to a newer one of the image, or container to a newer image"
        )
    overlay = find_overlay()
    if overlay is not None and overlay[1] != here:
        return (
            f"{step}: the packages in {overlay[0]} are for another Python; got Python "
            f"{overlay[1]}; this is {python}; {remedy(here)}"
        )
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        lacks = f"{step}: {python} does not have {', '.join(missing)}"
        return f"{lacks}; {remedy(here, torch='torch' in missing)}"
    return None


def note_slow_checksums() -> None:
    """Say which packages would save time."""
    absent = [name for name in SAVE_TIME if find_spec(name) is None]
    if absent:
        print(
            f"note: without {' and '.join(absent)} the standard library computes digests and "
            "checksums, three to eight times as slowly (docs/containers.md)",
            file=sys.stderr,
            flush=True,
        )


def version(numbers: "tuple[int, int]") -> str:
    return f"{numbers[0]}.{numbers[1]}"
