"""Tokenizers agree with NeMo's own ids, come back to the text, and stand alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher_scripts.common import tokenizer as tokenizer_module
from launcher_scripts.common.tokenizer import (
    TokenizationError,
    TokenizerError,
    load_tokenizer,
    tokenizer_files,
)
from tests.tokenizer.panics import PANIC_ID, PANIC_TEXT, fragile_tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
SENTENCE = "The quick brown fox jumps over the lazy dog."
# Ids that NeMo 1.18.1's own tokenizer classes gave for SENTENCE with these files.
NEMO_GPT2_IDS = [439, 372, 423, 408, 394, 382, 401, 400, 384, 14]
NEMO_SENTENCEPIECE_START = [132, 163, 37, 120, 24, 108, 44, 90, 132, 162, 83, 129]
TEXTS = ["Hello world", " two  spaces", "line\nbreak\ttab", "é ß 漢字 🙂", "", "a,b;c"]


@pytest.mark.parametrize("folder", ["gpt2bpe", "sentencepiece"])
def test_other_threads_run_while_a_long_text_is_tokenized(folder: str) -> None:
    """One that held Python's lock would let this thread run twice, before it and after it."""
    tokenizer = load_tokenizer(DATA / folder)
    thread = threading.Thread(target=tokenizer.encode, args=(f"{SENTENCE} " * 20_000,))
    turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


def test_gpt2_ids_are_nemos() -> None:
    tokenizer = load_tokenizer(DATA / "gpt2bpe")
    assert tokenizer.encode(SENTENCE) == NEMO_GPT2_IDS
    assert tokenizer.decode(NEMO_GPT2_IDS) == SENTENCE
    assert (tokenizer.vocab_size, tokenizer.start_id, tokenizer.end_id) == (491, 0, 0)
    assert tokenizer.pad_id is None


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_bytes_come_back(text: str) -> None:
    tokenizer = load_tokenizer(DATA / "gpt2bpe")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_end_of_text_is_one_token_without_text() -> None:
    tokenizer = load_tokenizer(DATA / "gpt2bpe")
    assert tokenizer.encode("a<|endoftext|>") == [*tokenizer.encode("a"), 0]
    assert tokenizer.decode([*tokenizer.encode("a"), 0, 0]) == "a"


def test_gpt2_vocabulary_without_end_of_text_gets_it_last(tmp_path: Path) -> None:
    vocab = json.loads((DATA / "gpt2bpe" / "vocab.json").read_text(encoding="utf-8"))
    del vocab["<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(sorted(vocab, key=vocab.__getitem__))}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    shutil.copy(DATA / "gpt2bpe" / "merges.txt", tmp_path)
    assert load_tokenizer(tmp_path).end_id == 490


def test_incomplete_utf8_is_a_replacement_character() -> None:
    tokenizer = load_tokenizer(DATA / "gpt2bpe")
    first_byte_only = tokenizer.encode("é")[:1]
    assert tokenizer.decode(first_byte_only) == "\ufffd"


def test_sentencepiece_ids_are_nemos() -> None:
    tokenizer = load_tokenizer(DATA / "sentencepiece")
    ids = tokenizer.encode(SENTENCE)
    assert ids[: len(NEMO_SENTENCEPIECE_START)] == NEMO_SENTENCEPIECE_START
    assert len(ids) == 19
    assert tokenizer.decode(ids) == SENTENCE
    assert (tokenizer.vocab_size, tokenizer.start_id, tokenizer.end_id) == (180, 3, 1)
    assert tokenizer.pad_id == 0


def test_sentencepiece_padded_vocabulary_has_no_text() -> None:
    tokenizer = load_tokenizer(DATA / "sentencepiece")
    assert tokenizer.decode([*tokenizer.encode("dog"), 1, 200]) == "dog"


@pytest.fixture
def fast_folder(tmp_path: Path) -> Path:
    """A tokenizer.json with the ids of the small GPT-2 vocabulary."""
    gpt2 = load_tokenizer(DATA / "gpt2bpe")
    gpt2._tokenizer.save(str(tmp_path / "tokenizer.json"))  # type: ignore[attr-defined]
    return tmp_path


def test_fast_tokenizer_uses_the_usual_special_tokens(fast_folder: Path) -> None:
    tokenizer = load_tokenizer(fast_folder)
    assert tokenizer.encode(SENTENCE) == NEMO_GPT2_IDS
    assert tokenizer.decode(NEMO_GPT2_IDS) == SENTENCE
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id) == (0, 0, None)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_files_beside_a_fast_tokenizer_name_its_special_tokens(
    fast_folder: Path, name: str
) -> None:
    roles = {"bos_token": {"content": "Hello"}, "eos_token": "Rose", "model_max_length": 7}
    (fast_folder / name).write_text(json.dumps(roles), encoding="utf-8")
    tokenizer = load_tokenizer(fast_folder)
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id) == (471, 490, None)
    assert tokenizer_files(fast_folder) == [fast_folder / "tokenizer.json", fast_folder / name]


def test_a_folder_without_tokenizer_says_what_it_may_hold(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"got \['vocab.json'\].*vocab.json \+ merges.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no folder"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    "files",
    [{"tokenizer.json": "{"}, {"tokenizer.model": "x"}, {"vocab.json": "[", "merges.txt": ""}],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match="cannot read the tokenizer in"):
        load_tokenizer(tmp_path)


def test_the_package_works_alone_and_without_torch_or_numpy(tmp_path: Path) -> None:
    shutil.copytree(Path(tokenizer_module.__file__).parent, tmp_path / "tokenizer")
    program = (
        "import sys; sys.modules.update(torch=None, numpy=None, launcher_scripts=None)\n"
        "from pathlib import Path; from tokenizer import load_tokenizer\n"
        "print(load_tokenizer(Path(sys.argv[1])).encode(sys.argv[2]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(DATA / "gpt2bpe"), SENTENCE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == NEMO_GPT2_IDS


@pytest.mark.parametrize(
    ("kind", "text"),
    [("gpt2bpe", "Grüße, 漢字 and 🙂 the quick\tbrown fox é"), ("sentencepiece", SENTENCE)],
)
def test_the_bytes_of_tokens_make_up_the_text(kind: str, text: str) -> None:
    tokenizer = load_tokenizer(DATA / kind)
    raw = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    assert raw.removeprefix(" ") == tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_every_byte_has_its_character() -> None:
    """GPT-2's table, as the library has it: what it decodes to is the byte."""
    from tokenizers.decoders import ByteLevel

    from launcher_scripts.common.tokenizer.libraries import _byte_characters

    table = _byte_characters()
    assert sorted(table.values()) == list(range(256))
    for character, byte in table.items():
        if byte < 0x80:
            assert ByteLevel().decode([character]) == chr(byte)


def test_special_tokens_have_names() -> None:
    tokenizer = load_tokenizer(DATA / "gpt2bpe")
    assert tokenizer.token_bytes(tokenizer.end_id) == b"<|endoftext|>"


def test_a_panic_of_the_library_is_an_error_of_the_text(tmp_path: Path) -> None:
    tokenizer = fragile_tokenizer(tmp_path, decodes=False)
    with pytest.raises(TokenizationError, match=r"^the tokenizer refuses this text$"):
        tokenizer.encode(PANIC_TEXT)
    with pytest.raises(TokenizationError, match=r"^the tokenizer refuses these ids$"):
        tokenizer.decode([PANIC_ID])
    assert tokenizer.encode("the") == load_tokenizer(DATA / "gpt2bpe").encode("the")


@pytest.mark.parametrize("folder", ["gpt2bpe", "sentencepiece"])
def test_what_is_no_text_is_an_error_of_the_text(folder: str) -> None:
    with pytest.raises(TokenizationError, match="the tokenizer refuses this text: "):
        load_tokenizer(DATA / folder).encode("\ud800")
