"""Where a server says under which address it serves: for others, and in its run's own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher_scripts.errors import ServerError, problem
from launcher_scripts.settings import DeploySettings


class ReadyFiles:
    """The ready file of the results folder, which the next server takes over, and this run's."""

    def __init__(self, settings: DeploySettings) -> None:
        self._shared = settings.ready_file
        folder = settings.job_folder
        self._own = None if folder is None else Path(folder) / self._shared.name
        self._written = ""

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
        self._written = json.dumps(facts, indent=2) + "\n"
        for path in filter(None, (self._own, self._shared)):
            partial = path.with_name(path.name + ".partial")
            try:
                partial.write_text(self._written, encoding="utf-8")
                partial.replace(path)
            except OSError as error:
                raise ServerError(f"cannot write {path}: {error}") from error

    def remove(self) -> None:
        """Take the address back; another server's, which came later, stays."""
        if self._own is not None:
            self._own.unlink(missing_ok=True)
        try:
            ours = self._written and self._shared.read_text(encoding="utf-8") == self._written
        except FileNotFoundError:
            return
        if ours:
            self._shared.unlink(missing_ok=True)
