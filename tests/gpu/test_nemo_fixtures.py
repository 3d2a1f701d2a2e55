"""NeMo's own checkpoints on CUDA: its logits in float32, and in bfloat16 to its rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher_scripts.engine.engine import Engine, EngineSettings
from tests.checkpoint.exporting import export_folder
from tests.engine import test_nemo_fixtures as gpt
from tests.engine import test_nemo_t5_fixtures as t5

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

RELATIVE_TOLERANCE = 1e-2
NAMES = [*((gpt, name) for name in gpt.NAMES), *((t5, name) for name in t5.NAMES)]


@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "name"), NAMES, ids=[name for _, name in NAMES])
def test_logits_equal_nemos(
    shared_dir: Path, tmp_path: Path, record_property, family, name, data_type
):
    fixture = shared_dir / "fixtures" / "nemo" / name
    folder = export_folder(gpt.source_of(fixture), tmp_path)
    engine = Engine.load(
        EngineSettings(folder, device="cuda", max_batch_size=4, data_type=data_type)
    )
    try:
        ours, nemos = family.logits_of(engine, fixture / "reference.npz")
    finally:
        engine.close()
    largest = float((ours - nemos).abs().max())
    relative = float(torch.linalg.vector_norm(ours - nemos) / torch.linalg.vector_norm(nemos))
    record_property("max_abs_difference", largest)
    record_property("relative_difference", relative)
    print(f"{name} {data_type}: {largest:.1e}, relative {relative:.1e}")
    if data_type == "fp32":
        assert largest <= (gpt.allowed(name) if family is gpt else t5.TOLERANCE)
    else:
        assert relative <= RELATIVE_TOLERANCE
