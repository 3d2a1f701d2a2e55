"""Weights on their way to a GPU, through pinned memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16
from launcher_scripts.engine.model.weight_loader import CHUNKS_UNDER_WAY, UPLOAD_CHUNK, Uploads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stored", [np.dtype("<f4"), np.dtype("<f2"), BFLOAT16])
def test_uploads_are_the_files_values(tmp_path: Path, stored: np.dtype) -> None:
    """One array is smaller than a chunk, one ends within a chunk after all buffers were used."""
    uploads, random = Uploads(torch.device("cuda")), np.random.default_rng(1)
    sizes = [12, UPLOAD_CHUNK // 2 - 6, (CHUNKS_UNDER_WAY + 1) * UPLOAD_CHUNK + 12]
    for number, size in enumerate(sizes * 2):
        bits = random.integers(0, 1 << 14, size // stored.itemsize, dtype="<u2")
        values = bits.astype("<f4") if stored.itemsize == 4 else bits
        path = tmp_path / str(number)
        values.tofile(path)
        mapped = np.memmap(path, stored, "r", shape=(1, len(values)))
        uploaded = uploads.upload(mapped, torch.float32).cpu()
        right = torch.from_numpy(values.view("<f4" if stored.itemsize == 4 else "<i2"))
        if stored.itemsize == 2:
            right = right.view(torch.bfloat16 if stored == BFLOAT16 else torch.float16)
        assert uploaded.shape == (1, len(values))
        assert torch.equal(uploaded[0], right.float())
