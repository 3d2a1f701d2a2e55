"""What the server may know of a model: one small file, written whole.

The server names a folder in LAUNCHER_STATUS_DIR; without it nothing is written.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from launcher_scripts.common.atomic_write import atomic_write
from launcher_scripts.engine.messages.message import RankInfo

STATUS_DIR_VARIABLE = "LAUNCHER_STATUS_DIR"
DEVICE_VARIABLE = "LAUNCHER_DEVICE"
MAX_WAITING_VARIABLE = "LAUNCHER_MAX_WAITING_ROWS"


class StatusFile:
    """`<folder>/<model>.json`: state loading, ready or failed, with the reason."""

    def __init__(self, model: str) -> None:
        folder = os.environ.get(STATUS_DIR_VARIABLE)
        self._path = Path(folder, f"{model}.json") if folder else None

    @property
    def is_read(self) -> bool:
        """Whether somebody watches the server through its status files."""
        return self._path is not None

    def write(
        self,
        state: str,
        *,
        reason: str | None = None,
        ranks: Sequence[RankInfo] = (),
        timeline: Sequence[tuple[str, float]] = (),
    ) -> None:
        if self._path is None:
            return
        status = {
            "state": state,
            "reason": reason,
            "ranks": [asdict(rank) for rank in ranks],
            "versions": versions(),
            "timeline": [list(event) for event in timeline],
        }
        atomic_write(self._path, json.dumps(status))


def versions() -> dict[str, str]:
    """What the engine runs on."""
    result = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        result["cuda"] = torch.version.cuda
    return result
