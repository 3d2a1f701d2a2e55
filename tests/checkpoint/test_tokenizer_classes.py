"""Every class of tokenizer gives the ids of transformers, whatever files hold it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.tokenizers.text_probe import TEXTS, check_special_tokens
from launcher_scripts.checkpoint.tokenizers.tokenizer_classes import CLASSES
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import FAIRSEQ_SETS, plain_files
from launcher_scripts.checkpoint.tokenizers.vocabularies import SentencePieceModel
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from launcher_scripts.evaluation.tasks.transformers_model import TransformersText
from tests.checkpoint.tokenizer_folders import (
    FOLDERS,
    UNKNOWN,
    Folder,
    added,
    fast,
    pieces,
    slow_pairs,
)
from tests.tokenizer.bart_tokenizers import m2m_100, marian, nllb

pytestmark = pytest.mark.filterwarnings("ignore")


def exported(source: Path, target: Path) -> tuple[Tokenizer, dict[str, bytes]]:
    """The tokenizer that an export makes of a folder, and its files."""
    config = json.loads((source / "config.json").read_text())
    files = plain_files(Archive(source), more=FAIRSEQ_SETS, config=config)
    target.mkdir(exist_ok=True)
    for name, content in files.items():
        (target / name).write_bytes(content)
    return load_tokenizer(target), files


def check(source: Path, target: Path) -> dict[str, bytes]:
    """Compare ids and texts with transformers'; the files."""
    tokenizer, files = exported(source, target)
    reference = TransformersText(source)
    before, after = tokenizer.surround()
    for text in [*TEXTS, *(f"a {token} b{token}c" for token in reference.added_tokens())]:
        ids = reference.encode(text, with_special=False)
        assert tokenizer.encode(text) == ids, text
        assert [*before, *ids, *after] == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids), text
    check_special_tokens(tokenizer, files)
    return files


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    files = check(FOLDERS[name].write(tmp_path / "hf"), tmp_path / "exported")
    assert "tokenizer.json" in files
    slow = {"tokenizer.model", "merges.txt", "vocab.json", "added_tokens.json"}
    assert not slow & files.keys()


@pytest.mark.parametrize(
    ("name", "tokenizer_class"),
    [
        ("llama", "LlamaTokenizer"),
        ("gemma", "GemmaTokenizer"),
        ("t5", "T5Tokenizer"),
        ("bart", "BartTokenizer"),
        ("mbart", "MBartTokenizer"),
        ("mbart50", "MBart50Tokenizer"),
        ("pegasus", "PegasusTokenizer"),
        ("mbart", "XGLMTokenizer"),
        ("llama", "MistralTokenizer"),
    ],
)
@pytest.mark.parametrize("normalizer", [None, {"type": "Prepend", "prepend": "▁"}])
def test_a_fast_file_is_cut_as_its_class_says(
    tmp_path: Path, name: str, tokenizer_class: str, normalizer: Any
) -> None:
    """tokenizer.json gives vocabulary, merges and what stands around a text."""
    source = FOLDERS[name]
    _, files = exported(source.write(tmp_path / "slow"), tmp_path / "first")
    content = json.loads(files["tokenizer.json"])
    content["normalizer"] = normalizer
    model_type = {"XGLMTokenizer": "xglm", "MistralTokenizer": "mistral"}.get(
        tokenizer_class, source.model_type
    )
    config = {**(source.config or {}), "tokenizer_class": tokenizer_class}
    folder = Folder({"tokenizer.json": content}, model_type, config=config)
    check(folder.write(tmp_path / "hf"), tmp_path / "exported")


def test_a_file_that_lacks_nothing_is_copied(tmp_path: Path) -> None:
    folder = FOLDERS["fast"].write(tmp_path / "hf")
    pretty = json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=3)
    (folder / "tokenizer.json").write_text(pretty)
    assert check(folder, tmp_path / "exported")["tokenizer.json"] == pretty.encode()


@pytest.mark.parametrize("make", [m2m_100, marian])
@pytest.mark.parametrize("more", [[], ["<new>"]])
def test_numbered_pieces(tmp_path: Path, make: Any, more: list[str]) -> None:
    (tmp_path / "hf").mkdir()
    tokenizer = make(tmp_path / "hf", pieces("unigram"))
    tokenizer.add_tokens(more)
    tokenizer.save_pretrained(tmp_path / "hf")
    config = {"model_type": "marian" if make is marian else "m2m_100"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    check(tmp_path / "hf", tmp_path / "exported")


def test_an_nllb(tmp_path: Path) -> None:
    nllb().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "m2m_100"}')
    check(tmp_path / "hf", tmp_path / "exported")


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_class_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = UNKNOWN[name]
    named = (folder.config or {}).get("tokenizer_class", "no tokenizer_class")
    with pytest.raises(CheckpointError, match=rf"class.* is not known .*got '{named}'; choices: "):
        exported(folder.write(tmp_path / "hf"), tmp_path / "exported")


def test_split_special_tokens_is_refused(tmp_path: Path) -> None:
    folder = Folder(fast("<s>"), config={"split_special_tokens": True})
    with pytest.raises(CheckpointError, match="split_special_tokens"):
        exported(folder.write(tmp_path / "hf"), tmp_path / "exported")


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": added(450, "<|im_start|>")},  # the next free id is another
        {"added_tokens_decoder": {}, "additional_special_tokens": ["a b"]},
    ],
)
def test_a_special_token_that_is_not_one_id_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tokenizer, files = exported(Folder(fast("<s>")).write(tmp_path / "hf"), tmp_path / "exported")
    check_special_tokens(tokenizer, files)
    files["tokenizer_config.json"] = json.dumps(config).encode()
    with pytest.raises(CheckpointError, match=r"special tokens:\n.* is read as; got \["):
        check_special_tokens(tokenizer, files)


def test_slow_files_of_a_class_are_not_read_without_the_export(tmp_path: Path) -> None:
    """What gateway and evaluation name as a folder of a tokenizer."""
    folder = Folder(slow_pairs(), config={"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(TokenizerError, match="Qwen2Tokenizer cannot be read without the files"):
        load_tokenizer(folder.write(tmp_path / "hf"))


@pytest.mark.parametrize("cut", [0, 3, 1000, -1])
def test_a_damaged_model_is_one_clear_error(tmp_path: Path, cut: int) -> None:
    folder = FOLDERS["llama"].write(tmp_path / "hf")
    content = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(content[:cut] + (b"" if cut else b"{}"))
    with pytest.raises(CheckpointError, match=r"cannot make the tokenizer of tokenizer\.model"):
        exported(folder, tmp_path / "exported")


def test_pieces_and_settings_are_those_of_the_library() -> None:
    import sentencepiece

    content = pieces("unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    model = SentencePieceModel.parse(content)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    for index, piece in enumerate(model.pieces):
        assert (piece.text, piece.score) == (library.id_to_piece(index), library.get_score(index))
    assert (model.unk_id, model.bos_id, model.eos_id) == (2, -1, 1)
    assert model.charsmap and not model.byte_fallback


def test_the_table_of_the_documents_names_every_class_and_what_compares_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoint-families.md").read_text()
    lines = text.partition("## Tokenizers")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    documented = {name for row in rows for name in re.findall(r"`(\w+Tokenizer)`", row[0])}
    assert documented == {*CLASSES, "M2M100Tokenizer", "MarianTokenizer", "ByT5Tokenizer"} | {
        "BloomTokenizer"
    }
    folders = {
        name: re.findall("`([^`]+)`", row[-1])
        for row in rows
        for name in re.findall(r"`(\w+Tokenizer)`", row[0])
    }
    for tokenizer_class, names in folders.items():
        assert names, tokenizer_class
        for name in names:
            if name in FOLDERS:
                continue
            assert name in globals() or name == "tests/tokenizer/test_byt5.py"
    for name, row in CLASSES.items():
        (line,) = (line for line in rows if f"`{name}`" in line[0])
        files = set(re.findall(r"`([\w.]+)`", line[1].replace("spiece.model", "tokenizer.model")))
        assert files == {*row.slow}
