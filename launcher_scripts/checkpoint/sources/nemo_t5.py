"""model_config.yaml of a NeMo T5 or mT5: its hyperparameters, its dialect and its token ids.

Both stacks are described by sections of their own, `encoder` and `decoder`, since NeMo 1.10, and by
the file's own keys before. Absent keys take NeMo's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher_scripts.checkpoint.repository.tokenizer_files import TokenIds, own_ids
from launcher_scripts.checkpoint.sources.nemo_options import (
    ACTIVATIONS,
    NORMALIZATIONS,
    NemoModel,
    choice,
    flag,
    gelu,
    nemo_dialects,
    real,
    refuse_others,
    size,
)
from launcher_scripts.checkpoint.sources.nemo_options import section as section_of
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.common.tokenizer import SentencePieceTokenizer, Tokenizer

POSITIONS = {"learned_absolute": "learned", "relative": "relative"}

# What both stacks must agree in: FasterTransformer's layout has one value for it.
_COMMON = (
    "hidden_size",
    "num_heads",
    "head_size",
    "ffn_size",
    "position_embedding",
    "num_buckets",
    "max_distance",
    "relative_bias_layer_scaling",
    "normalization",
    "norm_eps",
    "activation",
    "gated",
    "bias",
    "attention_scale",
    "dialects",
)
# Keys whose other values change the network in ways this project does not know, with the only
# values it does know (None: absent or null).
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "arch": (None, "transformer"),
    "transformer_block_type": (None, "pre_ln"),
    "headscale": (None, False),
    "num_moe_experts": (None, 0, 1),
    "attention_type": (None, "multihead"),
}
# Tokens that NeMo appends to a SentencePiece vocabulary that lacks them, in its order.
_UNUSED_TOKENS = ("<cls>", "<sep>", "<mask>")


def read_t5(raw: Mapping[str, Any]) -> NemoModel:
    """Translate `raw`; raises CheckpointError with everything that cannot be represented."""
    problems = Problems("model_config.yaml")
    stacks = []
    for name in ("encoder", "decoder"):
        section = raw.get(name)
        stacks.append(_read_stack(section if isinstance(section, dict) else raw, problems))
    encoder, decoder = stacks
    for key in _COMMON:
        if encoder[key] != decoder[key]:
            problems.add(f"encoder and decoder differ in {key}", got=(encoder[key], decoder[key]))
    length = "max_position_embeddings" if raw.get("max_position_embeddings") else "seq_length"
    max_positions = size(raw, length, problems, 512)
    problems.raise_if_any(CheckpointError)
    relative = decoder["position_embedding"] == "relative"
    own_only = flag(decoder["section"], "relative_position_bias_self_attention_only", True)
    fields = {key: encoder[key] for key in _COMMON if key != "dialects"} | {
        "num_layers": encoder["num_layers"],
        "num_decoder_layers": decoder["num_layers"],
        "max_positions": max_positions,
        "cross_attention_relative_bias": relative and not own_only,
        "logits_bias": flag(raw, "tokens_head_bias", True),
        "tied_embeddings": flag(raw, "share_decoder_tokens_head_embeddings", True),
        "shared_embeddings": flag(raw, "share_token_embeddings", True),
    }
    return NemoModel(fields, encoder["dialects"])


def _read_stack(section: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """One stack's hyperparameters, with its own `section` and `dialects`."""
    refuse_others(section, problems, _KNOWN_VALUES)
    function, gated = choice(section, "activation", "gelu", ACTIVATIONS, problems)
    heads = size(section, "num_attention_heads", problems)
    hidden = size(section, "hidden_size", problems)
    head_size = size(section, "kv_channels", problems, hidden // heads)
    positions = choice(section, "position_embedding_type", "learned_absolute", POSITIONS, problems)
    relative = positions == "relative"
    scaled = flag(section, "normalize_attention_scores", True)
    return {
        "section": section,
        "dialects": nemo_dialects(
            fused=str(section.get("activation") or "").startswith("fast-"),
            legacy=flag(section, "megatron_legacy", False),
            plus_one=str(section.get("normalization") or "").lower() == "layernorm1p",
        ),
        "num_layers": size(section, "num_layers", problems),
        "hidden_size": hidden,
        "num_heads": heads,
        "head_size": head_size,
        "ffn_size": size(section, "ffn_hidden_size", problems, 4 * hidden),
        "position_embedding": positions,
        "num_buckets": size(section, "relative_attention_num_buckets", problems, 32),
        "max_distance": size(section, "relative_attention_max_distance", problems, 128),
        "relative_bias_layer_scaling": relative
        and flag(section, "apply_query_key_layer_scaling", True),
        "normalization": choice(section, "normalization", "layernorm", NORMALIZATIONS, problems),
        "norm_eps": real(section, "layernorm_epsilon", 1e-5, problems),
        "activation": gelu(section) if function == "gelu" else function,
        "gated": gated,
        "bias": flag(section, "bias", True),
        "attention_scale": head_size**-0.5 if scaled else 1.0,
    }


def t5_token_ids(raw: Mapping[str, Any], tokenizer: Tokenizer) -> TokenIds:
    """The ids that NeMo's T5 gives start, end and padding with this tokenizer.

    NeMo appends what a SentencePiece vocabulary lacks: <cls>, <sep>, <mask>, <pad>, <bos>, <eos>
    and then the sentinels, or, for models that come from Hugging Face, the sentinels first. The
    latter never saw <bos>: like all of Google's T5 their decoder starts with the padding token.
    """
    section, data = section_of(raw, "tokenizer"), section_of(raw, "data")
    converted = flag(section, "add_sentinel_tokens_first", False)
    ids = own_ids(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        sentinels = int(section.get("num_sentinel_tokens") or 0) if converted else 0
        ids = _appended(tokenizer, sentinels, least=0 if converted else 1)
    if converted or flag(data, "decoder_starts_with_pad", False):
        return TokenIds(ids.pad_id, ids.end_id, ids.pad_id)
    return ids


def _appended(tokenizer: SentencePieceTokenizer, sentinels: int, least: int) -> TokenIds:
    """Ids after NeMo's additions.

    sentinels: how many <extra_id_N> come before the other additions
    least:     the vocabulary's own id of a role counts only from here on
    """
    first = [f"<extra_id_{number}>" for number in range(sentinels)]
    added = sum(tokenizer.token_id(token) is None for token in (*first, *_UNUSED_TOKENS))
    top = tokenizer.vocab_size + added
    found: list[int] = []
    roles = (tokenizer.pad_id, "<pad>"), (tokenizer.start_id, "<bos>"), (tokenizer.end_id, "<eos>")
    for own, token in roles:
        known = own if own is not None and own >= least else tokenizer.token_id(token)
        found.append(top if known is None else known)
        top += known is None
    pad_id, start_id, end_id = found
    return TokenIds(start_id, end_id, pad_id)
