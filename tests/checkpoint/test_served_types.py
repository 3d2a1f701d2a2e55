"""Which model_type serves which checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.model_repository import backend_model_type
from launcher_scripts.common.errors import ConfigError
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.models.repository import BACKEND_MODEL_TYPES
from tests.checkpoint.exporting import export_folder, refused_export
from tests.checkpoint.t5_maker import small_t5
from tests.checkpoint.tiny_models import ENCODER_DECODERS
from tests.checkpoint_maker import make_nemo, small_config


def test_every_type_is_served_and_every_contract_has_a_type() -> None:
    assert set(BACKEND_MODEL_TYPES.values()) == set(CONTRACTS)


@pytest.mark.parametrize(
    ("model_type", "config", "served"),
    [
        ("gpt3", small_config(), "GPT"),
        ("mt5", small_t5(), "T5"),
        ("t5-encoder", small_t5(), "T5-Encoder"),
        ("t5-encoder", small_t5(encoder_only=True), "T5-Encoder"),
    ],
)
def test_fitting(model_type: str, config: Any, served: str) -> None:
    assert backend_model_type(model_type, config) == served


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("t5", small_config(), "of family gpt, cannot be served .* choices: gpt3;"),
        ("gpt3", small_t5(), "of family t5, cannot .* choices: t5, mt5, t5-encoder;"),
        ("t5", small_t5(encoder_only=True), r"\(an encoder alone\), .* choices: t5-encoder;"),
        ("gpt4", small_config(), "unknown export.run.model_type; got 'gpt4'"),
    ],
)
def test_not_fitting(model_type: str, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        backend_model_type(model_type, config)


def test_found_before_anything_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source.nemo"
    make_nemo(source, small_config())
    refused_export(source, tmp_path, "cannot be served as this model_type", model_type="mt5")


def test_another_family_s_model_type(tmp_path: Path) -> None:
    folder = tmp_path / "bart"
    ENCODER_DECODERS["bart"].save(folder)
    message = "of family bart, cannot be served as this model_type; got 't5'; choices: bart"
    refused_export(folder, tmp_path, message, model_type="t5")
    assert (export_folder(folder, tmp_path) / "manifest.json").is_file()
