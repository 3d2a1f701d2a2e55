"""How the nodes of one server find rank 0 of each model: a small file in a folder that all see.

It holds rank 0's addresses, port and the secret token, is readable by its owner alone, and is named
after the run, so that servers side by side never meet. No name service is needed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.hosts import RENDEZVOUS_VARIABLE

ADVICE = f"the environment: {RENDEZVOUS_VARIABLE}=<a folder that all nodes see>"
_FOLDER = ".launcher"


class RendezvousInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rank 0 of one model waits for the other nodes.

    attempt: how often the server was started again before
    """

    model: str
    addresses: tuple[str, ...]
    port: int
    token: str
    attempt: int = 0


def rendezvous_folders(env: Mapping[str, str], model_dir: Path) -> tuple[Path, ...]:
    """Folders that all nodes may see: the one that was named, else the model's and the home."""
    if RENDEZVOUS_VARIABLE in env:
        return (Path(env[RENDEZVOUS_VARIABLE]),)
    homes = [Path(env["HOME"])] if "HOME" in env else []
    return tuple(folder / _FOLDER for folder in (model_dir, *homes))


class RendezvousFile:
    """A RendezvousInfo in every folder that can be written, until it is withdrawn."""

    def __init__(self, folders: Sequence[Path], run: str, info: RendezvousInfo) -> None:
        """Raises ServerError where no folder can be written."""
        self._files: list[Path] = []
        name = f"{_prefix(run)}{secrets.token_hex(8)}.json"
        reasons = []
        for folder in folders:
            try:
                self._files.append(_write(folder, name, msgspec.json.encode(info)))
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
        if not self._files:
            what = "no folder to tell the other nodes where rank 0 is: " + "; ".join(reasons)
            raise ServerError(problem(what, change=ADVICE))

    def withdraw(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
            if path.parent.name == _FOLDER:
                with suppress(OSError):  # somebody else's files are still there
                    path.parent.rmdir()


def find_rendezvous(folders: Sequence[Path], run: str) -> dict[str, RendezvousInfo]:
    """name of the file -> what it holds, of this run; the files of other users do not count."""
    result = {}
    for folder in folders:
        for path in folder.glob(f"{_prefix(run)}*.json"):
            with suppress(OSError, ValueError):
                if path.stat().st_uid == os.geteuid():
                    result[path.name] = msgspec.json.decode(path.read_bytes(), type=RendezvousInfo)
    return result


def _prefix(run: str) -> str:
    return f"ranks-{run}-"


def _write(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = folder / f"{name}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return partial.replace(folder / name)
