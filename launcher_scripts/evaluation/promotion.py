"""After the verdict: a server that was held back publishes its address, or never does."""

from __future__ import annotations

import json
import time
from pathlib import Path

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.ready_file import ask_to_publish, replica_files
from launcher_scripts.config.paths import is_same_path
from launcher_scripts.config.settings import EvaluateSettings

GO = "GO"
_PATIENCE_SECONDS = 120.0  # a shared disk may show a new file a minute late
_POLL_SECONDS = 0.2


def promote(settings: EvaluateSettings, verdict: str) -> None:
    """Have the measured server publish its address after GO, and wait until it has.

    Nothing happens after another verdict, or where no server is held back. Raises ServerError when
    the server does not publish: it has ended.
    """
    if settings.published_as is None or settings.server_job_folder is None or verdict != GO:
        return
    folder = settings.server_job_folder
    ask_to_publish(Path(folder))
    files = replica_files(Path(settings.published_as), settings.replicas)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while late := [path for path in files if not is_same_path(_job_of(path) or "", folder)]:
        if time.monotonic() > deadline:
            raise ServerError(
                problem(
                    f"the server has not published its address within {_PATIENCE_SECONDS:g} s",
                    got=[str(path) for path in late],
                    change=f"nothing here: the log in {folder} says how the server ended",
                )
            )
        time.sleep(_POLL_SECONDS)
    print(f"published: {', '.join(map(str, files))}", flush=True)


def _job_of(path: Path) -> str | None:
    """The job folder of the server that a ready file names."""
    try:
        folder: str | None = json.loads(path.read_text(encoding="utf-8"))["job"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder
