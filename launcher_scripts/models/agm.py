"""Agm: the decoder derived from AlexaTM that one FasterTransformer fork serves.

Decoder-only: layer norms before attention and MLP, no biases in attention, a T5-style relative
bias table in every layer. Names and shapes follow that fork's checkpoint, with the relative bias
in one file per rank, as its loader opens it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from launcher_scripts.common.errors import Problems
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.models.family import (
    FORK_ACTIVATIONS,
    ModelConfig,
    Partition,
    Source,
    WeightSpec,
)


@dataclass(frozen=True)
class AgmConfig(ModelConfig):
    """Hyperparameters of an Agm.

    Attention scores are q.k * attention_scale + the layer's relative bias; buckets look backwards
    only. `activation` "gelu" is the tanh form. What has no type says in GPTConfig's words what
    every Agm is.
    """

    title = "Agm"
    position_embedding = "relative"
    normalization = "layernorm"
    norm_placement = "pre"
    gated = False
    alibi_layer_scaling = False
    parallel_residual = rotary_local_base = attention_softcap = alibi_scale = None
    embedding_scale = logits_scale = logits_softcap = None

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    num_buckets: int = 32
    max_distance: int = 128
    attention_scale: float = 1.0
    norm_eps: float = 1e-5
    activation: str = "gelu_erf"
    logits_bias: bool = True
    tied_embeddings: bool = True
    start_id: int = 2
    end_id: int = 2
    pad_id: int | None = 1

    def check(self, problems: Problems) -> None:
        self.check_fields(
            problems, ("num_buckets", "max_distance"), {"activation": FORK_ACTIVATIONS}
        )
        self.check_divides(problems, "num_heads", "hidden_size")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def qkv_size(self) -> int:
        return 3 * self.hidden_size

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    def tp_sizes(self) -> list[int]:
        return divisors(gcd(self.num_heads, self.ffn_size))


def weights(config: AgmConfig) -> list[WeightSpec]:
    """One row per tensor of an Agm; keys as in its state dict without `model.`."""
    table, hidden = ("vocab_size", "hidden_size"), ("hidden_size",)
    layer, attention = "decoder.layers.*", "decoder.layers.*.self_attn"
    vocab, column, row = (
        Partition.VOCAB_PARALLEL,
        Partition.COLUMN_PARALLEL,
        Partition.ROW_PARALLEL,
    )
    head = "shared.weight" if config.tied_embeddings else "lm_head.decoder.weight"
    specs = [
        _row("shared.weight", table, vocab),
        _row("lm_head.decoder.weight", table, vocab, Source((head,))),
    ]
    if config.logits_bias:
        bias = Source(("final_logits_bias",), "flattened")
        specs.append(_row("final_logits_bias", ("vocab_size",), vocab, bias))
    for norm in ("decoder.layernorm_output", f"{layer}.self_attn_layer_norm"):
        specs += [_row(f"{norm}.{part}", hidden) for part in ("weight", "bias")]
    queries = tuple(f"{attention}.{part}.weight" for part in "qkv")
    return [
        *specs,
        WeightSpec(
            f"{attention}.qkv.weight",
            ("hidden_size", "qkv_size"),
            column,
            ("hidden_size",) * 3,
            {"agm": Source(queries, "transposed_columns")},
            prefix="",
        ),
        _row(f"{attention}.o.weight", ("hidden_size", "hidden_size"), row),
        _row(f"{attention}.relative_attention_bias.weight", ("num_heads", "num_buckets"), row),
        _row(f"{layer}.final_layer_norm.weight", hidden),
        _row(f"{layer}.final_layer_norm.bias", hidden),
        _row(f"{layer}.fc1.weight", ("hidden_size", "ffn_size"), column),
        _row(f"{layer}.fc1.bias", ("ffn_size",), column),
        _row(f"{layer}.fc2.weight", ("ffn_size", "hidden_size"), row),
        _row(f"{layer}.fc2.bias", hidden),
    ]


def _row(
    name: str,
    shape: tuple[str, ...],
    partition: Partition = Partition.REPLICATED,
    source: Source | None = None,
) -> WeightSpec:
    """A tensor of the same name in the source, transposed where the ranks share a matrix."""
    layout = "transposed" if partition.per_rank else "as_is"
    return WeightSpec(
        name, shape, partition, sources={"agm": source or Source((name,), layout)}, prefix=""
    )
