"""Which tokenizer goes with an export, and which ids come with it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import read_manifest
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import tekken_files
from launcher_scripts.common.errors import CheckpointError, RequestError
from launcher_scripts.common.tokenizer import load_tokenizer
from launcher_scripts.config.export import TokenizerSettings
from launcher_scripts.contract.requests import GenerateRequest
from launcher_scripts.engine.core.requests import check_request
from tests.checkpoint.exporting import export_folder
from tests.checkpoint.tokenizer_folders import FOLDERS
from tests.checkpoint_maker import Variant, make_nemo, small_config

BPE = {
    "library": "megatron",
    "type": "GPT2BPETokenizer",
    "model": None,
    "vocab_file": "nemo:0a1b_vocab.json",
    "merge_file": "nemo:0a1b_merges.txt",
}


def bpe_files(data_dir: Path, prefix: str = "0a1b_") -> dict[str, bytes]:
    folder = data_dir / "tokenizers" / "gpt2bpe"
    return {
        f"{prefix}{name}": (folder / name).read_bytes() for name in ("vocab.json", "merges.txt")
    }


def export(tmp_path: Path, tokenizer: TokenizerSettings, **variant: Any) -> FTCheckpoint:
    make_nemo(tmp_path / "s.nemo", small_config(vocab_size=496), Variant(**variant))
    return FTCheckpoint.open(export_folder(tmp_path / "s.nemo", tmp_path, tokenizer=tokenizer))


def test_auto_takes_the_checkpoints_own(data_dir: Path, tmp_path: Path) -> None:
    files = bpe_files(data_dir)
    checkpoint = export(tmp_path, TokenizerSettings(), raw={"tokenizer": BPE}, files=files)
    assert (checkpoint.folder / "vocab.json").read_bytes() == files["0a1b_vocab.json"]
    assert (checkpoint.folder / "merges.txt").read_bytes() == files["0a1b_merges.txt"]
    tokenizer = load_tokenizer(checkpoint.folder)
    config = checkpoint.config
    ids = (config.start_id, config.end_id, config.pad_id)
    assert ids == (tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id)
    assert config.end_id != 50256


def test_auto_with_sentencepiece(data_dir: Path, tmp_path: Path) -> None:
    model = (data_dir / "tokenizers" / "sentencepiece" / "tokenizer.model").read_bytes()
    checkpoint = export(
        tmp_path,
        TokenizerSettings(),
        raw={"tokenizer": {"library": "sentencepiece", "model": "nemo:ff_spm.model"}},
        files={"ff_spm.model": model},
    )
    assert (checkpoint.folder / "tokenizer.model").read_bytes() == model
    tokenizer = load_tokenizer(checkpoint.folder)
    assert checkpoint.config.end_id == tokenizer.end_id


@pytest.mark.parametrize("stem", ["/tmp/gone/0a1b_", "/artifacts/", "nemo:other_"])
def test_a_name_that_leads_nowhere_is_looked_for(stem: str, data_dir: Path, tmp_path: Path) -> None:
    section = {**BPE, "vocab_file": f"{stem}vocab.json", "merge_file": f"{stem}merges.txt"}
    files = bpe_files(data_dir)
    checkpoint = export(tmp_path, TokenizerSettings(), raw={"tokenizer": section}, files=files)
    assert (checkpoint.folder / "vocab.json").read_bytes() == files["0a1b_vocab.json"]


def test_a_file_outside_of_the_archive_is_never_read(data_dir: Path, tmp_path: Path) -> None:
    """The configuration of a checkpoint may not choose files of this machine."""
    folder = data_dir / "tokenizers" / "gpt2bpe"
    section = {
        **BPE,
        "vocab_file": str(folder / "vocab.json"),
        "merge_file": str(folder / "merges.txt"),
    }
    with pytest.raises(CheckpointError, match=r"does not hold.*export\.model\.tokenizer"):
        export(tmp_path, TokenizerSettings(), raw={"tokenizer": section})


def test_a_mapping_replaces_it(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "tokenizers" / "gpt2bpe"
    settings = TokenizerSettings(
        "files",
        library="megatron",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
        start_id=5,
        pad_id=7,
    )
    config = export(tmp_path, settings).config
    assert (config.start_id, config.pad_id) == (5, 7)
    assert config.end_id == load_tokenizer(folder).end_id


def test_a_named_file_of_a_class_is_read_with_the_files_beside_it(tmp_path: Path) -> None:
    folder = FOLDERS["llama"].write(tmp_path / "hf")
    settings = TokenizerSettings("files", model=str(folder / "tokenizer.model"))
    exported = export(tmp_path, settings).folder
    tokenizer = load_tokenizer(exported)
    assert not (exported / "tokenizer.model").exists()
    assert tokenizer.encode("<|im_start|>") == [tokenizer.special_id("<|im_start|>")]
    (folder / "tokenizer_config.json").unlink()
    (tmp_path / "again").mkdir()
    exported = export(tmp_path / "again", settings).folder
    assert (exported / "tokenizer.model").is_file()


def test_named_files_must_be_there(tmp_path: Path) -> None:
    settings = TokenizerSettings("files", vocab_file="/no/vocab.json", merge_file="/no/merges.txt")
    with pytest.raises(CheckpointError, match="2 problems") as caught:
        export(tmp_path, settings)
    assert "export.model.tokenizer.vocab_file" in str(caught.value)
    with pytest.raises(CheckpointError, match="no file is named"):
        export(tmp_path, TokenizerSettings("files"))


def test_a_broken_tokenizer_is_found_before_writing(data_dir: Path, tmp_path: Path) -> None:
    files = {**bpe_files(data_dir), "0a1b_vocab.json": b"{"}
    with pytest.raises(CheckpointError, match=r"export\.model\.tokenizer"):
        export(tmp_path, TokenizerSettings(), raw={"tokenizer": BPE}, files=files)
    assert not (tmp_path / "m").exists()


def test_none_keeps_gpt2s_ids(tmp_path: Path) -> None:
    config = export(tmp_path, TokenizerSettings("none")).config
    assert (config.start_id, config.end_id, config.pad_id) == (50256, 50256, None)
    settings = TokenizerSettings("none", start_id=1, end_id=2, pad_id=3)
    (tmp_path / "again").mkdir()
    config = export(tmp_path / "again", settings).config
    assert (config.start_id, config.end_id, config.pad_id) == (1, 2, 3)


def test_added_tokens_may_lie_beyond_the_rows(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt that contains one is refused; others are answered."""
    pairs = [
        str(data_dir / "tokenizers" / "gpt2bpe" / name) for name in ("vocab.json", "merges.txt")
    ]
    tokenizer = Tokenizer(models.BPE.from_file(*pairs))
    tokenizer.add_special_tokens(["<pad>", "<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    settings = TokenizerSettings("files", model=str(tmp_path / "tokenizer.json"))
    make_nemo(tmp_path / "s.nemo", small_config(vocab_size=492))
    folder = export_folder(tmp_path / "s.nemo", tmp_path, tokenizer=settings)
    note = "the model has no row for the tokens <image> (ids from 492 on)"
    assert f"note: {note}: a prompt that contains one is refused" in capsys.readouterr().out
    assert any(note in text for text in read_manifest(folder).source["notes"])  # type: ignore[union-attr]
    config = FTCheckpoint.open(folder).config
    ids = load_tokenizer(folder).encode("a<image>b")
    assert 492 in ids
    with pytest.raises(RequestError, match=r"ids outside of the vocabulary; got \[492\]"):
        check_request(GenerateRequest(tuple(ids), output_len=1), config, 64, 1)
    ids = load_tokenizer(folder).encode("a<pad>b")
    check_request(GenerateRequest(tuple(ids), output_len=1), config, 64, 1)


@pytest.mark.parametrize("name", ["start_id", "end_id", "pad_id"])
def test_ids_that_no_model_has_are_refused(tmp_path: Path, name: str) -> None:
    settings = TokenizerSettings("none", **{name: 1_000_000_000})
    with pytest.raises(
        CheckpointError, match=rf"got 1000000000; .*export\.model\.tokenizer\.{name}"
    ):
        export(tmp_path, settings)
    assert not (tmp_path / "m").exists()


def tekken(**values: Any) -> bytes:
    """A tekken.json of all bytes and some pairs, with ten special tokens, and one rank too many."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", "é".encode(), b"12", b"zz"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    sizes = {"default_vocab_size": len(tokens) + 9, "default_num_special_tokens": 10}
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    config = {"pattern": pattern, "num_vocab_tokens": len(tokens), "version": "v3", **sizes}
    return json.dumps({"config": config, "vocab": vocabulary, **values}).encode()


def test_mistral_s_own_file_becomes_a_tokenizer(tmp_path: Path) -> None:
    listed = [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))
    ]
    for more in ({}, {"special_tokens": listed}):
        for name, content in tekken_files(tekken(**more), "it").items():
            (tmp_path / name).write_bytes(content)
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.start_id, tokenizer.end_id, tokenizer.vocab_size) == (1, 2, 275)
        # The best pair first, a whole word at once, single digits, and bytes without a pair.
        ids = [10 + 259, 10 + 262, 10 + ord("l"), 10 + ord("d"), 10 + ord("1"), 10 + ord("2")]
        assert tokenizer.encode("hello world12") == ids
        assert tokenizer.encode("[INST]é€") == [3, 10 + 263, *(10 + b for b in "€".encode())]
        for text in ("hello world12", " é\n€ zz", "a\tb"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    names = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [each["content"] for each in names][3:5] == ["[INST]", "<SPECIAL_4>"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        tekken(vocab=[]),
        tekken(vocab=[{"rank": 0, "token_bytes": "?"}]),
        tekken(vocab=[{"rank": "0", "token_bytes": "AA=="}]),
        tekken(special_tokens=[{"rank": 10, "token_str": "<s>"}]),
        tekken(special_tokens=[{"rank": 0, "token_str": "<s>"}]),
        tekken(special_tokens=3),
        tekken(config={"default_vocab_size": 1 << 40, "default_num_special_tokens": 10}),
    ],
    ids=range(10),
)
def test_a_damaged_file_of_mistral_s_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^it is damaged: "):
        tekken_files(content, "it")
