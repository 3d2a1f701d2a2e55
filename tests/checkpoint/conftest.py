"""A small checkpoint of NeMo's, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint_maker import make_nemo, small_config


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .nemo file of `small_config`, which no test changes."""
    path = tmp_path_factory.mktemp("base") / "base.nemo"
    make_nemo(path, small_config())
    return path


@pytest.fixture
def source(base: Path, tmp_path: Path) -> Path:
    """A copy of `base`."""
    return Path(shutil.copy(base, tmp_path / "source.nemo"))
