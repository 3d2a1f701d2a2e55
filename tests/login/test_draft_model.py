"""A draft model in the configuration of an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.checkpoint.fastertransformer.config_ini import format_config
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.repository import FILE_NAME
from tests.login.conftest import LOCAL, Planner

KEY = "export.triton_deployment.draft_model_dir"
CONFIG = GPTConfig(
    vocab_size=67,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    ffn_size=48,
    max_positions=96,
)


def write_draft(folder: Path, tp_size: int) -> Path:
    """An exported folder as far as the login side looks into it."""
    folder.mkdir()
    (folder / FILE_NAME).write_text(format_config(CONFIG, tp_size, "fp32"))
    return folder


def test_its_folder_goes_into_the_settings(
    plan: Planner, arguments: list[str], tmp_path: Path
) -> None:
    folder = write_draft(tmp_path / "small", 2)
    (stage,) = plan(LOCAL, *arguments, "stages=[export]", f"{KEY}={folder}").stages
    assert stage.settings.draft_model_dir == str(folder)
    assert folder in stage.paths()


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [
        (None, "the draft model is not there"),
        (1, "cut for another number of tensor-parallel ranks"),
    ],
)
def test_what_does_not_fit_is_answered(
    plan: Planner, arguments: list[str], tmp_path: Path, tp_size: int | None, message: str
) -> None:
    folder = tmp_path / "small"
    if tp_size is not None:
        write_draft(folder, tp_size)
    with pytest.raises(ConfigError) as raised:
        plan(LOCAL, *arguments, f"{KEY}={folder}")
    (found,) = raised.value.problems
    assert message in found
    assert KEY in found
