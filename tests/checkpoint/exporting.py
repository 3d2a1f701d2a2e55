"""Export a checkpoint in a test, and open what came out for the plain forward passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.export import export
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.models import family_of
from tests.checkpoint.reference_weights import StoredWeights


def export_folder(
    checkpoint: Path, target: Path, tp_size: int = 1, data_type: str = "fp32", **more: Any
) -> Path:
    """Export without a tokenizer, unless `more` says otherwise; the folder of the shards."""
    values = {
        "tokenizer": TokenizerSettings("none"),
        "model_type": "",
        "processes": 2,
        "parallelism": Parallelism(tp_size, 1),
        **more,
    }
    settings = ExportSettings(
        model_name="m",
        checkpoint_path=str(checkpoint),
        triton_model_dir=str(target / "m"),
        weight_data_type=data_type,
        **values,
    )
    return export(settings)


def open_weights(folder: Path) -> tuple[StoredWeights, Any]:
    """The rebuilt tensors of an exported folder, and its hyperparameters."""
    checkpoint = FTCheckpoint.open(folder)
    config = checkpoint.config
    specs = family_of(config).weights(config)
    weights = StoredWeights(folder, config, specs, checkpoint.tp_size, checkpoint.weight_data_type)
    return weights, config


def weight_bytes(folder: Path) -> dict[str, bytes]:
    """Name -> content of every .bin file."""
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def change_json(path: Path, **values: Any) -> dict[str, Any]:
    """Put values into a JSON file; returns what it said before."""
    said: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(said | values))
    return said


def refused_export(
    checkpoint: Path, target: Path, message: str, tp_size: int = 1, **more: Any
) -> str:
    """The error of an export that must fail with `message` and leave nothing behind."""
    with pytest.raises(LauncherError, match=message) as caught:
        export_folder(checkpoint, target / "out", tp_size, **more)
    assert not (target / "out").exists()
    return str(caught.value)
