"""A T5 of Megatron-LM core: its tensors under the names of NeMo's T5, and its hyperparameters.

The core stores the same matrices as NeMo's classic T5, rows in the same order, under names of its
own and with the norms beside the projections that follow them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import T5_TABLE, TABLE, renamed
from launcher_scripts.checkpoint.sources.core_options import CORE_ONLY, CoreOptions
from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.models.gpt_nemo import nemo_dialects
from launcher_scripts.models.t5 import T5Config

_RELATIVE = "encoder_relative_position_embedding.relative_position_embedding.weight"
Named = TypeVar("Named")
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.+)")
# What is stored twice: the first name stays.
_COPIES = ("position_embeddings.weight", "output_layer.bias")
_NAMES = {
    TABLE: T5_TABLE,
    "embedding.position_embeddings.weight": "encoder_embedding.position_embeddings.weight",
    "encoder_relative_pos_emb.relative_attention_bias.weight": _RELATIVE,
    "decoder_relative_pos_emb.relative_attention_bias.weight": _RELATIVE.replace("en", "de", 1),
    "lm_head.output_layer.bias": "tokens_head.bias",
    "output_layer.weight": "tokens_head.weight",
}
# Within a layer, longer ones first.
_PARTS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "pre_cross_attn_layernorm.": "post_attention_layernorm.",
    "cross_attention.linear_q.": "inter_attention.query.",
    "cross_attention.linear_kv.": "inter_attention.key_value.",
    "cross_attention.linear_proj.": "inter_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
_MLP_NORM = "mlp.linear_fc1.layer_norm_"
_MLP_NORMS = {"encoder": "post_attention_layernorm.", "decoder": "post_inter_attention_layernorm."}


def is_t5(names: Mapping[str, Any]) -> bool:
    """Return whether there is an encoder."""
    return any(name.startswith("encoder.layers.") for name in names)


def nemo_names(tensors: Mapping[str, Named], origin: str) -> dict[str, Named]:
    """The tensors under NeMo's names, without what is stored twice.

    origin: where they are from, for errors
    """
    named = ((name, _nemo_name(name), tensor) for name, tensor in tensors.items())
    return renamed((item for item in named if item[0] not in _COPIES), origin)


def _nemo_name(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        final = re.sub(r"^(encoder|decoder)\.final_layernorm\.", r"\1.model.final_layernorm.", name)
        return _NAMES.get(name, final)
    side, layer, part = match.groups()
    for core, nemo in {_MLP_NORM: _MLP_NORMS[side], **_PARTS}.items():
        if part.startswith(core):
            part = nemo + part.removeprefix(core)
            break
    return f"{side}.model.layers.{layer}.{part}"


def read_core_t5(
    options: CoreOptions, tensors: Mapping[str, SourceTensor]
) -> tuple[T5Config, tuple[str, ...]]:
    """Hyperparameters, and dialects of the weight table, of tensors under NeMo's names.

    How deep both stacks are and which positions they have is read off the tensors: trainings swap
    the two counts. Raises CheckpointError with everything that cannot be represented.
    """
    heads, hidden = options.size("num_attention_heads"), options.size("hidden_size")
    options.reject_unknown({**CORE_ONLY, "num_query_groups": (None, 0, heads)})
    normalization, activation = options.normalization(), options.activation()
    head_size = options.size("kv_channels", max(hidden // heads, 1))
    ffn_size = options.size("ffn_hidden_size", 4 * hidden)
    norm_eps = options.real("layernorm_epsilon", 1e-5)
    gated = options.flag("gated_linear_unit", False)
    learned = tensors.get("encoder_embedding.position_embeddings.weight")
    relative = {} if _RELATIVE not in tensors else _buckets(options, tensors[_RELATIVE])
    options.problems.raise_if_any(CheckpointError)
    config = T5Config(
        vocab_size=tensors[T5_TABLE].shape[0],
        num_layers=_depth(tensors, "encoder"),
        num_decoder_layers=_depth(tensors, "decoder"),
        hidden_size=hidden,
        num_heads=heads,
        head_size=head_size,
        ffn_size=ffn_size,
        position_embedding="relative" if relative else "learned",
        max_positions=512 if learned is None else learned.shape[0],
        **relative,
        normalization=normalization,
        norm_eps=norm_eps,
        activation=activation,
        gated=gated,
        bias=options.flag("add_bias_linear", True),
        attention_scale=head_size**-0.5,
        logits_bias="tokens_head.bias" in tensors,
        tied_embeddings=options.tied_embeddings,
    )
    return config, nemo_dialects(fused=gated, plus_one=options.plus_one)


def _buckets(options: CoreOptions, table: SourceTensor) -> dict[str, Any]:
    """Return the fields for a table of biases [buckets, heads]."""
    distance = options.size("relative_attention_max_distance", 128)
    return {"num_buckets": table.shape[0], "max_distance": distance}


def _depth(tensors: Mapping[str, SourceTensor], side: str) -> int:
    matches = (re.match(rf"{side}\.model\.layers\.(\d+)\.", name) for name in tensors)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)
