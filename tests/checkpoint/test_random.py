"""Random weights in the sizes of a config.ini, for every family and any division."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.common.errors import CheckpointError, ConfigError
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.models.family import ModelConfig
from tests.checkpoint.exporting import export_folder, open_weights, refused_export
from tests.engine.small_agm import agm_config
from tests.engine.small_bart import bart_config
from tests.engine.small_models import generate, small_config
from tests.engine.small_t5 import t5_config

FAMILIES = {
    "gpt": small_config(position_embedding="rope", num_kv_heads=2, tied_embeddings=False),
    "t5": t5_config(),
    "agm": agm_config(),
    "bart": bart_config(),
}
# As the FasterTransformer backend ships it, but for the sizes.
ORIGINAL = """[gpt]
model_name=gpt
max_pos_seq_len=64 ;for position embedding tables
head_num=2
size_per_head=8
inter_size=32
num_layer=2
vocab_size=67
start_id=66
end_id=66
weight_data_type=fp32
prompt_learning_start_id=67
prompt_learning_type=3
num_tasks=1

[task_0]
task_name=sentiment
prompt_length=10
"""


def ini(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.ini"
    path.write_text(format_config(config, 1, "fp32"))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_ini_becomes_the_same_weights_for_any_ranks(family: str, tmp_path: Path) -> None:
    source = ini(tmp_path / "sizes", FAMILIES[family])
    whole = {}
    for tp_size in (1, 2):
        folder = export_folder(source, tmp_path / str(tp_size), tp_size, source="random")
        whole[tp_size], config = open_weights(folder)
        assert config == FAMILIES[family]
        assert json.loads((folder / "manifest.json").read_text())["source"]["format"] == "random"
    names = [name for name in whole[1].rows if name in whole[1]]
    assert names
    for name in names:
        assert torch.equal(whole[1][name], whole[2][name]), name


def test_the_originals_config_ini_is_enough_to_generate(tmp_path: Path) -> None:
    source = tmp_path / "config.ini"
    source.write_text(ORIGINAL)
    folder = export_folder(source, tmp_path / "out", data_type="bf16", source="random")
    assert (folder / "model.prompt_table.sentiment.weight.bin").stat().st_size == 2 * 10 * 16
    engine = Engine.load(EngineSettings(folder, device="cpu"))
    assert len(generate(engine, (1, 2, 3), 5)) == 5
    engine.close()


def test_random_weights_are_made_only_where_they_are_asked_for(tmp_path: Path) -> None:
    source = ini(tmp_path / "sizes", FAMILIES["gpt"])
    refused_export(source, tmp_path, "is in no known format")
    other = source.with_name("other.ini")
    other.write_text(source.read_text())
    with pytest.raises(CheckpointError, match=r"random weights are made from a config\.ini"):
        export_folder(other, tmp_path / "out", source="random")
    source.write_text(ORIGINAL.replace("num_layer=2", "num_layer=1000000000"))
    with pytest.raises(CheckpointError, match="more layers than any model has; got 1000000000"):
        export_folder(source, tmp_path / "out", source="random")
    with pytest.raises(ConfigError, match=r"without a tokenizer.*export\.model\.tokenizer"):
        ExportSettings("m", "gpt3", str(source), str(tmp_path / "m"), source="random")
