"""The pieces of an answer put together are its text, however its tokens come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from launcher_scripts.common.tokenizer import Tokenizer, load_tokenizer
from launcher_scripts.gateway.backend import Increment
from launcher_scripts.gateway.reasoning import StopTexts
from launcher_scripts.gateway.row_text import RowTextStream, TextIncrement, token_texts
from tests.gateway.fakes import TOKENIZERS, log_prob

KINDS = {name: load_tokenizer(TOKENIZERS / name) for name in ("gpt2bpe", "sentencepiece")}
HARD = "é漢字仮名한글🙂👩‍👩‍👧🇨🇭e\u0301 \n\tab.,"
TEXTS = st.text(st.sampled_from(HARD) | st.characters(codec="utf-8"), min_size=1, max_size=40)


def pieces(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    ids: Sequence[int],
    cuts: Sequence[int],
    *,
    stops: Sequence[str] = (),
    with_log_probs: bool = False,
    **more: Any,
) -> list[TextIncrement]:
    """The pieces where increments end at `cuts`, up to the one with a reason to end."""
    texts = token_texts(tokenizer, prompt)
    row = RowTextStream(texts, StopTexts(stops), None, (), **{"max_tokens": len(ids), **more})
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    if len(places) == 1:
        places = [0, 0]
    found = []
    for start, end in itertools.pairwise(places):
        part = tuple(ids[start:end])
        entries = tuple(log_prob(each, 0) for each in part) if with_log_probs else ()
        found.append(row.feed(Increment(part, entries, finished=end == len(ids))))
        if found[-1].finish_reason is not None:
            break
    return found


def joined(match: Sequence[TextIncrement]) -> str:
    return "".join(piece.text for piece in match)


def shown(piece: TextIncrement) -> list[str]:
    """The texts of a piece's events."""
    texts, last = piece.by_token()
    return [*texts, *([last.text] if last is not None and last.text else [])]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=40), prompt=st.text(max_size=5))
def test_a_texts_pieces_are_the_text(kind: str, text: str, cuts: list[int], prompt: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    if not ids:
        return
    found = pieces(tokenizer, (), ids, cuts)
    assert joined(found) == tokenizer.decode(ids)
    for piece in found:
        assert "".join(shown(piece)) == piece.text
        last = piece.by_token()[1]
        assert (last and last.finish_reason) == piece.finish_reason
    # No piece ends within a character: nothing is shown that later bytes would change.
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece.text for piece in found)
    # After a prompt the text goes on as the two decoded together do.
    before = tokenizer.encode(prompt)
    whole = tokenizer.decode([*before, *ids])
    assert whole.endswith(joined(pieces(tokenizer, before, ids, cuts)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gpt2bpe", " some words to say"),
        ("gpt2bpe", " né à 漢字 🙂"),
        ("sentencepiece", " some words to say"),
        ("sentencepiece", " né à 漢字 🙂"),
    ],
)
def test_a_piece_of_several_tokens_knows_its_parts(kind: str, text: str) -> None:
    """One for each token, but for those that end within a character."""
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    before = tokenizer.encode("a")
    (piece,) = pieces(tokenizer, before, ids, ())
    one_by_one = pieces(tokenizer, before, ids, range(len(ids)))
    expected = [each.text for each in one_by_one if each.text]
    assert shown(piece) == expected
    assert len(expected) > 3


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data(), cuts=st.lists(st.integers(0, 200), max_size=40))
def test_any_ids_pieces_are_their_decoding(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    """Of models that write bytes which are not characters, too."""
    tokenizer = KINDS[kind]
    token = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(token, min_size=1, max_size=60))
    assert joined(pieces(tokenizer, (), ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data(), text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=40))
def test_a_stop_text_is_found_wherever_it_lies(
    kind: str, data: st.DataObject, text: str, cuts: list[int]
) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    found = pieces(tokenizer, (), ids, cuts, stops=[stop, "never there"])
    assert joined(found) == whole[: whole.index(stop)]
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", stop)


@settings(max_examples=100)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=40))
def test_offsets_say_where_tokens_begin(text: str, cuts: list[int]) -> None:
    assume("<|endoftext|>" not in text)  # a token that is not shown
    tokenizer = KINDS["gpt2bpe"]
    ids = tokenizer.encode(text)
    found = pieces(tokenizer, (), ids, cuts, with_log_probs=True, offset=7)
    entries = [entry for piece in found for entry in piece.entries]
    assert [entry.token_id for entry in entries] == ids
    complete = 0
    for place, entry in enumerate(entries):
        # What is before a token is shown, but for a character that it ends.
        before = b"".join(map(tokenizer.token_bytes, ids[:place]))
        complete = len(before.decode(errors="ignore"))
        assert entry.offset == 7 + complete
    assert joined(found) == text


@pytest.mark.parametrize(("most", "reason"), [(3, "length"), (4, "stop")])
def test_a_row_that_the_engine_ends_early_is_complete(most: int, reason: str) -> None:
    """So a text that follows a grammar ends, where nothing can come after it."""
    found = pieces(KINDS["gpt2bpe"], (), [5, 6, 7], (), max_tokens=most)
    assert (found[-1].finish_reason, found[-1].stop_reason) == (reason, None)


def test_tokens_are_counted_up_to_the_stop() -> None:
    tokenizer = KINDS["gpt2bpe"]
    ids = tokenizer.encode(" some words to say")
    found = pieces(tokenizer, (), ids, range(len(ids)), stops=["words"])
    text = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if "words" in text:
            assert found[-1].tokens == count
            return


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "met"),
    [
        (["abc"], ["xa", "b", "d"], ["x", "", "abd"], None),
        (["abc"], ["xa", "bc", "d"], ["x", "", ""], "abc"),
        (["bc", "abcd"], ["abcd"], [""], "abcd"),
        (["ab", "abc"], ["abc"], [""], "abc"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        ([], ["a"], ["a"], None),
    ],
)
def test_stop_texts(stops: list[str], parts: list[str], shown: list[str], met: str | None) -> None:
    found = StopTexts(stops)
    last = len(parts) - 1
    assert [found.feed(part, finished=n == last) for n, part in enumerate(parts)] == shown
    assert found.match == met
