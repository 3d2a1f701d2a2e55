"""Checkpoints with learned parts that the engine cannot apply are refused, never half-served."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.engine.loading import EngineSettings, open_checkpoint
from launcher_scripts.errors import ConfigError
from launcher_scripts.parallel import Parallelism
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.parts_maker import Random, ia3_layers, nested, ranks, write_parts
from tests.checkpoint_maker import make_nemo, small_config

STACK = "model.language_model.encoder.layers."


def settings(folder: Path) -> EngineSettings:
    return EngineSettings(
        checkpoint_dir=folder, data_type="fp32", parallelism=Parallelism(1, 1), device="cpu"
    )


def test_vectors_are_refused_and_folded_ones_are_not(tmp_path: Path) -> None:
    config = small_config()
    make_nemo(tmp_path / "base.nemo", config)
    layers = ia3_layers(Random(0), config.num_layers, config.kv_size, config.ffn_size)
    states = nested(ranks(layers, {"scalers": 0}, 1, 1, STACK))
    parts = (str(write_parts(tmp_path / "ia3.nemo", states)),)
    folders = [
        export_folder(
            tmp_path / "base.nemo", tmp_path / str(fold), ia3_checkpoints=parts, ia3_in_place=fold
        )
        for fold in (False, True)
    ]
    with pytest.raises(ConfigError, match="IA3 vectors"):
        open_checkpoint(settings(folders[0]), verify=False)
    assert open_checkpoint(settings(folders[1]), verify=False).config.parts.ia3_adapted
