"""Rotary scalings of GGUF files, and the inverse of its converter's changes to tensors.

Tensors of GGUF files: their names in Hugging Face's, and what undoes llama.cpp's changes.

Names are those of gguf's tensor_mapping, and of Hugging Face without "model." or "transformer.".
`*` stands for a layer's number, # for an expert's.

Each change takes a tensor as the file has it and gives it as transformers does: rows as output
features. The changes are those of `modify_tensors` in llama.cpp's conversion/.

How a GGUF file scales rotary positions, as Hugging Face's rope_parameters.

llama.cpp keeps the rule of Llama 3.1 as the numbers that come out of it: the tensor
`rope_freqs.weight` divides the frequency of every pair. Its parameters are found again here; other
numbers are those of a LongRoPE whose contexts do not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.gguf_file import Fields


@dataclass(frozen=True)
class Heads:
    """Number of query heads, and of key/value heads, of a layer.

    delta: of a gated delta net, its key heads, value heads, and numbers of all value heads
    """

    queries: int
    keys: int
    delta: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class Restored:
    """A row of a table of restored tensors.

    apply: (values, heads) -> the same values as transformers has them
    shape: what becomes of the shape
    """

    apply: Callable[[NDArray[Any], Heads], NDArray[Any]]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape


@dataclass(frozen=True)
class Model:
    """Input of a row's `config`: the fields, and the tensors' names and shapes.

    shapes:  name -> shape, rows first
    factors: the tensors that divide rotary frequencies
    """

    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Joined:
    """A tensor of Hugging Face that a file has in several.

    names: of the file's tensors
    apply: (their values, config.json) -> the values
    rows:  (their shapes) -> how many rows it has
    """

    names: tuple[str, ...]
    apply: Callable[[Sequence[NDArray[Any]], Mapping[str, Any]], NDArray[Any]]
    rows: Callable[[Sequence[tuple[int, ...]]], int]


@dataclass(frozen=True)
class GGUFArchitecture:
    """A row of ARCHITECTURES.

    model_type: of Hugging Face
    config:     Model -> what is left to say in config.json
    names:      tensor without its last part -> Hugging Face's, without "model." or "transformer.";
                or both whole
    restored:   tensor (with or without its last part) -> what undoes llama.cpp's changes
    renamed:    Model -> names that differ in this one
    variant:    Model -> the row instead of this one
    joined:     Hugging Face's name -> how it is made of several tensors of the file
    """

    model_type: str
    config: Callable[[Model], dict[str, Any]]
    names: Mapping[str, str]
    restored: Mapping[str, Restored] = field(default_factory=dict)
    renamed: Callable[[Model], Mapping[str, str]] = lambda _: {}
    variant: Callable[[Model], GGUFArchitecture | None] = lambda _: None
    joined: Mapping[str, Joined] = field(default_factory=dict)


def _halves(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows that rotate together are neighbours; transformers has them half a head apart."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _grouped(values: NDArray[Any], heads: Heads) -> NDArray[Any]:
    """Rows (all queries, all keys, all values); transformers has (the queries of a key/value head,
    its key, its value) for one such head after the other."""
    size = len(values) // (heads.queries + 2 * heads.keys)
    parts = np.split(values, [heads.queries * size, (heads.queries + heads.keys) * size])
    rows = [part.reshape(heads.keys, -1, *values.shape[1:]) for part in parts]
    joined: NDArray[Any] = np.concatenate(rows, axis=1)
    return joined.reshape(values.shape)


QUERY_HALVES = Restored(lambda values, heads: _halves(values, heads.queries))
KEY_HALVES = Restored(lambda values, heads: _halves(values, heads.keys))
HALVES = {"blk.*.attn_q": QUERY_HALVES, "blk.*.attn_k": KEY_HALVES}
GROUPED = Restored(_grouped)
LESS_ONE = Restored(lambda values, _: values - np.float32(1))
TRANSPOSED = Restored(lambda values, _: values.T, lambda shape: shape[::-1])
# A matrix of one row loses that axis in some files.
ONE_ROW = Restored(
    lambda values, _: values.reshape(1, -1),
    lambda shape: (1, *shape) if len(shape) == 1 else shape,
)

LLAMA_NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "blk.*.attn_norm": "layers.*.input_layernorm",
    "blk.*.attn_q": "layers.*.self_attn.q_proj",
    "blk.*.attn_k": "layers.*.self_attn.k_proj",
    "blk.*.attn_v": "layers.*.self_attn.v_proj",
    "blk.*.attn_q_norm": "layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "layers.*.self_attn.k_norm",
    "blk.*.attn_output": "layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "layers.*.mlp.up_proj",
    "blk.*.ffn_down": "layers.*.mlp.down_proj",
}
# The converter adds one to the scales of norms that count from one.
CENTRED = {
    f"{name}.weight": LESS_ONE
    for name in (
        "output_norm",
        *(f"blk.*.{part}_norm" for part in ("attn", "ffn", "post_attention", "post_ffw")),
        *(f"blk.*.attn_{part}_norm" for part in "qk"),
    )
}
OLMO2_NAMES = {
    **LLAMA_NAMES,
    "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
    "blk.*.post_ffw_norm": "layers.*.post_feedforward_layernorm",
}
GLM4_NAMES = {
    **LLAMA_NAMES,
    "blk.*.post_attention_norm": "layers.*.post_self_attn_layernorm",
    "blk.*.ffn_up": "layers.*.mlp.gate_up_proj",
    "blk.*.post_ffw_norm": "layers.*.post_mlp_layernorm",
}
PHI3_NAMES = {
    **LLAMA_NAMES,
    "blk.*.attn_qkv": "layers.*.self_attn.qkv_proj",
    "blk.*.ffn_up": "layers.*.mlp.gate_up_proj",
}
STARCODER2_NAMES = {
    **LLAMA_NAMES,
    "blk.*.ffn_up": "layers.*.mlp.c_fc",
    "blk.*.ffn_down": "layers.*.mlp.c_proj",
}
_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    "blk.*.ffn_gate_inp": "layers.*.block_sparse_moe.gate",
    **{
        f"blk.*.ffn_{part}_exps": f"layers.*.block_sparse_moe.experts.#.{name}"
        for part, name in _EXPERTS.items()
    },
}
QWEN_MOE_NAMES = {
    **LLAMA_NAMES,
    "blk.*.ffn_gate_inp": "layers.*.mlp.gate",
    "blk.*.ffn_gate_inp_shexp": "layers.*.mlp.shared_expert_gate",
    **{f"blk.*.ffn_{part}_exps": f"layers.*.mlp.experts.#.{part}_proj" for part in _EXPERTS},
    **{f"blk.*.ffn_{part}_shexp": f"layers.*.mlp.shared_expert.{part}_proj" for part in _EXPERTS},
}


def _ssm_names(mixer: str) -> dict[str, str]:
    stem = f"layers.*.{mixer}"
    return {
        "blk.*.ssm_a": f"{stem}.A_log",
        "blk.*.ssm_d": f"{stem}.D",
        "blk.*.ssm_dt.bias": f"{stem}.dt_bias",
        "blk.*.ssm_in": f"{stem}.in_proj",
        "blk.*.ssm_conv1d": f"{stem}.conv1d",
        "blk.*.ssm_norm": f"{stem}.norm",
        "blk.*.ssm_out": f"{stem}.out_proj",
    }


def _mlps(experts: str, shared: str) -> dict[str, str]:
    return {
        **{f"blk.*.ffn_{part}_exps": f"layers.*.{experts}.#.{part}_proj" for part in _EXPERTS},
        **{f"blk.*.ffn_{part}_shexp": f"layers.*.{shared}.{part}_proj" for part in _EXPERTS},
    }


NEMOTRON_H_NAMES = {
    "token_embd": "embeddings",
    "output": "lm_head",
    "output_norm": "norm_f",
    "blk.*.attn_norm": "layers.*.norm",
    **_ssm_names("mixer"),
    **{f"blk.*.attn_{part}": f"layers.*.mixer.{part}_proj" for part in "qkv"},
    "blk.*.attn_output": "layers.*.mixer.o_proj",
    "blk.*.ffn_up": "layers.*.mixer.up_proj",
    "blk.*.ffn_down": "layers.*.mixer.down_proj",
    "blk.*.ffn_gate_inp": "layers.*.mixer.gate",
    "blk.*.exp_probs_b.bias": "layers.*.mixer.gate.e_score_correction_bias",
    "blk.*.ffn_latent_down": "layers.*.mixer.fc1_latent_proj",
    "blk.*.ffn_latent_up": "layers.*.mixer.fc2_latent_proj",
    **_mlps("mixer.experts", "mixer.shared_experts"),
}
BAMBA_NAMES = {
    **LLAMA_NAMES,
    **_ssm_names("mamba"),
    "output_norm": "final_layernorm",
    "blk.*.ffn_norm": "layers.*.pre_ff_layernorm",
    **{f"blk.*.ffn_{part}": f"layers.*.feed_forward.{part}_proj" for part in _EXPERTS},
}
GRANITE_HYBRID_NAMES = {
    **LLAMA_NAMES,
    **_ssm_names("mamba"),
    "blk.*.ffn_down": "layers.*.shared_mlp.output_linear",
    "blk.*.ffn_down_shexp": "layers.*.shared_mlp.output_linear",
    "blk.*.ffn_gate_inp": "layers.*.block_sparse_moe.router.layer",
    "blk.*.ffn_gate_exps": "layers.*.block_sparse_moe.experts.#.w1",
    "blk.*.ffn_up_exps": "layers.*.block_sparse_moe.experts.#.w3",
    "blk.*.ffn_down_exps": "layers.*.block_sparse_moe.experts.#.w2",
}
LFM2_NAMES = {
    **LLAMA_NAMES,
    "token_embd_norm": "embedding_norm",
    "output_norm": "embedding_norm",
    "blk.*.attn_norm": "layers.*.operator_norm",
    "blk.*.ffn_norm": "layers.*.ffn_norm",
    "blk.*.attn_output": "layers.*.self_attn.out_proj",
    "blk.*.attn_q_norm": "layers.*.self_attn.q_layernorm",
    "blk.*.attn_k_norm": "layers.*.self_attn.k_layernorm",
    "blk.*.ffn_gate": "layers.*.feed_forward.w1",
    "blk.*.ffn_up": "layers.*.feed_forward.w3",
    "blk.*.ffn_down": "layers.*.feed_forward.w2",
    "blk.*.shortconv.in_proj": "layers.*.conv.in_proj",
    "blk.*.shortconv.conv": "layers.*.conv.conv",
    "blk.*.shortconv.out_proj": "layers.*.conv.out_proj",
}
QWEN3_NEXT_NAMES = {
    **QWEN_MOE_NAMES,
    **_ssm_names("linear_attn"),
    "blk.*.ssm_ba": "layers.*.linear_attn.in_proj_ba",
    "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
}
QWEN3_5_NAMES = {
    **QWEN3_NEXT_NAMES,
    "blk.*.attn_qkv": "layers.*.linear_attn.in_proj_qkv",
    "blk.*.attn_gate": "layers.*.linear_attn.in_proj_z",
    "blk.*.ssm_beta": "layers.*.linear_attn.in_proj_b",
    "blk.*.ssm_alpha": "layers.*.linear_attn.in_proj_a",
}
DEEPSEEK2_NAMES = {
    **LLAMA_NAMES,
    "blk.*.attn_q_a": "layers.*.self_attn.q_a_proj",
    "blk.*.attn_q_a_norm": "layers.*.self_attn.q_a_layernorm",
    "blk.*.attn_q_b": "layers.*.self_attn.q_b_proj",
    "blk.*.attn_kv_a_mqa": "layers.*.self_attn.kv_a_proj_with_mqa",
    "blk.*.attn_kv_a_norm": "layers.*.self_attn.kv_a_layernorm",
    "blk.*.attn_kv_b": "layers.*.self_attn.kv_b_proj",
    "blk.*.ffn_gate_inp": "layers.*.mlp.gate",
    "blk.*.exp_probs_b.bias": "layers.*.mlp.gate.e_score_correction_bias",
    **_mlps("mlp.experts", "mlp.shared_experts"),
}


# Tensors [rotary dimensions / 2] that divide frequencies: of all contexts, or of short and long.
ALWAYS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (ALWAYS, SHORT, LONG)
SCALINGS = ("none", "linear", "yarn", "longrope")
_TOLERANCE = 1e-5
_LOW, _HIGH = 1.0, 4.0  # frequency factors of every Llama
_CONTEXTS = (8192, *(1 << bits for bits in range(3, 21)))


def rope_parameters(
    fields: Fields, rotary_size: int, factors: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    """rope_type and its parameters, rope_theta included.

    rotary_size: dimensions of a head that rotate
    factors:     those of FACTORS that the file has
    """
    result: dict[str, Any] = {"rope_theta": fields.real("rope.freq_base", 10000.0)}
    factor = fields.real("rope.scaling.factor", fields.real("rope.scale_linear", 1.0)) or 1.0
    # A factor without a type scales all positions, as in llama.cpp.
    kind = fields.text("rope.scaling.type", "linear")
    context = fields.size("context_length")
    original = fields.size("rope.scaling.original_context_length", context)
    result["original_max_position_embeddings"] = original
    scaled = (kind == "linear" and factor != 1.0) or kind == "yarn"
    problem = _unfit(kind, factors, rotary_size, scaled)
    if problem is not None:
        fields.problems.add(problem, got=kind, choices=SCALINGS)
    elif factors:
        result |= _by_pair(fields, factors, result["rope_theta"], rotary_size)
    elif scaled:
        result |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            result["beta_fast"] = fields.real("rope.scaling.yarn_beta_fast", 32.0)
            result["beta_slow"] = fields.real("rope.scaling.yarn_beta_slow", 1.0)
    return result


def _unfit(
    kind: str, factors: Mapping[str, NDArray[Any]], rotary_size: int, scaled: bool
) -> str | None:
    """Return the problem of the file's scaling; None if there is none."""
    if kind not in SCALINGS:
        return "unknown rope.scaling.type"
    if factors.keys() not in (set(), {ALWAYS}, {SHORT, LONG}) or (
        kind == "longrope" and not factors
    ):
        return f"{SHORT} and {LONG} go together, and with longrope"
    if factors and scaled:
        return f"{' and '.join(factors)} and rope.scaling.type both scale"
    for name, values in factors.items():
        if values.shape != (rotary_size // 2,) or not np.all(np.isfinite(values) & (values > 0)):
            return f"{name} must be {rotary_size // 2} numbers above 0"
    return None


def _by_pair(
    fields: Fields, factors: Mapping[str, NDArray[Any]], base: float, rotary_size: int
) -> dict[str, Any]:
    """The rule that gives a number per pair."""
    if all(np.all(values == 1) for values in factors.values()):
        return {}
    if ALWAYS in factors:
        rule = _llama3(factors[ALWAYS].astype(np.float64), base, rotary_size)
        if rule is not None:
            return rule
    short, long = (_decimals(factors.get(name, factors.get(ALWAYS))) for name in (SHORT, LONG))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": fields.real("rope.scaling.attn_factor", 1.0),
    }


def _llama3(factors: NDArray[Any], base: float, rotary_size: int) -> dict[str, Any] | None:
    """The rule of Llama 3.1 that gives `factors`; None where there is none."""
    turns = base ** (-np.arange(0, rotary_size, 2) / rotary_size) / (2 * np.pi)  # per position
    factor = float(str(np.float32(factors.max())))
    for context in _CONTEXTS:
        smooth = (context * turns - _LOW) / (_HIGH - _LOW)
        expected = 1 / np.clip((1 - smooth) / factor + smooth, 1 / factor, 1.0)
        if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": context,
            }
    return None


def _decimals(values: Any) -> list[float]:
    return [float(str(np.float32(value))) for value in values]


def common(model: Model, *, mixed: bool = False) -> dict[str, Any]:
    """Return the fields that every model has.

    mixed: layers differ, and fields of them may be lists, of which the largest counts
    """
    fields = model.fields
    hidden = fields.size("embedding_length")
    heads = fields.size("attention.head_count", largest=mixed)
    return {
        "vocab_size": vocab_size(model),
        "num_hidden_layers": max(fields.size("block_count") - predictors(fields), 1),
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length", largest=mixed),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads, largest=mixed),
        "max_position_embeddings": fields.size("context_length"),
        "tie_word_embeddings": "output.weight" not in model.shapes,
    }


def rotary(model: Model, *, mixed: bool = False) -> dict[str, Any]:
    """Return the fields of models with rotary positions.  mixed: as of common"""
    fields = model.fields
    shared = common(model, mixed=mixed)
    default_size = max(shared["hidden_size"] // shared["num_attention_heads"], 1)
    size = head_size(fields, default_size)
    turns = fields.size("rope.dimension_count", size)
    heads, groups = shared["num_attention_heads"], shared["num_key_value_heads"]
    rows = {
        "attn_q": heads * size,
        "attn_k": groups * size,
        "attn_qkv": (heads + 2 * groups) * size,
    }
    shapes = {name: model.shapes.get(f"blk.0.{name}.weight") for name in rows}
    sizes = {name: shape[0] for name, shape in shapes.items() if shape}
    fits = mixed or sizes == {name: rows[name] for name in sizes or rows}
    if turns > size or not fits:
        fields.problems.add(
            "the heads do not fit the tensors",
            got={"heads": (heads, groups), "size": size, "rotary": turns, "rows": sizes},
        )
        turns = size = 1
    rope = rope_parameters(fields, turns, model.factors)
    return {
        **shared,
        "head_dim": size,
        "rope_parameters": {**rope, "partial_rotary_factor": turns / size},
    }


def vocab_size(model: Model) -> int:
    """Rows of the table of tokens, which the file may say, too."""
    table = model.shapes.get("token_embd.weight", (1,))
    if model.fields.get("vocab_size", table[0]) != table[0]:
        model.fields.problems.add("vocab_size is not the rows of token_embd.weight", got=table)
    return int(table[0])


def head_size(fields: Fields, *default: int) -> int:
    """The size of keys, which is that of values."""
    size = fields.size("attention.key_length", *default)
    if fields.size("attention.value_length", size) != size:
        fields.problems.add("attention.value_length is not attention.key_length", got=size)
    return size


def silu_and_rms_norms(fields: Fields) -> dict[str, Any]:
    """Fields of models whose MLPs and norms are a Llama's."""
    return {
        "hidden_act": "silu",
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
    }


def has_any(model: Model, part: str) -> bool:
    """True if a layer has a tensor whose name ends so."""
    return any(name.endswith(f".{part}") for name in model.shapes)


def predictors(fields: Fields) -> int:
    """Number of layers, the last ones, that predict more tokens."""
    return fields.size("nextn_predict_layers") if fields.get("nextn_predict_layers", 0) else 0


def llama_config(model: Model) -> dict[str, Any]:
    return {
        **rotary(model),
        **silu_and_rms_norms(model.fields),
        "attention_bias": "blk.0.attn_q.bias" in model.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in model.shapes,
    }


def count(model: Model) -> int:
    return model.fields.size("expert_count")


def experts(model: Model) -> dict[str, Any]:
    """Return the fields of models with experts."""
    stacked = model.shapes.get("blk.0.ffn_gate_exps.weight") or model.shapes.get(
        "blk.0.ffn_down_exps.weight", (1, 1, 1)
    )
    if len(stacked) != 3 or 0 in stacked or stacked[0] != count(model):
        model.fields.problems.add("expert_count does not fit ffn_gate_exps", got=stacked)
        return {}
    return {
        "num_experts_per_tok": model.fields.size("expert_used_count"),
        "moe_intermediate_size": model.fields.size("expert_feed_forward_length", stacked[1]),
    }
