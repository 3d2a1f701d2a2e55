"""A draft model in the configuration of an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.common.errors import ConfigError
from tests.engine.small_models import random_tensors, small_config, write_checkpoint
from tests.login.conftest import LOCAL, Planner

KEY = "export.triton_deployment.draft_model_dir"


def test_its_folder_goes_into_the_settings(
    plan: Planner, arguments: list[str], tmp_path: Path
) -> None:
    config = small_config()
    folder = write_checkpoint(tmp_path / "small", config, random_tensors(config), 2)
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
    plan: Planner,
    arguments: list[str],
    tmp_path: Path,
    tp_size: int | None,
    message: str,
) -> None:
    folder, config = tmp_path / "small", small_config()
    if tp_size is not None:
        write_checkpoint(folder, config, random_tensors(config), tp_size)
    with pytest.raises(ConfigError) as raised:
        plan(LOCAL, *arguments, f"{KEY}={folder}")
    (found,) = raised.value.problems
    assert message in found
    assert KEY in found
