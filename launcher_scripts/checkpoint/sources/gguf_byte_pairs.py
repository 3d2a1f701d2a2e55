"""Byte pairs of a GGUF file (`tokenizer.ggml.model` gpt2): GPT-2's and what came after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher_scripts.checkpoint.sources.gguf_pre_tokenizers import PRE_TOKENIZERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def byte_pairs(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer by the file's tokens and merges; no token is special yet.

    Raises what `tokenizers` raises where merges and tokens disagree.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    row = PRE_TOKENIZERS[metadata["pre"]]
    vocab = {token: index for index, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=row.ignore_merges))
    if row.normalized:
        tokenizer.normalizer = normalizers.NFC()
    splits = [Split(Regex(expression), "isolated") for expression in row.splits]
    tokenizer.pre_tokenizer = Sequence(
        [*splits, ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
