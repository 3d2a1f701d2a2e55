"""Experts in one tensor a layer, as a model of transformers 5 has them in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import LATER_DECODERS


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_a_state_dict_gives_what_the_saved_model_gives(tmp_path: Path, name: str) -> None:
    model = LATER_DECODERS[name].save(tmp_path / "saved")
    state = model.state_dict()
    assert sum("experts.gate_up_proj" in key for key in state) == model.config.num_hidden_layers
    (tmp_path / "state").mkdir()
    torch.save(state, tmp_path / "state" / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path / "state")
    model.generation_config.save_pretrained(tmp_path / "state")
    folders = [
        export_folder(tmp_path / kind, tmp_path / "of" / kind) for kind in ("saved", "state")
    ]
    want, got = ({path.name: path.read_bytes() for path in each.glob("*.bin")} for each in folders)
    assert want
    assert got == want
