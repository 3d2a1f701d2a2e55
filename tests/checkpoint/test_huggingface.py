"""Exports of tiny transformers models: the files alone give the logits of transformers."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint import reference_forward_bart, reference_forward_gpt, reference_forward_t5
from tests.checkpoint.exporting import export_folder, open_weights
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS

TOLERANCE = 1e-5
IDS = torch.tensor([[5, 17, 2, 40, 66, 31, 8], [1, 3, 60, 12, 13, 14, 15]])
TARGETS = torch.tensor([[0, 9, 33, 21, 4], [0, 64, 50, 7, 7]])


def seq2seq_logits(folder: Path, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights, config = open_weights(folder)
    forward = {"T5Config": reference_forward_t5, "BartConfig": reference_forward_bart}
    return forward[type(config).__name__].logits(weights, config, ids, targets)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_logits(tmp_path: Path, name: str, tp_size: int) -> None:
    model = DECODERS[name].save(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, tp_size)
    weights, config = open_weights(folder)
    with torch.no_grad():
        expected = model(IDS).logits
    found = reference_forward_gpt.logits(weights, config, IDS)
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_logits(tmp_path: Path, name: str, tp_size: int) -> None:
    model = ENCODER_DECODERS[name].save(tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path, tp_size)
    with torch.no_grad():
        expected = model(input_ids=IDS, decoder_input_ids=TARGETS).logits
    found = seq2seq_logits(folder, IDS, TARGETS)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1)


def test_key_value_heads_are_copied_where_there_are_more_ranks(tmp_path: Path) -> None:
    model = DECODERS["llama"].save(tmp_path / "hf")
    weights, config = open_weights(export_folder(tmp_path / "hf", tmp_path, 4))
    with torch.no_grad():
        expected = model(IDS).logits
    found = reference_forward_gpt.logits(weights, config, IDS)
    assert (found - expected).abs().max() <= TOLERANCE
