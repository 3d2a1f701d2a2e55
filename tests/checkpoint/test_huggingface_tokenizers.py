"""Tokenizers travel with Hugging Face exports; ids are the model's, not the tokenizer's guess."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import TokenizerSettings
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tiny_models import DECODERS, ENCODER_DECODERS, TinyModel

FILES = ("vocab.json", "merges.txt")
AUTO = TokenizerSettings("auto")


def ids(folder: Path) -> tuple[int, int, int | None]:
    config: Any = FTCheckpoint.open(folder).config
    return config.start_id, config.end_id, config.pad_id


def with_rows(model: TinyModel, rows: int = 496) -> TinyModel:
    """The same model with room for the tokens of a tokenizer."""
    return replace(model, values={**model.values, "vocab_size": rows})


def test_t5_brings_its_pieces_and_starts_with_its_own_token(data_dir: Path, tmp_path: Path) -> None:
    with_rows(ENCODER_DECODERS["t5_v1_1"]).make().save_pretrained(tmp_path / "hf")
    pieces = data_dir / "tokenizers" / "sentencepiece" / "tokenizer.model"
    shutil.copy(pieces, tmp_path / "hf" / "spiece.model")
    folder = export_folder(tmp_path / "hf", tmp_path, tokenizer=AUTO)
    tokenizer = load_tokenizer(folder)
    assert not (folder / "tokenizer.model").exists()
    assert tokenizer.start_id != 0  # what the pieces would say
    assert tokenizer.encode("a <extra_id_0>")[-1] == tokenizer.special_id("<extra_id_0>")
    assert ids(folder) == (0, 1, 0)


def test_byte_pairs_and_a_fast_tokenizer(data_dir: Path, tmp_path: Path) -> None:
    with_rows(DECODERS["opt"]).make().save_pretrained(tmp_path / "hf")
    for name in FILES:
        shutil.copy(data_dir / "tokenizers" / "gpt2bpe" / name, tmp_path / "hf")
    folder = export_folder(tmp_path / "hf", tmp_path / "a", tokenizer=AUTO)
    assert (folder / "tokenizer.json").is_file()
    assert ids(folder) == (2, 2, 1)
    # A tokenizer.json goes before, with the files that refine it.
    pairs = [str(data_dir / "tokenizers" / "gpt2bpe" / name) for name in FILES]
    Tokenizer(BPE.from_file(*pairs)).save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    folder = export_folder(tmp_path / "hf", tmp_path / "b", tokenizer=AUTO)
    names = {path.name for path in folder.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert not set(FILES) & names


def test_settings_rule_over_the_models_ids(tmp_path: Path) -> None:
    ENCODER_DECODERS["bart"].make().save_pretrained(tmp_path / "hf")
    settings = TokenizerSettings("none", start_id=7, end_id=8, pad_id=9)
    assert ids(export_folder(tmp_path / "hf", tmp_path, tokenizer=settings)) == (7, 8, 9)


@pytest.mark.parametrize("file", [None, "sentencepiece.bpe.model"])
def test_a_missing_tokenizer_is_an_error_that_names_the_key(
    tmp_path: Path, file: str | None
) -> None:
    """The pieces of XGLM and mBART alone are not enough: their numbers are not the model's ids."""
    DECODERS["xglm"].make().save_pretrained(tmp_path / "hf")
    if file:
        (tmp_path / "hf" / file).write_bytes(b"pieces")
    with pytest.raises(CheckpointError, match=r"holds no tokenizer.*change export\.model\.token"):
        export_folder(tmp_path / "hf", tmp_path, tokenizer=AUTO)
    assert not (tmp_path / "m").exists()
