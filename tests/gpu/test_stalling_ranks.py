"""A rank on a GPU that the others wait for in vain is named; one that announces its work is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.stalling_ranks import TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]


def stall(way: str, folder: Path, checkout: Path, ranks: str = "tp2", **env: str) -> dict[str, Any]:
    """The program of that name: see stalling_ranks.py."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.stalling_ranks", way, ranks, str(folder)],
        cwd=checkout,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    return found


HANGS = "hangs computing step 100, "


@pytest.mark.parametrize(
    ("way", "ranks", "rank", "what"),
    [
        ("stopped", "tp2", 1, "is stopped (SIGSTOP)"),
        ("host", "tp2", 1, HANGS),
        ("host", "tp2_shared", 1, HANGS),
        ("host", "pp2", 1, HANGS),
        ("host of rank 0", "tp2", 0, HANGS),
        ("host of rank 0", "pp2", 0, HANGS),
    ],
    ids=["stopped", "hangs", "shared_hangs", "pp_hangs", "rank_0_hangs", "pp_rank_0_hangs"],
)
def test_the_rank_that_others_wait_for_is_named_within_5_s(
    tmp_path: Path, checkout: Path, way: str, ranks: str, rank: int, what: str
):
    found = stall(way, tmp_path, checkout, ranks)
    label = f"rank 1 (pid {found['pids'][1]})" if rank else "rank 0"
    assert found["reason"].startswith(f"{label} {what}")
    assert f"rank {1 - rank}" not in found["reason"]
    assert found["seconds"] < 5


def test_devices_that_do_not_finish_a_step_are_named_within_5_s(tmp_path: Path, checkout: Path):
    found = stall("device", tmp_path, checkout)
    assert f"rank 1 (pid {found['pids'][1]}) hangs" in found["reason"]
    assert "step 100" in found["reason"]
    assert found["seconds"] < 5


def test_announced_work_may_take_its_time(tmp_path: Path, checkout: Path):
    """Its kernels are compiled afresh as well."""
    found = stall(
        "announced", tmp_path, checkout, "tp2", TRITON_CACHE_DIR=str(tmp_path / "kernels")
    )
    assert found["tokens"] == TOKENS
