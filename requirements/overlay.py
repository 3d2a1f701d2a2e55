"""Make a folder of the Python packages that a container's image lacks.

    python3 requirements/overlay.py --python 3.10 /shared/overlay
    python3 requirements/overlay.py --python 3.12 --with torch /shared/overlay

It holds what the steps of jobs need (job.txt), in the versions of constraints.txt, for the Python
of the image, which need not be here. Jobs see it as cluster.overlay.
"""

from __future__ import annotations

import argparse
import email
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# What an image may lack besides: a file of requirements, and whether what they need is wanted.
EXTRAS = {
    "torch": ("torch.txt", True),
    "server": ("server.txt", False),
    "sign": ("sign.txt", True),
}
LOCKS = ("constraints.txt", "constraints-dev.txt")
# Of glibc 2. Wheels for an old one are preferred; Ubuntu 22.04 has 35.
GLIBC = (17, 5, 12, *range(18, 36))
# Published as source alone; plain Python, so that a wheel made here is one for every Python.
SOURCES = ("rouge-score",)


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    folder: Path = given.folder.absolute()
    if folder.exists():
        print(f"error: {folder} is there; name a new folder", file=sys.stderr)
        return 1
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        Target(given.python, given.machine).fill(partial, given.extras)
    except (OverlayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    partial.rename(folder)
    print(f"packages for Python {given.python}; for jobs: cluster.overlay={folder}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="overlay.py", description="Make a folder of the Python packages that an image lacks."
    )
    parser.add_argument("--python", required=True, choices=PYTHONS, help="of the image")
    parser.add_argument(
        "--machine",
        choices=("x86_64", "aarch64"),
        default=platform.machine(),
        help="of the nodes; default: this one's",
    )
    parser.add_argument(
        "--with",
        dest="extras",
        action="append",
        choices=tuple(EXTRAS),
        default=[],
        help="for an image that lacks them, too: torch, or the program tritonserver (server)",
    )
    parser.add_argument("folder", type=Path, help="a new folder that all nodes see")
    return parser.parse_args(argv)


class OverlayError(Exception):
    """The folder cannot be made; the message says why."""


class Target:
    """The Python that the packages are for.

    pip takes wheels for another Python, but evaluates the markers of requirements for the one that
    runs it. So it is asked for single wheels, and what they depend on is followed here.
    """

    def __init__(self, python: str, machine: str) -> None:
        self.python = python
        self.machine = machine
        self.hashes: dict[str, list[str]] = {}
        self.pins = {pin.name: pin for name in LOCKS for pin in self.read(name)}

    def fill(self, folder: Path, extras: Iterable[str]) -> None:
        """Install everything into `folder`, which must not exist."""
        wanted = [*self.read("job.txt")]
        alone: list[Requirement] = []
        for extra in extras:
            name, follow = EXTRAS[extra]
            (wanted if follow else alone).extend(self.read(name))
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as wheels:
            self.download(alone, Path(wheels))
            self.download_all(wanted, Path(wheels))
            files = sorted(map(str, Path(wheels).glob("*.whl")))
            self.pip("install", "--no-index", "--no-compile", "--target", str(folder), *files)
            packages = sorted(Path(file).name for file in files)
        values = {"python": self.python, "machine": self.machine, "wheels": packages}
        (folder / "overlay.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def download_all(self, wanted: list[Requirement], folder: Path) -> None:
        """The wheels of `wanted` and, round by round, of what the last round depends on."""
        seen: set[tuple[str, str]] = set()
        while wanted:
            here = {name for name, _ in seen}
            self.download([entry for entry in wanted if entry.name not in here], folder)
            new = {(entry.name, extra) for entry in wanted for extra in ("", *entry.extras)} - seen
            seen |= new
            needs = dict(map(requirements_of, folder.glob("*.whl")))
            wanted = [
                entry
                for name, extra in sorted(new)
                for entry in needs[name]
                if self.counts(entry, extra)
            ]

    def download(self, wanted: Iterable[Requirement], folder: Path) -> None:
        """The wheels of `wanted` alone, in their pinned versions."""
        chosen = {entry.name: self.pinned(entry) for entry in wanted}
        made = [chosen.pop(name) for name in SOURCES if name in chosen]
        if made:
            pip("wheel", "--no-deps", "--wheel-dir", str(folder), *self.listed(made, folder))
        # pip wants hashes of all packages of a command, or of none.
        for hashed in (True, False):
            pins = sorted(pin for name, pin in chosen.items() if (name in self.hashes) == hashed)
            if pins:
                self.pip("download", "--dest", str(folder), *self.listed(pins, folder))

    def listed(self, pins: Sequence[str], folder: Path) -> tuple[str, str]:
        """pip's option for a file, which is written to `folder`, with the pins and their hashes."""
        lines = [
            " ".join([pin, *self.hashes.get(requirement(pin).name, ())]) + "\n" for pin in pins
        ]
        file = folder / "requirements.txt"
        file.write_text("".join(lines), encoding="utf-8")
        return "-r", str(file)

    def pinned(self, wanted: Requirement) -> str:
        """`name==version`; raises OverlayError where neither constraints.txt nor it says which."""
        pin = self.pins.get(wanted.name, wanted)
        if not any(part.operator == "==" for part in pin.specifier):
            raise OverlayError(
                f"{wanted.name} is not in requirements/constraints.txt: see its head"
            )
        return f"{pin.name}{pin.specifier}"

    def pip(self, command: str, *arguments: str) -> None:
        """Run a command of pip for the target."""
        platforms = [f"--platform=manylinux_2_{minor}_{self.machine}" for minor in GLIBC]
        only = ("--only-binary=:all:", f"--python-version={self.python}", *platforms)
        pip(command, "--no-deps", *only, *arguments)

    def read(self, name: str) -> Iterator[Requirement]:
        """The entries of a file of requirements/ that count for the target; notes their hashes."""
        content = (REQUIREMENTS / name).read_text(encoding="utf-8").replace("\\\n", "")
        for line in content.splitlines():
            text, *hashes = line.partition("#")[0].split("--hash=")
            if text.strip() and self.counts(entry := requirement(text)):
                if hashes:
                    self.hashes[entry.name] = [f"--hash={value.strip()}" for value in hashes]
                yield entry

    def counts(self, entry: Requirement, extra: str = "") -> bool:
        """Whether the requirement's marker holds there."""
        return entry.marker is None or entry.marker.evaluate(
            {
                "python_version": self.python,
                "python_full_version": f"{self.python}.99",
                "platform_machine": self.machine,
                "sys_platform": "linux",
                "extra": extra,
            }
        )


def pip(command: str, *arguments: str) -> None:
    """Run a command of pip; raises OverlayError with what it said."""
    start = (sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check")
    ran = subprocess.run(
        [*start, "--no-input", *arguments], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise OverlayError(f"pip {command} failed:\n{ran.stderr.strip()}")


def requirement(text: str) -> Requirement:
    """With its name as all spellings of it are written."""
    entry = Requirement(text)
    entry.name = canonicalize_name(entry.name)
    return entry


def requirements_of(wheel: Path) -> tuple[str, list[Requirement]]:
    """The name of a wheel's package, and what it depends on."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [
            n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1
        ]
        values = email.message_from_bytes(archive.read(name))
    found = [requirement(text) for text in values.get_all("Requires-Dist", [])]
    return canonicalize_name(values["Name"]), found


if __name__ == "__main__":
    sys.exit(main())
