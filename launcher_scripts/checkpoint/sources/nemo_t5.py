"""model_config.yaml of a NeMo T5 or mT5: its hyperparameters, its dialect and its token ids.

Both stacks are described by sections of their own, `encoder` and `decoder`, since NeMo 1.10, and by
the file's own keys before. Absent keys take NeMo's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher_scripts.checkpoint.formats.nemo_config import section
from launcher_scripts.checkpoint.sources.nemo_gpt import (
    ACTIVATIONS,
    NORMALIZATIONS,
    NemoModel,
    gelu,
)
from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import TokenIds, own_ids
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.tokenizer import SentencePieceTokenizer, Tokenizer
from launcher_scripts.models.gpt_nemo import nemo_dialects

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


def read_t5(options: TrainingOptions) -> NemoModel:
    """Translate `options`; raises CheckpointError with everything that cannot be represented."""
    sections = [options.section(name) for name in ("encoder", "decoder")]
    encoder, decoder = map(_read_stack, sections)
    for key in _COMMON:
        found = (encoder[key], decoder[key])
        if found[0] != found[1]:
            options.problems.add(f"encoder and decoder differ in {key}", got=found)
    length = "max_position_embeddings" if options.get("max_position_embeddings") else "seq_length"
    max_positions = options.size(length, 512)
    options.problems.raise_if_any(CheckpointError)
    relative = decoder["position_embedding"] == "relative"
    own_only = sections[1].flag("relative_position_bias_self_attention_only", True)
    fields = {key: encoder[key] for key in _COMMON if key != "dialects"} | {
        "num_layers": encoder["num_layers"],
        "num_decoder_layers": decoder["num_layers"],
        "max_positions": max_positions,
        "cross_attention_relative_bias": relative and not own_only,
        "logits_bias": options.flag("tokens_head_bias", True),
        "tied_embeddings": options.flag("share_decoder_tokens_head_embeddings", True),
        "shared_embeddings": options.flag("share_token_embeddings", True),
    }
    return NemoModel(fields, encoder["dialects"])


def _read_stack(options: TrainingOptions) -> dict[str, Any]:
    """One stack's hyperparameters, with its own `dialects`."""
    options.refuse_others(_KNOWN_VALUES)
    function, gated = options.choice("activation", "gelu", ACTIVATIONS)
    heads = options.size("num_attention_heads")
    hidden = options.size("hidden_size")
    head_size = options.size("kv_channels", hidden // heads)
    positions = options.choice("position_embedding_type", "learned_absolute", POSITIONS)
    relative = positions == "relative"
    scaled = options.flag("normalize_attention_scores", True)
    return {
        "dialects": nemo_dialects(
            fused=str(options.get("activation") or "").startswith("fast-"),
            legacy=options.flag("megatron_legacy", False),
            plus_one=str(options.get("normalization") or "").lower() == "layernorm1p",
        ),
        "num_layers": options.size("num_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "head_size": head_size,
        "ffn_size": options.size("ffn_hidden_size", 4 * hidden),
        "position_embedding": positions,
        "num_buckets": options.size("relative_attention_num_buckets", 32),
        "max_distance": options.size("relative_attention_max_distance", 128),
        "relative_bias_layer_scaling": relative
        and options.flag("apply_query_key_layer_scaling", True),
        "normalization": options.choice("normalization", "layernorm", NORMALIZATIONS),
        "norm_eps": options.real("layernorm_epsilon", 1e-5),
        "activation": gelu(options) if function == "gelu" else function,
        "gated": gated,
        "bias": options.flag("bias", True),
        "attention_scale": head_size**-0.5 if scaled else 1.0,
    }


def t5_token_ids(raw: Mapping[str, Any], tokenizer: Tokenizer) -> TokenIds:
    """The ids that NeMo's T5 gives start, end and padding with this tokenizer.

    NeMo appends what a SentencePiece vocabulary lacks: <cls>, <sep>, <mask>, <pad>, <bos>, <eos>
    and then the sentinels, or, for models that come from Hugging Face, the sentinels first. The
    latter never saw <bos>: like all of Google's T5 their decoder starts with the padding token.
    """
    said = section(raw, "tokenizer")
    converted = bool(said.get("add_sentinel_tokens_first"))
    ids = own_ids(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        sentinels = int(said.get("num_sentinel_tokens") or 0) if converted else 0
        ids = _appended(tokenizer, sentinels, least=0 if converted else 1)
    if converted or section(raw, "data").get("decoder_starts_with_pad"):
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
