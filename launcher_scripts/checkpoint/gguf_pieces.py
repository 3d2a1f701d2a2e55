"""SentencePiece's byte pairs of a GGUF file (`tokenizer.ggml.model` llama): Llama 2, Gemma, Phi-3.

The file has pieces and scores. `tokenizers` wants merges: the two pieces that make a third merge
the earlier the higher its score (Kudo and Richardson, 2018, https://arxiv.org/abs/1808.06226).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, USER_DEFINED, UNUSED = 1, 2, 4, 5
_SPACE = "▁"


def pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's pieces and scores; no token is special yet."""
    from tokenizers import Tokenizer, decoders, normalizers
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
    tokenizer = Tokenizer(model)
    # A text starts with a space, unless the file says that it does not.
    prefixed = metadata.get("add_space_prefix", True) is not False
    visible = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), visible]) if prefixed else visible
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps
    )
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
