"""SentencePiece's vocabularies of a GGUF file: pieces and scores (Kudo and Richardson, 2018,
https://arxiv.org/abs/1808.06226).

`tokenizer.ggml.model` llama: byte pairs (Llama 2, Gemma, Phi-3). `tokenizers` wants merges: the two
pieces that make a third merge the earlier the higher its score.
`tokenizer.ggml.model` t5: a unigram model, which takes the pieces of the highest sum of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6
_SPACE = "▁"
CHARSMAP = "precompiled_charsmap"


def pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's pieces and scores; no token is special yet."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    tokens, kinds = metadata["tokens"], metadata["token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None
    )
    model = BPE(
        vocab,
        _merges(vocab, metadata["scores"], kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    return _with_visible_spaces(Tokenizer(model), metadata)


def unigram(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's pieces and scores; no token is special yet."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram

    kinds = metadata["token_type"]
    model = Unigram(
        list(zip(metadata["tokens"], metadata["scores"], strict=True)),
        kinds.index(UNKNOWN) if UNKNOWN in kinds else None,
        byte_fallback=BYTE in kinds,
    )
    return _with_visible_spaces(Tokenizer(model), metadata)


def _with_visible_spaces(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> Tokenizer:
    """Normalize as SentencePiece does, spaces becoming visible in the end."""
    from tokenizers import Regex, decoders, normalizers

    steps: list[Any] = []
    if charsmap := metadata.get(CHARSMAP):
        steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in charsmap)))
    if metadata.get("remove_extra_whitespaces"):
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" +"), " "),
        ]
    # A text starts with a space, unless the file says that it does not.
    prefixed = metadata.get("add_space_prefix", True) is not False
    if prefixed:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return tokenizer


def _merges(
    vocab: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best first."""
    found = []
    for token, index in vocab.items():
        if kinds[index] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right, token, cut))
    found.sort(key=lambda row: row[:4])
    return [(token[:cut], token[cut:]) for *_, token, cut in found]
