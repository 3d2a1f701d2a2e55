"""Where a server or a gateway says its address: for others, and in its run's own folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher_scripts.common.atomic_write import atomic_write
from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.ready_file import STALE_SECONDS, may_publish, seconds_silent
from launcher_scripts.config.settings import DeploySettings, GatewayJobSettings

RENEW_SECONDS = 5.0
_PATIENCE_SECONDS = 2.5 * RENEW_SECONDS
_POLL_SECONDS = 0.2


class ReadyFiles:
    """The ready file of the results folder, which one living server has, and this run's own.

    A server that is held back has the candidate file first. Once it may publish, it takes the place
    of the server that has the ready file, which goes on without one.
    """

    def __init__(self, settings: DeploySettings | GatewayJobSettings) -> None:
        self._kind = "server" if settings.stage == "deploy" else settings.stage
        self._key = f"{settings.stage}.run.results_dir"
        self._shared = settings.ready_file
        folder = settings.job_folder
        self._own = None if folder is None else Path(folder) / self._shared.name
        self._facts: dict[str, Any] = {}
        self._written = 0.0
        self._before: dict[str, Any] = {}  # the facts of the server whose place it took
        self._published = self._shared
        candidate = settings.candidate_file if isinstance(settings, DeploySettings) else None
        if candidate is not None and not self._may_publish():
            self._shared = candidate

    @property
    def _held_back(self) -> bool:
        return self._shared != self._published

    def _may_publish(self) -> bool:
        return self._own is not None and may_publish(self._own.parent)

    def prepare(self) -> None:
        """Make the folder of the ready file, and remove what a dead server has left there.

        Raises ServerError where another server is alive.
        """
        try:
            self._shared.parent.mkdir(parents=True, exist_ok=True)
            self._refuse_living()
            self._shared.unlink(missing_ok=True)
        except OSError as error:
            raise ServerError(
                problem(f"cannot write the ready file: {error}", change=self._key)
            ) from error

    def write(self, facts: dict[str, Any]) -> None:
        """From now on others may use the server. Raises ServerError where one has come before."""
        self._refuse_living()
        self._facts = json.loads(json.dumps(facts))  # as it will be read
        if self._held_back:
            self._facts["candidate"] = True
        self._write(filter(None, (self._own, self._shared)))

    def publish(self) -> Path | None:
        """The ready file, as soon as a server that was held back may have it; None before."""
        if not (self._held_back and self._may_publish()):
            return None
        candidate, self._shared = self._shared, self._published
        self._before = self._shown()
        del self._facts["candidate"]
        self._write(filter(None, (self._own, self._shared)))
        candidate.unlink(missing_ok=True)
        return self._shared

    def keep_alive(self) -> None:
        """Renew the files when it is time to; for those who watch a server."""
        if time.monotonic() - self._written > RENEW_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Say that the server still lives; who finds an old time knows that it was killed.

        A disk that is full now is no reason to end a server. Another server's file stays, but for
        the one whose place was taken: it may just have been renewing its file.
        """
        ours = self._shared_is_ours() or (self._before and _same(self._shown(), self._before))
        with contextlib.suppress(ServerError):
            self._write(filter(None, (self._own, self._shared if ours else None)))

    def _write(self, paths: Iterable[Path]) -> None:
        self._written = time.monotonic()
        alive_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({**self._facts, "alive_at": alive_at}, indent=2) + "\n"
        for path in paths:
            try:
                atomic_write(path, text)
            except OSError as error:
                raise ServerError(f"cannot write {path}: {error}") from error

    def remove(self) -> None:
        """Take the address back; another server's stays."""
        if self._own is not None:
            self._own.unlink(missing_ok=True)
        if self._shared_is_ours():
            self._shared.unlink(missing_ok=True)

    def _shared_is_ours(self) -> bool:
        return bool(self._facts) and _same(self._shown(), self._facts)

    def _shown(self) -> dict[str, Any]:
        """What the shared file says; nothing where there is none, or another text."""
        with contextlib.suppress(OSError, ValueError):
            shown = json.loads(self._shared.read_text(encoding="utf-8"))
            if isinstance(shown, dict):
                return shown
        return {}

    def _refuse_living(self) -> None:
        """Raise ServerError if the shared file is another server's that is alive.

        One that was killed looks alive for a while: the file must be seen to be renewed.
        """
        first = self._shown()
        try:
            silent = seconds_silent(first)
        except (TypeError, ValueError):
            return
        if silent is None or silent > STALE_SECONDS or self._shared_is_ours():
            return
        print(f"{self._shared} names a {self._kind}: waiting for its next sign of life", flush=True)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (shown := self._shown()) == first:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        if shown:
            raise ServerError(
                problem(
                    f"another {self._kind} is alive with this results_dir",
                    got=f"{shown.get('http') or shown.get('openai')} of {shown.get('job')}",
                    change=f"{self._key}, or stop that {self._kind} first",
                )
            )


def _same(shown: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether both are of one run of a server, however long ago it said that it lives."""
    return {**shown, "alive_at": None} == {**facts, "alive_at": None}


def job_facts(settings: DeploySettings) -> dict[str, Any]:
    """Which run of a server this is: its job folder, and Slurm's job id and number of restarts."""
    return {
        "folder": settings.job_folder,
        "id": os.environ.get("SLURM_JOB_ID"),
        "replica": settings.replica,
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }
