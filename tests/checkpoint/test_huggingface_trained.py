"""A really trained T5 (English to German), exported for 1, 2 and 4 ranks, still translates."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import export_folder, open_weights
from tests.checkpoint.reference_forward_t5 import greedy
from tests.checkpoint.reference_weights import Cached

ITEMS = 20


@pytest.fixture(scope="module")
def trained(shared_dir: Path) -> Path:
    return shared_dir / "fixtures" / "hf" / "t5_multi30k"


@pytest.mark.parametrize(
    ("tp_size", "data_type"),
    [(2, "bf16"), *(pytest.param(tp, "fp32", marks=pytest.mark.slow) for tp in (1, 4))],
)
def test_greedy_translation(
    shared_dir: Path, trained: Path, tmp_path: Path, tp_size: int, data_type: str
) -> None:
    folder = export_folder(
        trained, tmp_path, tp_size, data_type, tokenizer=TokenizerSettings("auto")
    )
    weights, config = open_weights(folder)
    tokenizer = load_tokenizer(folder)
    answers = json.loads((trained / "reference_greedy.json").read_text())
    expected = answers["test_2016_flickr_greedy_token_ids_first_100"][:ITEMS]
    with gzip.open(shared_dir / "data" / "multi30k_en-de" / "test_2016_flickr.en.gz", "rt") as file:
        lines = [next(file).strip() for _ in range(ITEMS)]
    cached = Cached(weights)
    with torch.no_grad():
        for line, answer in zip(lines, expected, strict=True):
            ids = [*tokenizer.encode(line)[:62], config.end_id]
            assert greedy(cached, config, ids, 64) == answer


def test_ids_and_scale_are_the_models(trained: Path, tmp_path: Path) -> None:
    folder = export_folder(trained, tmp_path, 1, "bf16", tokenizer=TokenizerSettings("auto"))
    config = FTCheckpoint.open(folder).config
    assert (config.start_id, config.end_id, config.pad_id) == (0, 1, 0)
    assert config.logits_scale == 1.0
    tokenizer, library = (
        load_tokenizer(folder),
        SentencePieceProcessor(model_file=str(trained / "spiece.model")),
    )
    text = "Two young, White males are outside near many bushes."
    assert tokenizer.encode(text) == library.encode(text)
    assert tokenizer.encode("<extra_id_0>") == [library.vocab_size() + 99]
