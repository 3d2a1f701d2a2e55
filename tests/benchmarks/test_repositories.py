"""Repositories of random weights are ones that the engine accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.repositories import RandomModel
from benchmarks.shapes import TINY
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint, shard_files


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_links_hold_what_files_of_their_own_hold(tmp_path: Path, name: str, tp_size: int) -> None:
    checkpoints = []
    for linked in (True, False):
        root = tmp_path / str(linked)
        RandomModel(name, TINY[name], 4, tp_size, linked).write(root)
        assert (root / name / "config.pbtxt").is_file()
        checkpoints.append(FTCheckpoint.open(root / name / "1" / f"{tp_size}-gpu"))
    first, second = checkpoints
    assert first.config.end_id == first.config.vocab_size
    for file in shard_files(first.config, tp_size):
        if not file.spec.required:
            continue
        arrays = [
            each.read(file.spec, file.layer, file.tp_rank).view("<u2") for each in checkpoints
        ]
        np.testing.assert_array_equal(*arrays)
    files = {path.stat().st_ino for path in second.folder.glob("*.bin")}
    links = {path.stat().st_ino for path in first.folder.glob("*.bin")}
    assert len(links) < len(files)
