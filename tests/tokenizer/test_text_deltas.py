"""Pieces of text put together are the whole text, for every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launcher_scripts.common.text_deltas import (
    CONTEXT,
    REPLACEMENT,
    WINDOW,
    GrowingText,
    RowText,
)
from launcher_scripts.common.tokenizer import load_tokenizer

TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
TEXT = "Grüße, 漢字 and  two blanks; 🙂🙂 the quick\nbrown fox é"
Decode = Callable[[Sequence[int]], str]


def byte_fallback() -> tuple[Callable[[str], list[int]], Decode]:
    """A Llama-like decoder: a run of byte tokens with an open character is all replacements."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for letter in "▁abcdefghijklmnopqrstuvwxyz":
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return (lambda text: tokenizer.encode(text).ids), tokenizer.decode


@pytest.fixture(params=["gpt2bpe", "sentencepiece", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> tuple[Callable[[str], list[int]], Decode]:
    if request.param == "byte_fallback":
        pytest.importorskip("tokenizers")
        return byte_fallback()
    loaded = load_tokenizer(TOKENIZERS / request.param)
    return loaded.encode, loaded.decode


def pieces(decode: Decode, ids: Sequence[int], prompt: int, step: int = 1) -> list[str]:
    """What a client is sent while the row grows by `step` tokens at a time."""
    seen, sent = prompt, []
    while seen < len(ids):
        now = min(seen + step, len(ids))
        row = RowText(decode, ids[:now], prompt)
        sent.append(row.delta(seen, finished=now == len(ids)))
        seen = now
    return sent


@pytest.mark.parametrize("step", [1, 2, 5])
def test_pieces_are_the_whole(tokenizer, step: int) -> None:
    encode, decode = tokenizer
    ids = encode(TEXT)
    for prompt in range(len(ids)):
        row = RowText(decode, ids, prompt)
        text = row.text(finished=True, with_prompt=False)
        assert "".join(pieces(decode, ids, prompt, step)) == text
        assert decode(ids).endswith(text)
        assert row.text(finished=True, with_prompt=True) == decode(ids)


def test_no_piece_has_half_a_character(tokenizer) -> None:
    encode, decode = tokenizer
    ids = encode(TEXT)
    assert not any(REPLACEMENT in piece for piece in pieces(decode, ids, 0)) or (
        REPLACEMENT in decode(ids)
    )


@pytest.mark.parametrize("name", ["gpt2bpe", "sentencepiece"])
def test_any_tokens_come_out_whole(name: str) -> None:
    """Also those that are not text: broken characters become replacements, once."""
    tokenizer = load_tokenizer(TOKENIZERS / name)
    source = random.Random(0)
    for _ in range(40):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(25)]
        prompt = source.randrange(5)
        text = RowText(tokenizer.decode, ids, prompt).text(finished=True, with_prompt=False)
        assert "".join(pieces(tokenizer.decode, ids, prompt)) == text


def test_a_sentencepiece_word_keeps_its_blank_after_a_prompt() -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "sentencepiece")
    prompt, ids = tokenizer.encode("The quick"), tokenizer.encode("The quick brown")
    assert ids[: len(prompt)] == prompt
    row = RowText(tokenizer.decode, ids, len(prompt))
    assert row.text(finished=True, with_prompt=False) == " brown"
    assert "".join(pieces(tokenizer.decode, ids, len(prompt))) == " brown"


def test_a_character_at_the_end_of_the_prompt_comes_with_its_last_token() -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    ids = tokenizer.encode("a🙂b")
    assert len(ids) > 4
    assert pieces(tokenizer.decode, ids, 2)[-2:] == ["🙂", "b"]


def test_nothing_new_is_no_text() -> None:
    row = RowText(lambda ids: "".join(map(chr, ids)), [97, 98], 1)
    assert row.delta(2, finished=True) == ""
    assert row.text(finished=True, with_prompt=False) == "b"


@pytest.mark.parametrize("step", [1, 3, 40])
@pytest.mark.parametrize("prompt", [0, 3, 100])
def test_a_growing_text_is_the_whole_text(tokenizer, prompt: int, step: int) -> None:
    """However long it is, though only its end is decoded each time."""
    encode, decode = tokenizer
    ids = encode(TEXT * 8)
    lengths = []

    def counted(some: Sequence[int]) -> str:
        lengths.append(len(some))
        return decode(some)

    text = GrowingText(counted)
    pieces = []
    for place in range(0, len(ids), step):
        now = ids[place : place + step]
        finished = place + step >= len(ids)
        text.feed(place, now, prompt=prompt, finished=finished)
        if place + len(now) > prompt:
            pieces.append(text.news())
    whole = RowText(decode, ids, prompt).text(finished=True, with_prompt=False)
    assert "".join(pieces) == text.text == whole
    assert max(lengths[len(lengths) // 2 :]) <= WINDOW + 2 * max(step, prompt) + CONTEXT
    assert text.prompt_text() == RowText(decode, ids, prompt).settled(prompt)
    assert text.news() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    """Also where the end brings no token."""
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    ids = tokenizer.encode("a🙂")[:-1]
    text = GrowingText(tokenizer.decode)
    text.feed(0, ids, prompt=0, finished=False)
    assert text.news() == "a"
    text.feed(len(ids), [], prompt=0, finished=True)
    assert text.news() == REPLACEMENT


def test_other_tokens_replace_a_text() -> None:
    """So come the hypotheses of a beam search."""
    tokenizer = load_tokenizer(TOKENIZERS / "gpt2bpe")
    text = GrowingText(tokenizer.decode)
    for said in ("The quick", "The brown fox"):
        text.feed(0, tokenizer.encode(said), prompt=1, finished=False)
        assert text.news() == text.text == said.removeprefix("The")
