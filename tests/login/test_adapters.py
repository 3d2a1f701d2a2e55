"""Checkpoints of adapters in the configuration of an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from tests.login.conftest import LOCAL, Planner

KEYS = ("prompt_checkpoints", "ia3_checkpoints", "adapter_checkpoints", "lora_checkpoints")


@pytest.mark.parametrize("key", KEYS)
def test_their_paths_go_into_the_settings(
    plan: Planner, arguments: list[str], tmp_path: Path, key: str
) -> None:
    files = [tmp_path / "one.nemo", tmp_path / "two.nemo"]
    for file in files:
        file.touch()
    names = ",".join(str(file) for file in files)
    made = plan(LOCAL, *arguments, "stages=[export]", f"export.model.{key}=[{names}]")
    (stage,) = made.stages
    assert getattr(stage.settings, key) == tuple(str(file) for file in files)
    assert set(files) <= set(stage.paths())


@pytest.mark.parametrize("key", KEYS)
def test_what_does_not_exist_is_answered(
    plan: Planner, arguments: list[str], tmp_path: Path, key: str
) -> None:
    missing = tmp_path / "nothing.nemo"
    with pytest.raises(ConfigError) as raised:
        plan(LOCAL, *arguments, f"export.model.{key}=[{missing}]")
    (found,) = raised.value.problems
    assert "the checkpoint of adapters" in found
    assert str(missing) in found
    assert f"export.model.{key}" in found
