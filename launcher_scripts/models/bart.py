"""BART and its descendants: encoder-decoder transformers with a table of positions.

Names and shapes of the stored tensors follow the FasterTransformer fork that serves BART and mBART:
Hugging Face's names without `model.`, position tables from the first position on, word embeddings
already multiplied by sqrt(hidden_size) where the model does so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from launcher_scripts.common.errors import Problems
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.models.family import (
    FORK_ACTIVATIONS,
    ExpertsOfStacks,
    ModelConfig,
    Partition,
    Source,
    WeightSpec,
    stack_layers,
)

# The bias of a token that no text has: its probability is that of the likeliest times e^-100.
NEVER = -100.0


@dataclass(frozen=True)
class BartConfig(ExpertsOfStacks, ModelConfig):
    """Hyperparameters of a BART or Marian ("post" norms), or of an mBART, M2M-100 or Pegasus ("pre"
    norms and final ones).

    num_layers, num_heads and ffn_size are the encoder's. `activation` "gelu" is the tanh form.
    embedding_norm: the embeddings of both stacks are normalized
    Texts begin with forced_bos_id, where there is one, right after start_id.
    An NLLB-MoE has num_experts MLPs in the layers that encoder_expert_layers and
    decoder_expert_layers name. A token goes through experts_per_token of them, weighed by the
    softmax of their router's scores divided by the sum of theirs, times expert_scale.
    What has no type says in T5Config's words what every BART is, and so do the properties.
    """

    title = "BART"
    position_embedding = "learned"
    normalization = "layernorm"
    gated = encoder_only = False
    attention_softcap = logits_softcap = embedding_scale = rotary_base = None

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    num_decoder_layers: int
    num_decoder_heads: int
    decoder_ffn_size: int
    max_positions: int
    norm_placement: str = "post"
    norm_eps: float = 1e-5
    embedding_norm: bool = True
    activation: str = "gelu_erf"
    logits_bias: bool = True
    tied_embeddings: bool = True
    start_id: int = 2
    end_id: int = 2
    pad_id: int | None = 1
    forced_bos_id: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_scale: float | None = None
    router_bias: bool | None = None
    encoder_expert_layers: str | None = None
    decoder_expert_layers: str | None = None

    def check(self, problems: Problems) -> None:
        sizes = ("num_decoder_layers", "num_decoder_heads", "decoder_ffn_size", "max_positions")
        choices = {"norm_placement": ("pre", "post"), "activation": FORK_ACTIVATIONS}
        self.check_fields(problems, sizes, choices)
        self.check_expert_layers(problems)
        if (
            self.num_experts is not None
            and not 1 <= (self.experts_per_token or 0) <= self.num_experts
        ):
            problems.add(
                "experts_per_token must be from 1 to num_experts", got=self.experts_per_token
            )
        for name in ("num_heads", "num_decoder_heads"):
            self.check_divides(problems, name, "hidden_size")
        if self.forced_bos_id is not None and not 0 <= self.forced_bos_id < self.vocab_size:
            problems.add(
                "forced_bos_id (forced_bos_token_id) is not an id of the vocabulary",
                got=self.forced_bos_id,
                choices=(f"0-{self.vocab_size - 1}",),
            )

    @property
    def qkv_size(self) -> int:
        return 3 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Size of the encoder's heads."""
        return self.hidden_size // self.num_heads

    @property
    def attention_scale(self) -> float:
        return float(self.head_size**-0.5)

    def encoder_window(self, layer: int) -> int:
        return self.window(layer)

    @property
    def decoder_head_size(self) -> int:
        return self.hidden_size // self.num_decoder_heads

    @property
    def decoder_attention_scale(self) -> float:
        return float(self.decoder_head_size**-0.5)

    @property
    def kv_heads(self) -> int:
        return self.num_heads

    @property
    def decoder_kv_heads(self) -> int:
        return self.num_decoder_heads

    def tp_sizes(self) -> list[int]:
        heads = gcd(self.num_heads, self.num_decoder_heads)
        return divisors(gcd(heads, self.ffn_size, self.decoder_ffn_size))


def weights(config: BartConfig) -> list[WeightSpec]:
    """One row per tensor; dialect "bart", and others for a model that says something else:

    "bart_scaled":            embeddings are scaled
    "bart_whole_positions":   the first row is the first position's
    "bart_sinusoids":         Marian's and Pegasus' positions are not stored
    "bart_fairseq_sinusoids": nor are M2M-100's
    "bart_unpadded":          no text has the padding token, although the tensors do not say so
    "bart_experts":           an NLLB-MoE's names
    """
    table = ("vocab_size", "hidden_size")
    head = "shared.weight" if config.tied_embeddings else "lm_head.weight"
    specs = [
        _row(
            "shared.weight",
            table,
            Partition.VOCAB_PARALLEL,
            {
                "bart": Source(("shared.weight",)),
                "bart_scaled": Source(("shared.weight",), "scaled_by_root_hidden"),
            },
        ),
        _row("lm_head.weight", table, Partition.VOCAB_PARALLEL, {"bart": Source((head,))}),
    ]
    if config.logits_bias:
        names, width = ("final_logits_bias",), ("vocab_size",)
        bias = {
            "bart": Source(names, "flattened"),
            "bart_unpadded": Source(names, "flattened_without_padding"),
        }
        specs.append(_row(*names, width, Partition.VOCAB_PARALLEL, bias))
    for side in ("encoder", "decoder"):
        names = (f"{side}.embed_positions.weight",)
        positions = {
            "bart": Source(names, "without_padding_rows"),
            "bart_whole_positions": Source(names),
            "bart_sinusoids": Source((), "sinusoids"),
            "bart_fairseq_sinusoids": Source((), "fairseq_sinusoids"),
        }
        specs.append(_row(*names, ("max_positions", "hidden_size"), source=positions))
        if config.embedding_norm:
            specs += _norm(f"{side}.layernorm_embedding")
        if config.norm_placement == "pre":
            specs += _norm(f"{side}.layer_norm")
    return specs + _layer(config, "encoder") + _layer(config, "decoder")


def _layer(config: BartConfig, side: str) -> list[WeightSpec]:
    stem = f"{side}.layers.*"
    attention = f"{stem}.self_attn"
    specs = []
    if side == "encoder":
        for part in "qkv":
            specs += _linear(f"{attention}.{part}_proj", ("hidden_size", "hidden_size"))
    else:
        for part in ("weight", "bias"):
            keys = tuple(f"{attention}.{which}_proj.{part}" for which in "qkv")
            shape = ("hidden_size", "qkv_size") if part == "weight" else ("qkv_size",)
            source = {"bart": Source(keys, "transposed_columns")}
            column, blocks = Partition.COLUMN_PARALLEL, ("hidden_size",) * 3
            specs.append(_row(f"{attention}.qkv.{part}", shape, column, source, blocks))
    specs += _output(f"{attention}.out_proj") + _norm(f"{stem}.self_attn_layer_norm")
    if side == "decoder":
        for part in "qkv":
            specs += _linear(f"{stem}.encoder_attn.{part}_proj", ("hidden_size", "hidden_size"))
        specs += _output(f"{stem}.encoder_attn.out_proj") + _norm(f"{stem}.encoder_attn_layer_norm")
    width = "ffn_size" if side == "encoder" else "decoder_ffn_size"
    specs += _norm(f"{stem}.final_layer_norm")
    if config.num_experts is None:
        return specs + _mlp(stem, width)
    mlps = [replace(spec, only=f"{side}_is_dense") for spec in _mlp(stem, width)]
    experts = [
        spec
        for expert in range(config.num_experts)
        for spec in _mlp(f"{stem}.experts.{expert}", width)
    ]
    router = f"{stem}.router"
    experts.append(
        _row(
            f"{router}.weight",
            ("hidden_size", "num_experts"),
            source={"bart": Source((f"{router}.weight",), "transposed")},
        )
    )
    if config.router_bias:
        experts.append(_row(f"{router}.bias", ("num_experts",)))
    mlps += [replace(spec, only=f"{side}_has_experts") for spec in experts]
    return [_of_experts(spec) for spec in specs + mlps]


def _mlp(stem: str, width: str) -> list[WeightSpec]:
    return _linear(f"{stem}.fc1", ("hidden_size", width)) + _output(f"{stem}.fc2", width)


# Parts of names: the BARTs', and those of an NLLB-MoE.
_EXPERT_NAMES = (
    ("encoder_attn", "cross_attention"),
    ("final_layer_norm", "ff_layer_norm"),
    (".fc", ".ffn.fc"),
    (".experts.", ".ffn.experts.expert_"),
    (".router.", ".ffn.router.classifier."),
)


def _of_experts(spec: WeightSpec) -> WeightSpec:
    """The row with the dialect "bart_experts"."""
    source = spec.sources["bart"]

    def renamed(key: str) -> str:
        for old, new in _EXPERT_NAMES:
            key = key if ".experts." in key and old == ".fc" else key.replace(old, new)
        return key

    keys = tuple(map(renamed, source.keys))
    return replace(spec, sources={**spec.sources, "bart_experts": Source(keys, source.layout)})


def _linear(stem: str, shape: tuple[str, str]) -> list[WeightSpec]:
    """A linear layer whose outputs the ranks share."""
    column = Partition.COLUMN_PARALLEL
    return [_row(f"{stem}.weight", shape, column), _row(f"{stem}.bias", shape[1:], column)]


def _output(stem: str, width: str = "hidden_size") -> list[WeightSpec]:
    """A linear layer whose inputs the ranks share; its bias is added once."""
    shape = (width, "hidden_size")
    return [_row(f"{stem}.weight", shape, Partition.ROW_PARALLEL), _row(f"{stem}.bias", shape[1:])]


def _norm(stem: str) -> list[WeightSpec]:
    return [_row(f"{stem}.{part}", ("hidden_size",)) for part in ("weight", "bias")]


def _row(
    name: str,
    shape: tuple[str, ...],
    partition: Partition = Partition.REPLICATED,
    source: Mapping[str, Source] | None = None,
    blocks: tuple[str, ...] = (),
) -> WeightSpec:
    """A tensor; without a source, of the same name there, transposed where ranks share a matrix."""
    layout = "transposed" if partition.per_rank else "as_is"
    source = source or {"bart": Source((name,), layout)}
    layers = stack_layers(name)
    return WeightSpec(name, shape, partition, blocks, source, layers=layers, prefix="")
