"""What mixes a GPT's tokens besides attention, as hyperparameters and rows of weights.

Mamba-2 (arXiv:2405.21060), the gated delta net (arXiv:2412.06464) and gated short convolutions, as
the hybrids of today have them between layers with attention.

Where the tensors of hybrids lie in Hugging Face's checkpoints; see gpt_dialects.py.

Layers of these have Mamba-2, a gated delta net or a short convolution instead of attention, or
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

from launcher_scripts.common.errors import Problems
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.models.family import Partition, Source

# The gated norm: of what the gate has multiplied, before the gate multiplies, or none.
GATED_NORMS = ("gated", "before_gate", "none")
# Rows that sum to the vector; see gpt_dialects.EXPERT_BIAS.
SUMMANDS = "3"


@dataclass(frozen=True, kw_only=True)
class MixerSizes:
    """Hyperparameters of the branches of layer_branches that keep a state of a fixed size.

    A convolution over the last conv_kernel tokens comes first, with a bias if conv_bias says so.
    mamba_num_heads heads of mamba_head_size have states of mamba_state_size columns; the heads of
    each of mamba_num_groups groups share B and C. Time steps are clamped from mamba_min_step to
    mamba_max_step, where they are said. mamba_norm is one of GATED_NORMS, over the channels of a
    group, with mixer_norm_eps where it is not norm_eps; mamba_bias is of both projections.

    delta_num_heads heads of delta_value_head_size share delta_num_key_heads queries and keys of
    delta_key_head_size. Of kimi_delta (arXiv:2510.26692), whose keys decay each at a rate of its
    own, all these are as many and of one size.

    The scales multiply what their projections make: of queries, keys and values; of what attention
    adds; of z, x, B, C and dt; of what Mamba adds; of an MLP's gate, and of what it adds.
    """

    conv_kernel: int | None = None
    conv_bias: bool | None = None
    mamba_num_heads: int | None = None
    mamba_head_size: int | None = None
    mamba_state_size: int | None = None
    mamba_num_groups: int | None = None
    mamba_min_step: float | None = None
    mamba_max_step: float | None = None
    mamba_norm: str | None = None
    mamba_bias: bool | None = None
    mixer_norm_eps: float | None = None
    delta_num_heads: int | None = None
    delta_num_key_heads: int | None = None
    delta_key_head_size: int | None = None
    delta_value_head_size: int | None = None
    query_key_value_scales: str | None = None
    attention_output_scale: float | None = None
    mamba_input_scales: str | None = None
    mamba_output_scale: float | None = None
    mlp_gate_scale: float | None = None
    mlp_output_scale: float | None = None

    @property
    def mamba_inner_size(self) -> int:
        return (self.mamba_num_heads or 0) * (self.mamba_head_size or 0)

    @property
    def mamba_group_size(self) -> int:
        """B or C of all groups."""
        return (self.mamba_num_groups or 0) * (self.mamba_state_size or 0)

    @property
    def mamba_conv_size(self) -> int:
        return self.mamba_inner_size + 2 * self.mamba_group_size

    @property
    def mamba_in_size(self) -> int:
        return self.mamba_inner_size + self.mamba_conv_size + (self.mamba_num_heads or 0)

    @property
    def delta_key_size(self) -> int:
        return (self.delta_num_key_heads or 0) * (self.delta_key_head_size or 0)

    @property
    def delta_value_size(self) -> int:
        return (self.delta_num_heads or 0) * (self.delta_value_head_size or 0)

    @property
    def delta_conv_size(self) -> int:
        return 2 * self.delta_key_size + self.delta_value_size

    @property
    def delta_in_size(self) -> int:
        return self.delta_conv_size + self.delta_value_size + 2 * (self.delta_num_heads or 0)

    @property
    def kimi_in_size(self) -> int:
        return self.delta_conv_size + (self.delta_num_heads or 0)

    @property
    def short_conv_in_size(self) -> int:
        return 3 * int(getattr(self, "hidden_size", 0))


# Blocks of what the first projections make.
MAMBA_IN = (
    *("mamba_inner_size", "mamba_inner_size", "mamba_group_size", "mamba_group_size"),
    "mamba_num_heads",
)
DELTA_IN = (
    *("delta_key_size", "delta_key_size", "delta_value_size", "delta_value_size"),
    *("delta_num_heads", "delta_num_heads"),
)
KIMI_IN = (*DELTA_IN[:3], "delta_num_heads")
SHORT_CONV_IN = ("hidden_size", "hidden_size", "hidden_size")
# A split axis that is made of others -> those.
_SUMS = {
    "mamba_conv_size": MAMBA_IN[1:4],
    "mamba_in_size": MAMBA_IN,
    "delta_conv_size": DELTA_IN[:3],
    "delta_in_size": DELTA_IN,
    "kimi_in_size": KIMI_IN,
    "short_conv_in_size": SHORT_CONV_IN,
}
# A split axis whose units are copied to ranks that outnumber them -> how many units it has, and the
# heads that share them.
COPIED = {
    "mamba_group_size": ("mamba_num_groups", "mamba_num_heads"),
    "mamba_num_groups": ("mamba_num_groups", "mamba_num_heads"),
    "delta_key_size": ("delta_num_key_heads", "delta_num_heads"),
    "delta_num_key_heads": ("delta_num_key_heads", "delta_num_heads"),
}
# A split axis -> the size of its units.
UNITS = {"mamba_group_size": "mamba_state_size", "delta_key_size": "delta_key_head_size"}


def local_size(config: Any, axis: str, tp_size: int) -> int | None:
    """ModelConfig.local_size of an axis of these branches; None for another."""
    if axis in _SUMS:
        return sum(int(config.local_size(part, tp_size)) for part in _SUMS[axis])
    if axis not in COPIED:
        return None
    units, heads = (getattr(config, name) for name in COPIED[axis])
    copies = next(n for n in divisors(heads // units) if units * n % tp_size == 0)
    return int(getattr(config, axis)) * copies // tp_size


def tp_numbers(config: Any) -> int:
    """A number that the tensor-parallel sizes divide; 0 where any size does."""
    numbers = [0]
    if config.mamba_num_heads:
        numbers.append(config.mamba_num_heads)
    if config.delta_num_heads:
        numbers.append(config.delta_num_heads)
    if "short_conv" in (config.layer_branches or ""):
        numbers.append(config.hidden_size)
    return gcd(*numbers)


_NEEDED = {
    "mamba2": (
        *("conv_kernel", "mamba_num_heads", "mamba_head_size", "mamba_state_size"),
        "mamba_num_groups",
    ),
    "gated_delta": (
        *("conv_kernel", "delta_num_heads", "delta_num_key_heads", "delta_key_head_size"),
        "delta_value_head_size",
    ),
    "short_conv": ("conv_kernel",),
}
_NEEDED["kimi_delta"] = _NEEDED["gated_delta"]
SCALES = {"query_key_value_scales": 3, "mamba_input_scales": 5}


def check(config: Any, problems: Problems, kinds: set[str]) -> None:
    """Note sizes that the branches of such kinds need and do not have."""
    for kind in sorted(kinds & _NEEDED.keys()):
        for name in _NEEDED[kind]:
            if (getattr(config, name) or 0) < 1:
                problems.add(f"{kind} in layer_branches needs {name}", got=getattr(config, name))
    for part, request in (
        ("mamba_num_groups", "mamba_num_heads"),
        ("delta_num_key_heads", "delta_num_heads"),
    ):
        if not problems.messages and getattr(config, part) is not None:
            config.check_divides(problems, part, request)
    if config.mamba_norm is not None:
        problems.check_choice("mamba_norm", config.mamba_norm, GATED_NORMS)
    for name, count in SCALES.items():
        scales = getattr(config, name)
        if scales is not None and len(scales.split(",")) != count:
            problems.add(f"{name} must be {count} numbers with commas between them", got=scales)


class Linears(Protocol):
    """Rows of a projection's weight and bias, by name; see gpt.py."""

    def __call__(
        self,
        name: str,
        shape: tuple[str, str],
        partition: Partition,
        *,
        bias: bool,
        blocks: tuple[str, ...] = (),
    ) -> list[Any]: ...


def weights(config: Any, kind: str, linear: Linears, spec: Any) -> list[Any]:
    """The rows of a branch's weights."""
    rows = {"mamba2": _mamba2, "gated_delta": _gated_delta, "kimi_delta": _kimi_delta}
    return rows.get(kind, _short_conv)(config, linear, spec)


def _mamba2(config: Any, linear: Linears, spec: Any) -> list[Any]:
    stem, column, bias = "layers.*.mamba", Partition.COLUMN_PARALLEL, bool(config.mamba_bias)
    inner, heads, conv = "mamba_inner_size", "mamba_num_heads", MAMBA_IN[1:4]
    specs = linear(
        f"{stem}.in_proj",
        ("hidden_size", "mamba_in_size"),
        column,
        bias=bias,
        blocks=MAMBA_IN,
    )
    specs += linear(
        f"{stem}.conv",
        ("conv_kernel", "mamba_conv_size"),
        column,
        bias=bool(config.conv_bias),
        blocks=conv,
    )
    for name in ("dt_bias", "A_log", "D"):
        specs.append(spec(f"{stem}.{name}", (SUMMANDS, heads), column))
    if config.mamba_norm != "none":
        specs.append(spec(f"{stem}.norm.weight", (inner,), column))
    return specs + linear(
        f"{stem}.out_proj", (inner, "hidden_size"), Partition.ROW_PARALLEL, bias=bias
    )


def _gated_delta(_config: Any, linear: Linears, spec: Any) -> list[Any]:
    stem, column = "layers.*.delta", Partition.COLUMN_PARALLEL
    value, heads, conv = "delta_value_size", "delta_num_heads", DELTA_IN[:3]
    specs = linear(
        f"{stem}.in_proj",
        ("hidden_size", "delta_in_size"),
        column,
        bias=False,
        blocks=DELTA_IN,
    )
    shape = ("conv_kernel", "delta_conv_size")
    specs += linear(f"{stem}.conv", shape, column, bias=False, blocks=conv)
    specs += [spec(f"{stem}.{name}", (SUMMANDS, heads), column) for name in ("dt_bias", "A_log")]
    specs.append(spec(f"{stem}.norm.weight", ("delta_value_head_size",)))
    return specs + linear(
        f"{stem}.out_proj", (value, "hidden_size"), Partition.ROW_PARALLEL, bias=False
    )


def _kimi_delta(_config: Any, linear: Linears, spec: Any) -> list[Any]:
    """Decays and gates come of two projections each, through as many numbers as a head has."""
    stem, column = "layers.*.kimi_delta", Partition.COLUMN_PARALLEL
    key, value, size = "delta_key_size", "delta_value_size", "delta_key_head_size"
    shape = ("hidden_size", "kimi_in_size")
    specs = linear(f"{stem}.in_proj", shape, column, bias=False, blocks=KIMI_IN)
    shape = ("conv_kernel", "delta_conv_size")
    specs += linear(f"{stem}.conv", shape, column, bias=False, blocks=DELTA_IN[:3])
    for name, width in (("decay", key), ("gate", value)):
        down = ("hidden_size", size)
        specs += linear(f"{stem}.{name}_down", down, Partition.REPLICATED, bias=False)
        specs += linear(f"{stem}.{name}_up", (size, width), column, bias=False)
    specs.append(spec(f"{stem}.dt_bias", (SUMMANDS, key), column))
    specs.append(spec(f"{stem}.A_log", (SUMMANDS, "delta_num_heads"), column))
    specs.append(spec(f"{stem}.norm.weight", ("delta_value_head_size",)))
    return specs + linear(
        f"{stem}.out_proj", (value, "hidden_size"), Partition.ROW_PARALLEL, bias=False
    )


def _short_conv(config: Any, linear: Linears, _spec: Any) -> list[Any]:
    stem, column, bias = "layers.*.short_conv", Partition.COLUMN_PARALLEL, bool(config.conv_bias)
    hidden = "hidden_size"
    specs = linear(
        f"{stem}.in_proj",
        (hidden, "short_conv_in_size"),
        column,
        bias=bias,
        blocks=SHORT_CONV_IN,
    )
    specs += linear(f"{stem}.conv", ("conv_kernel", hidden), column, bias=bias)
    return specs + linear(f"{stem}.out_proj", (hidden, hidden), Partition.ROW_PARALLEL, bias=bias)


_EXPERT_BIAS = "layers.*.mlp.router.expert_bias"


def _attention(stem: str, out: str) -> dict[str, Source]:
    """Queries, keys and values, and the output projection."""
    return {
        "layers.*.attention.query_key_value": Source(
            tuple(f"{stem}.{part}_proj" for part in "qkv"), "heads_side_by_side"
        ),
        "layers.*.attention.dense": Source((f"{stem}.{out}",), "transposed"),
    }


def _mamba(stem: str) -> dict[str, Source]:
    """A branch of Mamba-2."""
    vectors = {
        f"layers.*.mamba.{name}": Source((f"{stem}.{name}",), "summands")
        for name in ("A_log", "dt_bias", "D")
    }
    return vectors | {
        "layers.*.mamba.in_proj": Source((f"{stem}.in_proj",), "transposed"),
        "layers.*.mamba.conv": Source((f"{stem}.conv1d",), "conv_taps"),
        "layers.*.mamba.norm": Source((f"{stem}.norm",)),
        "layers.*.mamba.out_proj": Source((f"{stem}.out_proj",), "transposed"),
    }


def _delta(stem: str, in_projs: tuple[str, ...], layout: str) -> dict[str, Source]:
    """A gated delta net."""
    return {
        "layers.*.delta.in_proj": Source(tuple(f"{stem}.{name}" for name in in_projs), layout),
        "layers.*.delta.conv": Source((f"{stem}.conv1d",), "conv_taps"),
        "layers.*.delta.A_log": Source((f"{stem}.A_log",), "summands"),
        "layers.*.delta.dt_bias": Source((f"{stem}.dt_bias",), "summands"),
        "layers.*.delta.norm": Source((f"{stem}.norm",)),
        "layers.*.delta.out_proj": Source((f"{stem}.out_proj",), "transposed"),
    }


def _mlp(served: str, reference: str, **names: str) -> dict[str, Source]:
    return {
        f"layers.*.mlp.{served}{name}": Source((f"{reference}.{key}",), "transposed")
        for name, key in names.items()
    }


_GATED = {
    "dense_h_to_4h": "gate_proj",
    "dense_h_to_4h_2": "up_proj",
    "dense_4h_to_h": "down_proj",
}
_PLAIN = {"dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
_MIXER = "layers.*.mixer"
NEMOTRON_H = {
    "wte": Source(("embeddings.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "final_layernorm": Source(("norm_f",)),
    "layers.*.input_layernorm": Source(("layers.*.norm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.norm",)),
    **_attention(_MIXER, "o_proj"),
    **_mamba(_MIXER),
    **_mlp("", _MIXER, **_PLAIN),
    **_mlp("shared_expert.", f"{_MIXER}.shared_experts", **_PLAIN),
    **_mlp("experts.#.", f"{_MIXER}.experts.#", **_PLAIN),
    "layers.*.mlp.router": Source((f"{_MIXER}.gate",), "transposed"),
    _EXPERT_BIAS: Source((f"{_MIXER}.gate.e_score_correction_bias",), "summands"),
    "layers.*.mlp.latent_in": Source((f"{_MIXER}.fc1_latent_proj",), "transposed"),
    "layers.*.mlp.latent_out": Source((f"{_MIXER}.fc2_latent_proj",), "transposed"),
}
_MAMBA = _mamba("layers.*.mamba")
BAMBA = {
    **_MAMBA,
    "final_layernorm": Source(("final_layernorm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.pre_ff_layernorm",)),
    **_mlp("", "layers.*.feed_forward", **_GATED),
}
# Of a Granite without experts, what would be a shared one is the MLP.
GRANITE_DENSE = {
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.shared_mlp.input_linear",), "first_half"),
    "layers.*.mlp.dense_h_to_4h_2": Source(("layers.*.shared_mlp.input_linear",), "second_half"),
    "layers.*.mlp.dense_4h_to_h": Source(("layers.*.shared_mlp.output_linear",), "transposed"),
}
_LINEAR = "layers.*.linear_attn"
_QUERY = "layers.*.self_attn.q_proj"
GATED_ATTENTION = {
    "layers.*.attention.query_key_value": Source(
        tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv"), "gated_heads_side_by_side"
    ),
    "layers.*.attention.gate": Source((_QUERY,), "second_of_two_heads"),
}
QWEN3_NEXT = {
    **GATED_ATTENTION,
    **_delta(_LINEAR, ("in_proj_qkvz", "in_proj_ba"), "delta_of_key_heads"),
}
QWEN3_5 = {
    **GATED_ATTENTION,
    **_delta(_LINEAR, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "delta_side_by_side"),
}
_FEED = "layers.*.feed_forward"
_EXPERT = {"dense_h_to_4h": "w1", "dense_h_to_4h_2": "w3", "dense_4h_to_h": "w2"}
LFM2 = {
    "final_layernorm": Source(("embedding_norm",)),
    "layers.*.input_layernorm": Source(("layers.*.operator_norm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.ffn_norm",)),
    **_attention("layers.*.self_attn", "out_proj"),
    "layers.*.attention.query_norm": Source(("layers.*.self_attn.q_layernorm",)),
    "layers.*.attention.key_norm": Source(("layers.*.self_attn.k_layernorm",)),
    **_mlp("", _FEED, **_EXPERT),
    **_mlp("experts.#.", f"{_FEED}.experts.#", **_EXPERT),
    "layers.*.mlp.router": Source((f"{_FEED}.gate",), "transposed"),
    _EXPERT_BIAS: Source((f"{_FEED}.expert_bias",), "summands"),
    "layers.*.short_conv.in_proj": Source(("layers.*.conv.in_proj",), "transposed"),
    "layers.*.short_conv.conv": Source(("layers.*.conv.conv",), "conv_taps"),
    "layers.*.short_conv.out_proj": Source(("layers.*.conv.out_proj",), "transposed"),
}
_KIMI = "layers.*.self_attn"
_SPARSE = "layers.*.block_sparse_moe"
KIMI_LINEAR = {
    "layers.*.kimi_delta.in_proj": Source(
        tuple(f"{_KIMI}.{part}_proj" for part in "qkvb"), "transposed_columns"
    ),
    "layers.*.kimi_delta.conv": Source(
        tuple(f"{_KIMI}.{part}_conv1d" for part in "qkv"), "conv_taps_side_by_side"
    ),
    **{
        f"layers.*.kimi_delta.{name}_{side}": Source((f"{_KIMI}.{key}_proj",), "transposed")
        for name, letter in (("decay", "f"), ("gate", "g"))
        for side, key in (("down", f"{letter}_a"), ("up", f"{letter}_b"))
    },
    "layers.*.kimi_delta.dt_bias": Source((f"{_KIMI}.dt_bias",), "summands"),
    "layers.*.kimi_delta.A_log": Source((f"{_KIMI}.A_log",), "summands"),
    "layers.*.kimi_delta.norm": Source((f"{_KIMI}.o_norm",)),
    "layers.*.kimi_delta.out_proj": Source((f"{_KIMI}.o_proj",), "transposed"),
    "layers.*.mlp.router": Source((f"{_SPARSE}.gate",), "transposed"),
    _EXPERT_BIAS: Source((f"{_SPARSE}.gate.e_score_correction_bias",), "summands"),
    **_mlp("shared_expert.", f"{_SPARSE}.shared_experts", **_GATED),
    **_mlp("experts.#.", f"{_SPARSE}.experts.#", **_EXPERT),
}
# transformers saves the MLPs of layers without experts by the name of the others.
KIMI_LINEAR_SAVED = _mlp("", _SPARSE, **_GATED)
DIALECTS: dict[str, dict[str, Source]] = {
    "nemotron_h": NEMOTRON_H,
    "bamba": BAMBA,
    "granitemoehybrid": _MAMBA,
    "granitemoehybrid_dense": GRANITE_DENSE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "lfm2": LFM2,
    "kimi_linear": KIMI_LINEAR,
    "kimi_linear_saved": KIMI_LINEAR_SAVED,
}
