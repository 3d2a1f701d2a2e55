"""Distributed checkpoints written by Pythons that pickle enumerations in their own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from tests.checkpoint.exporting import export_folder
from tests.checkpoint_maker import Variant, make_nemo, rebuilt, small_config


def _by_name(self: Any, _protocol: int) -> tuple[Any, ...]:
    return getattr, (type(self), self._name_)


def _by_value(self: Any, _protocol: int) -> tuple[Any, ...]:
    return type(self), (self._value_,)


@pytest.mark.parametrize("reduce", [_by_name, _by_value])
def test_the_way_a_python_pickles_enumerations_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduce: Any
) -> None:
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    stored = make_nemo(tmp_path / "source", small_config(), Variant("torch_dist"))
    found = rebuilt(FTCheckpoint.open(export_folder(tmp_path / "source", tmp_path, 2)))
    assert found.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
