"""NeMo's own checkpoints on CUDA: its logits in float32, and in bfloat16 to its rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.exporting import export_folder
from tests.engine.fixture_logits import logits_of
from tests.engine.test_nemo_fixtures import NAMES, allowed, source_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

RELATIVE_TOLERANCE = 1e-2


@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_nemos(shared_dir: Path, tmp_path: Path, record_property, name, data_type):
    fixture = shared_dir / "fixtures" / "nemo" / name
    folder = export_folder(source_of(fixture), tmp_path)
    ours, nemos = logits_of(folder, fixture / "reference.npz", device="cuda", data_type=data_type)
    largest = float((ours - nemos).abs().max())
    relative = float(torch.linalg.vector_norm(ours - nemos) / torch.linalg.vector_norm(nemos))
    record_property("max_abs_difference", largest)
    record_property("relative_difference", relative)
    print(f"{name} {data_type}: {largest:.1e}, relative {relative:.1e}")
    if data_type == "fp32":
        assert largest <= allowed(name)
    else:
        assert relative <= RELATIVE_TOLERANCE
