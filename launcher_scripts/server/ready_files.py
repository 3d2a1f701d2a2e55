"""Where a server says under which address it serves: for others, and in its run's own folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher_scripts.errors import ServerError, problem
from launcher_scripts.settings import DeploySettings
from launcher_scripts.whole_files import write_whole

RENEW_SECONDS = 5.0


class ReadyFiles:
    """The ready file of the results folder, which the next server takes over, and this run's."""

    def __init__(self, settings: DeploySettings) -> None:
        self._shared = settings.ready_file
        folder = settings.job_folder
        self._own = None if folder is None else Path(folder) / self._shared.name
        self._facts: dict[str, Any] = {}

    def prepare(self) -> None:
        """Make the folder of the ready file, and remove an older server's."""
        try:
            self._shared.parent.mkdir(parents=True, exist_ok=True)
            self._shared.unlink(missing_ok=True)
        except OSError as error:
            raise ServerError(
                problem(f"cannot write the ready file: {error}", change="deploy.run.results_dir")
            ) from error

    def write(self, facts: dict[str, Any]) -> None:
        """From now on others may use the server."""
        self._facts = json.loads(json.dumps(facts))  # as it will be read
        self._write(filter(None, (self._own, self._shared)))

    def renew(self) -> None:
        """Say that the server still lives; who finds an old time knows that it was killed.

        A disk that is full now is no reason to end a server. Another server's file stays.
        """
        ours = self._shared_is_ours()
        with contextlib.suppress(ServerError):
            self._write(filter(None, (self._own, self._shared if ours else None)))

    def _write(self, paths: Iterable[Path]) -> None:
        alive_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({**self._facts, "alive_at": alive_at}, indent=2) + "\n"
        for path in paths:
            try:
                write_whole(path, text)
            except OSError as error:
                raise ServerError(f"cannot write {path}: {error}") from error

    def remove(self) -> None:
        """Take the address back; another server's, which came later, stays."""
        if self._own is not None:
            self._own.unlink(missing_ok=True)
        if self._shared_is_ours():
            self._shared.unlink(missing_ok=True)

    def _shared_is_ours(self) -> bool:
        try:
            shown = json.loads(self._shared.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(self._facts) and {**shown, "alive_at": None} == {
            **self._facts,
            "alive_at": None,
        }


def job_facts(settings: DeploySettings) -> dict[str, Any]:
    """Which run of a server this is: its job folder, and Slurm's job id and number of restarts."""
    return {
        "folder": settings.job_folder,
        "id": os.environ.get("SLURM_JOB_ID"),
        "replica": settings.replica,
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }
