"""The training arguments of a Megatron-LM GPT, as hyperparameters.

Absent arguments have the defaults of the releases that did not know them. A checkpoint from
before there were arguments in it (version 0) is measured by its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.sources.core_options import (
    CORE_ALONE,
    nemo_dialects,
    of_arguments,
    read_gpt,
)
from launcher_scripts.checkpoint.sources.hints import Hints
from launcher_scripts.checkpoint.sources.shards import Shards
from launcher_scripts.common.errors import CheckpointError, Problems
from launcher_scripts.models.gpt import GPTConfig

# What the core's layers can do and these cannot.
_KNOWN_VALUES: dict[str, tuple[Any, ...]] = {
    **CORE_ALONE,
    "group_query_attention": (None, False),
    "qk_layernorm": (None, False),
}


@dataclass(frozen=True)
class MegatronArgs:
    """What the arguments say.

    dialects: dialects to look into, first choice first
    notes:    what a user should know about the model
    """

    config: GPTConfig
    dialects: tuple[str, ...] = ("nemo",)
    notes: tuple[str, ...] = ()


def read_args(args: Mapping[str, Any], shards: Shards, hints: Hints, origin: str) -> MegatronArgs:
    """Translate `args`; {} for a checkpoint without arguments.

    Raises CheckpointError with everything that is missing or cannot be represented.
    """
    vocab = sum(part.shape[0] for part in shards["embedding.word_embeddings.weight"])
    if not args:
        return _measured(shards, vocab, hints, Problems(origin))
    options = of_arguments(args, origin)
    gpt = read_gpt(options, _KNOWN_VALUES)
    dialects = nemo_dialects(gpt.fields["gated"], gpt.plus_one)
    return MegatronArgs(gpt.config(vocab), dialects, options.check_keys())


def _measured(shards: Shards, vocab: int, hints: Hints, problems: Problems) -> MegatronArgs:
    """A checkpoint without arguments: the number of heads alone leaves no trace in the tensors.

    The epsilon is FasterTransformer's.
    """
    positions = shards.get("embedding.position_embeddings.weight")
    up = shards.get("encoder.layers.0.mlp.dense_h_to_4h.weight")
    layers = {int(found[1]) for name in shards if (found := re.search(r"layers\.(\d+)\.", name))}
    if positions is None or up is None:
        problems.add("the position embeddings or the first MLP are missing")
        raise problems.error(CheckpointError)
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
