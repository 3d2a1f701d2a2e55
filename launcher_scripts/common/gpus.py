"""The GPUs of this machine that a program may use, as nvidia-smi lists them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_QUERY = "--query-gpu=index,uuid,memory.total,compute_cap"
_TIMEOUT = 30.0
# The first compute capability with bfloat16 in its matrix units (Ampere).
_BF16_CAPABILITY = 8.0


@dataclass(frozen=True)
class Gpu:
    """One GPU.  memory: bytes;  compute_capability: 0.0 if the driver does not tell it"""

    memory: int
    compute_capability: float

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= _BF16_CAPABILITY


def visible_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", _QUERY, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[2].isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [row for row in rows if _is_named(row, names)]
    return tuple(Gpu(int(row[2]) << 20, _number(row[3])) for row in rows)


def _is_named(row: list[str], names: list[str]) -> bool:
    """True if one of CUDA's names means the GPU: its index, or the start of its UUID."""
    index, uuid = row[0], row[1]
    return any(
        name == index or (name.startswith("GPU-") and uuid.startswith(name)) for name in names
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
