"""The training arguments of a Megatron-LM GPT, as hyperparameters.

Absent arguments have the defaults of the releases that did not know them. A checkpoint from
before there were arguments in it (version 0) is measured by its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.hints import Hints
from launcher_scripts.checkpoint.nemo_options import real, size
from launcher_scripts.checkpoint.shards import Shards
from launcher_scripts.errors import CheckpointError, Problems
from launcher_scripts.models.gpt import GPTConfig

# Arguments whose other values change the network in ways this project does not know.
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    "num_experts": (None,),
    "multi_query_attention": (None, False),
    "group_query_attention": (None, False),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "num_layers_per_virtual_pipeline_stage": (None,),
    "qk_layernorm": (None, False),
    "project_size": (None, 0),
}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


@dataclass(frozen=True)
class MegatronArgs:
    """What the arguments say.

    dialects: dialects to look into, here before "nemo"
    notes:    what a user should know about the model
    """

    config: GPTConfig
    dialects: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_args(args: Mapping[str, Any], shards: Shards, hints: Hints, origin: str) -> MegatronArgs:
    """Translate `args`; {} for a checkpoint without arguments.

    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    problems = Problems(origin)
    vocab = sum(part.shape[0] for part in shards["embedding.word_embeddings.weight"])
    if not args:
        return _measured(shards, vocab, hints, problems)
    for key, values in _KNOWN_VALUES.items():
        if args.get(key) not in values:
            problems.add(f"{key} is not supported", got=args[key], choices=values)
    heads = size(args, "num_attention_heads", problems)
    hidden = size(args, "hidden_size", problems)
    positions = args.get("position_embedding_type") or "learned_absolute"
    if args.get("use_rotary_position_embeddings"):
        positions = "rope"
    normalization = args.get("normalization") or "LayerNorm"
    for name, value, choices in (
        ("position_embedding_type", positions, _POSITIONS),
        ("normalization", normalization, _NORMALIZATIONS),
    ):
        if value not in choices:
            problems.add(f"{name} is not supported", got=value, choices=choices)
    problems.raise_if_any(CheckpointError)
    gated = bool(args.get("swiglu"))
    bias = args.get("add_bias_linear", True)
    epsilon = "norm_epsilon" if args.get("norm_epsilon") else "layernorm_epsilon"
    config = GPTConfig(
        vocab_size=vocab,
        num_layers=size(args, "num_layers", problems),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=size(args, "kv_channels", problems, hidden // heads),
        ffn_size=size(args, "ffn_hidden_size", problems, 4 * hidden),
        max_positions=size(args, "max_position_embeddings", problems),
        position_embedding=_POSITIONS[positions],
        rotary_percentage=real(args, "rotary_percent", 1.0, problems),
        rotary_base=real(args, "rotary_base", 10000.0, problems),
        normalization=_NORMALIZATIONS[normalization],
        norm_eps=real(args, epsilon, 1e-5, problems),
        activation=_activation(args),
        gated=gated,
        attention_bias=bias,
        mlp_bias=bias,
        tied_embeddings=not args.get("untie_embeddings_and_output_weights"),
    )
    problems.raise_if_any(CheckpointError)
    variants = ["nemo_fused_gate"] if gated else []
    if args.get("apply_layernorm_1p"):
        variants.append("nemo_plus_one")
    return MegatronArgs(config, tuple(variants))


def _measured(shards: Shards, vocab: int, hints: Hints, problems: Problems) -> MegatronArgs:
    """A checkpoint without arguments: the number of heads alone leaves no trace in the tensors.

    The epsilon is FasterTransformer's.
    """
    positions = shards.get("embedding.position_embeddings.weight")
    up = shards.get("encoder.layers.0.mlp.dense_h_to_4h.weight")
    layers = {int(found[1]) for name in shards if (found := re.search(r"layers\.(\d+)\.", name))}
    if positions is None or up is None:
        problems.add("the position embeddings or the first MLP are missing")
        problems.raise_if_any(CheckpointError)
    max_positions, hidden = positions[0].shape
    heads = hints.num_heads or 0
    if heads < 1 or hidden % heads:
        problems.add(
            "this version of Megatron-LM does not store the number of attention heads",
            got=hints.num_heads,
            choices=[f"a divisor of {hidden}"],
            change="export.model.num_attention_heads",
        )
    problems.raise_if_any(CheckpointError)
    config = GPTConfig(
        vocab_size=vocab,
        num_layers=len(layers),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_size=sum(part.shape[0] for part in up),
        max_positions=max_positions,
        norm_eps=1e-6,
    )
    return MegatronArgs(config)


def _activation(args: Mapping[str, Any]) -> str:
    """Megatron-LM's fused GELU and openai_gelu are the tanh form, torch's own is the exact one."""
    if args.get("swiglu"):
        return "silu"
    if args.get("squared_relu"):
        return "squared_relu"
    fused = args.get("bias_gelu_fusion", True)
    return "gelu" if fused or args.get("openai_gelu") else "gelu_erf"
