"""Names of a GPT's tensors in the checkpoints of other makers.

One dialect per maker: canonical name -> source keys and layout. A name without `.weight` stands
for a layer's weight and bias; one with it goes before. Keys are as in the state dict, without the
common prefix ("transformer." or "model.").
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher_scripts.models import gpt_nemo, mixers, side_streams
from launcher_scripts.models.family import Source

# Its rows sum to the bias: what is left of a float32 after each rounding to the eight bits of a
# bfloat16, since a bias decides by differences that the weights' type may not hold.
EXPERT_BIAS = "layers.*.mlp.router.expert_bias"
_SHARED = ("wte", "wpe", "lm_head.weight", "lm_head.bias")

GPT2 = {
    "wte": Source(("wte.weight",)),
    "wpe": Source(("wpe.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "final_layernorm": Source(("ln_f",)),
    "layers.*.input_layernorm": Source(("h.*.ln_1",)),
    "layers.*.attention.query_key_value": Source(("h.*.attn.c_attn",)),
    "layers.*.attention.dense": Source(("h.*.attn.c_proj",)),
    "layers.*.post_attention_layernorm": Source(("h.*.ln_2",)),
    "layers.*.mlp.dense_h_to_4h": Source(("h.*.mlp.c_fc",)),
    "layers.*.mlp.dense_4h_to_h": Source(("h.*.mlp.c_proj",)),
}

# What SantaCoder and StarCoder, and GPT-Neo, store otherwise than GPT-2.
GPT_BIGCODE = {
    "layers.*.attention.query_key_value": Source(("h.*.attn.c_attn",), "qkv_in_blocks"),
    "layers.*.attention.dense": Source(("h.*.attn.c_proj",), "transposed"),
    "layers.*.mlp.dense_h_to_4h": Source(("h.*.mlp.c_fc",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("h.*.mlp.c_proj",), "transposed"),
}

GPT_NEO = GPT_BIGCODE | {
    "layers.*.attention.query_key_value": Source(
        tuple(f"h.*.attn.attention.{part}_proj" for part in "qkv"), "heads_side_by_side"
    ),
    "layers.*.attention.dense": Source(("h.*.attn.attention.out_proj",), "transposed"),
}

BLOOM = {
    "wte": Source(("word_embeddings.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "pre_decoder_layernorm": Source(("word_embeddings_layernorm",)),
    "final_layernorm": Source(("ln_f",)),
    "layers.*.input_layernorm": Source(("h.*.input_layernorm",)),
    "layers.*.attention.query_key_value": Source(
        ("h.*.self_attention.query_key_value",), "qkv_of_heads"
    ),
    "layers.*.attention.dense": Source(("h.*.self_attention.dense",), "transposed"),
    "layers.*.post_attention_layernorm": Source(("h.*.post_attention_layernorm",)),
    "layers.*.mlp.dense_h_to_4h": Source(("h.*.mlp.dense_h_to_4h",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("h.*.mlp.dense_4h_to_h",), "transposed"),
}

# Layer norms without a bias, which FasterTransformer's files always have.
_NORMS = ("final_layernorm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
_NO_NORM_BIASES = {f"{norm}.bias": Source((), "zeros") for norm in _NORMS}

MPT = _NO_NORM_BIASES | {
    "wte": Source(("wte.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "final_layernorm": Source(("norm_f",)),
    "layers.*.input_layernorm": Source(("blocks.*.norm_1",)),
    "layers.*.attention.query_key_value": Source(("blocks.*.attn.Wqkv",), "qkv_in_blocks"),
    "layers.*.attention.dense": Source(("blocks.*.attn.out_proj",), "transposed"),
    "layers.*.post_attention_layernorm": Source(("blocks.*.norm_2",)),
    "layers.*.mlp.dense_h_to_4h": Source(("blocks.*.ffn.up_proj",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("blocks.*.ffn.down_proj",), "transposed"),
}

# OPT and XGLM: fairseq's decoder, with and without a "decoder." in front.
_FAIRSEQ_LAYER = {
    "input_layernorm": Source(("self_attn_layer_norm",)),
    "attention.query_key_value": Source(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "transposed_columns"
    ),
    "attention.dense": Source(("self_attn.out_proj",), "transposed"),
    "post_attention_layernorm": Source(("final_layer_norm",)),
    "mlp.dense_h_to_4h": Source(("fc1",), "transposed"),
    "mlp.dense_4h_to_h": Source(("fc2",), "transposed"),
}

LLAMA = {
    "wte": Source(("embed_tokens.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "final_layernorm": Source(("norm",)),
    "layers.*.input_layernorm": Source(("layers.*.input_layernorm",)),
    "layers.*.attention.query_key_value": Source(
        tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv"), "heads_side_by_side"
    ),
    "layers.*.attention.query_norm": Source(("layers.*.self_attn.q_norm",)),
    "layers.*.attention.key_norm": Source(("layers.*.self_attn.k_norm",)),
    "layers.*.attention.dense": Source(("layers.*.self_attn.o_proj",), "transposed"),
    "layers.*.post_attention_layernorm": Source(("layers.*.post_attention_layernorm",)),
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.mlp.gate_proj",), "transposed"),
    "layers.*.mlp.dense_h_to_4h_2": Source(("layers.*.mlp.up_proj",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("layers.*.mlp.down_proj",), "transposed"),
}

# What its descendants call otherwise.
BRANCH_NORMS = {
    "layers.*.attention.output_norm": Source(("layers.*.post_attention_layernorm",)),
    "layers.*.mlp.output_norm": Source(("layers.*.post_feedforward_layernorm",)),
}
VAULTGEMMA = {
    "layers.*.post_attention_layernorm": Source(("layers.*.pre_feedforward_layernorm",)),
}
GEMMA2 = BRANCH_NORMS | VAULTGEMMA
_GATE_AND_UP = {
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.mlp.gate_up_proj",), "first_half"),
    "layers.*.mlp.dense_h_to_4h_2": Source(("layers.*.mlp.gate_up_proj",), "second_half"),
}
PHI3 = _GATE_AND_UP | {
    "layers.*.attention.query_key_value": Source(("layers.*.self_attn.qkv_proj",), "qkv_in_blocks"),
}
# Heads whose neighbours turn together.
INTERLEAVED = {
    "layers.*.attention.query_key_value": Source(
        tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv"), "interleaved_heads_side_by_side"
    ),
}
GLM = INTERLEAVED | _GATE_AND_UP
GLM4 = GLM | {
    "layers.*.attention.output_norm": Source(("layers.*.post_self_attn_layernorm",)),
    "layers.*.mlp.output_norm": Source(("layers.*.post_mlp_layernorm",)),
}
OLMO = _NO_NORM_BIASES | {f"{norm}.weight": Source((), "ones") for norm in _NORMS}
LLAMA_ONE_NORM = {"layers.*.post_attention_layernorm": Source(("layers.*.input_layernorm",))}
PHI = LLAMA_ONE_NORM | {
    "lm_head.bias": Source(("lm_head.bias",)),
    "final_layernorm": Source(("final_layernorm",)),
    "layers.*.attention.dense": Source(("layers.*.self_attn.dense",), "transposed"),
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.mlp.fc1",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("layers.*.mlp.fc2",), "transposed"),
}
_HEAD_NORMS = {f"layers.*.attention.{part}_norm.weight": part[0] for part in ("query", "key")}
STABLELM, _INTERLEAVED_NORMS = (
    {
        name: Source((f"layers.*.self_attn.{letter}_norm.weight",), layout)
        for name, letter in _HEAD_NORMS.items()
    }
    for layout in ("heads_in_a_row", "interleaved_heads_in_a_row")
)
COHERE = LLAMA_ONE_NORM | _NO_NORM_BIASES | INTERLEAVED | _INTERLEAVED_NORMS
STARCODER2 = {
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.mlp.c_fc",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("layers.*.mlp.c_proj",), "transposed"),
}
NEMOTRON = {"layers.*.mlp.dense_h_to_4h": Source(("layers.*.mlp.up_proj",), "transposed")}

_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
APERTUS = NEMOTRON | {
    "layers.*.input_layernorm": Source(("layers.*.attention_layernorm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.feedforward_layernorm",)),
    "layers.*.mlp.activation": Source(
        tuple(f"layers.*.mlp.act_fn.{name}" for name in _XIELU), "scalars"
    ),
}
HUNYUAN = {
    "layers.*.attention.query_norm": Source(("layers.*.self_attn.query_layernorm",)),
    "layers.*.attention.key_norm": Source(("layers.*.self_attn.key_layernorm",)),
}
_ATTENTION_SINKS = {"layers.*.attention.sinks": Source(("layers.*.self_attn.sinks",))}
_HEAD_ONES = dict.fromkeys(_HEAD_NORMS, Source((), "ones_of_head"))
NANOCHAT = {
    **{f"{norm}.weight": Source((), "ones") for norm in (*_NORMS, "pre_decoder_layernorm")},
    **_HEAD_ONES,
    "layers.*.attention.query_key_value": Source(
        tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv"), "swapped_heads_side_by_side"
    ),
    "layers.*.mlp.dense_h_to_4h": Source(("layers.*.mlp.fc1",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("layers.*.mlp.fc2",), "transposed"),
}


def _gated(
    mlp: str,
    source_mlp: str,
    module: str = "mlp",
    keys: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Source]:
    """One of a layer's MLPs, by its name there and here."""
    names = ("dense_h_to_4h", "dense_h_to_4h_2", "dense_4h_to_h")
    return {
        f"layers.*.mlp.{mlp}.{name}": Source(
            (f"layers.*.{module}.{source_mlp}.{key}",), "transposed"
        )
        for name, key in zip(names, keys, strict=True)
    }


# Layers of experts; # stands for an expert's number.
MIXTRAL = {
    "layers.*.mlp.router": Source(("layers.*.block_sparse_moe.gate",), "transposed"),
    **_gated("experts.#", "experts.#", "block_sparse_moe", ("w1", "w3", "w2")),
}
GPT_OSS = _ATTENTION_SINKS | {
    "layers.*.mlp.router": Source(("layers.*.mlp.router",), "transposed"),
    **_gated("experts.#", "experts.#"),
}
GRANITEMOE = MIXTRAL | {
    "layers.*.mlp.router": Source(("layers.*.block_sparse_moe.router.layer",), "transposed"),
    "layers.*.mlp.shared_expert.dense_h_to_4h": Source(
        ("layers.*.shared_mlp.input_linear",), "first_half"
    ),
    "layers.*.mlp.shared_expert.dense_h_to_4h_2": Source(
        ("layers.*.shared_mlp.input_linear",), "second_half"
    ),
    "layers.*.mlp.shared_expert.dense_4h_to_h": Source(
        ("layers.*.shared_mlp.output_linear",), "transposed"
    ),
}
GRANITEMOE_IN_MEMORY = GRANITEMOE | {
    "layers.*.mlp.router": Source(("layers.*.block_sparse_moe.router",), "transposed"),
}
MINIMAX_M2 = MIXTRAL | {
    EXPERT_BIAS: Source(("layers.*.block_sparse_moe.e_score_correction_bias",), "summands"),
}
QWEN_MOE = {
    "layers.*.mlp.router": Source(("layers.*.mlp.gate",), "transposed"),
    "layers.*.mlp.shared_expert_gate": Source(("layers.*.mlp.shared_expert_gate",), "transposed"),
    **_gated("experts.#", "experts.#"),
    **_gated("shared_expert", "shared_expert"),
}
# As in DeepSeek's: GLM-4.5, dots.llm1.
BIASED_MOE = {
    **QWEN_MOE,
    **_gated("shared_expert", "shared_experts"),
    EXPERT_BIAS: Source(("layers.*.mlp.gate.e_score_correction_bias",), "summands"),
}
HUNYUAN_MOE = {
    **HUNYUAN,
    **QWEN_MOE,
    **_gated("shared_expert", "shared_mlp"),
    "layers.*.mlp.router": Source(("layers.*.mlp.gate.wg",), "transposed"),
}
# Also in names of a layer without experts.
_NAMED_ROUTER = {
    "layers.*.mlp.router": Source(("layers.*.mlp.router.gate",), "transposed"),
    EXPERT_BIAS: Source(("layers.*.mlp.expert_bias",), "summands"),
}
AFMOE = {
    **BIASED_MOE,
    **_NAMED_ROUTER,
    "layers.*.attention.gate": Source(("layers.*.self_attn.gate_proj",), "transposed"),
    "layers.*.attention.output_norm": Source(("layers.*.post_attention_layernorm",)),
    "layers.*.post_attention_layernorm": Source(("layers.*.pre_mlp_layernorm",)),
    "layers.*.mlp.output_norm": Source(("layers.*.post_mlp_layernorm",)),
}
HY_V3 = QWEN_MOE | _NAMED_ROUTER | _gated("shared_expert", "shared_mlp")
COHERE2_MOE = {**COHERE, **QWEN_MOE, **_gated("shared_expert", "shared_experts")}


def _renamed(table: Mapping[str, Source], old: str, new: str) -> dict[str, Source]:
    """The table with part of all keys replaced."""
    return {
        name: Source(tuple(key.replace(old, new) for key in source.keys), source.layout)
        for name, source in table.items()
    }


_LLAMA_MLP = {name: source for name, source in LLAMA.items() if ".mlp." in name}
LLAMA4 = {
    **INTERLEAVED,
    **_HEAD_ONES,
    **_renamed(QWEN_MOE | _LLAMA_MLP, ".mlp.", ".feed_forward."),
    "layers.*.mlp.router": Source(("layers.*.feed_forward.router",), "transposed"),
}
MIMO = {
    **BIASED_MOE,
    "layers.*.attention.query_key_value": Source(
        tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv"), "padded_values_side_by_side"
    ),
    "layers.*.attention.dense": Source(("layers.*.self_attn.o_proj",), "padded_inputs"),
    "layers.*.attention.sinks": Source(("layers.*.self_attn.attention_sink_bias",)),
}
DBRX = {
    **_renamed(MPT, "blocks.*.", "blocks.*.norm_attn_norm."),
    "layers.*.mlp.router": Source(("blocks.*.ffn.router.layer",), "transposed"),
    **_renamed(_gated("experts.#", "experts.#", "ffn"), "layers.*.", "blocks.*."),
}
NEMOTRON_NAS = {
    "layers.*.attention.linear": Source(("layers.*.self_attn.linear_attn",), "transposed"),
    "layers.*.mlp.linear": Source(("layers.*.mlp.linear_mlp",), "transposed"),
}
# Latent attention, heads in halves; and where neighbours turn together.
_LATENT = {
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_latent_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
DEEPSEEK = BIASED_MOE | {
    f"layers.*.attention.{name}": Source((f"layers.*.self_attn.{key}",), "transposed")
    for name, key in _LATENT.items()
}
DEEPSEEK_INTERLEAVED = {
    f"layers.*.attention.{name}": Source(
        (f"layers.*.self_attn.{_LATENT[name]}",), f"interleaved_rope_of_{part}"
    )
    for name, part in (("query", "heads"), ("query_up", "heads"), ("kv_down", "latent"))
}
_BIAS_OF_MLP = {EXPERT_BIAS: Source(("layers.*.mlp.e_score_correction_bias",), "summands")}
EXAONE_MOE = BIASED_MOE | _BIAS_OF_MLP
MINIMAX_M2_IN_MEMORY = QWEN_MOE | _BIAS_OF_MLP
ERNIE4_5_MOE = {
    **INTERLEAVED,
    **BIASED_MOE,
    EXPERT_BIAS: Source(("layers.*.mlp.moe_statics.e_score_correction_bias",), "summands_of_row"),
}

GPT_NEOX = {
    **_renamed(_renamed(BLOOM, "h.*.", "layers.*."), ".self_attention.", ".attention."),
    "wte": Source(("embed_in.weight",)),
    "final_layernorm": Source(("final_layer_norm",)),
}

GPTJ = {
    "wte": Source(("wte.weight",)),
    "lm_head.weight": Source(("lm_head.weight",)),
    "lm_head.bias": Source(("lm_head.bias",)),
    "final_layernorm": Source(("ln_f",)),
    "layers.*.input_layernorm": Source(("h.*.ln_1",)),
    "layers.*.attention.query_key_value": Source(
        tuple(f"h.*.attn.{part}_proj" for part in "qkv"), "interleaved_heads_side_by_side"
    ),
    "layers.*.attention.dense": Source(("h.*.attn.out_proj",), "transposed"),
    "layers.*.post_attention_layernorm": Source(("h.*.ln_1",)),
    "layers.*.mlp.dense_h_to_4h": Source(("h.*.mlp.fc_in",), "transposed"),
    "layers.*.mlp.dense_4h_to_h": Source(("h.*.mlp.fc_out",), "transposed"),
}

# What CodeGen calls otherwise; its heads lie in blocks, each with its queries, values and keys.
CODEGEN_BLOCKS = 4
CODEGEN = {
    "layers.*.attention.query_key_value": Source(("h.*.attn.qkv_proj",), "codegen_blocks"),
}

# What Falcon calls otherwise than BLOOM: one norm for attention and MLP, or one of each.
FALCON = {
    "layers.*.attention.query_key_value": Source(
        ("h.*.self_attention.query_key_value",), "qkv_of_groups"
    ),
}
FALCON_ONE_NORM = {"layers.*.post_attention_layernorm": Source(("h.*.input_layernorm",))}
FALCON_TWO_NORMS = {
    "layers.*.input_layernorm": Source(("h.*.ln_attn",)),
    "layers.*.post_attention_layernorm": Source(("h.*.ln_mlp",)),
}


def _fairseq(stem: str, final_norm: str, top: Mapping[str, Source]) -> dict[str, Source]:
    layers = {
        f"layers.*.{name}": Source(
            tuple(f"{stem}layers.*.{key}" for key in source.keys), source.layout
        )
        for name, source in _FAIRSEQ_LAYER.items()
    }
    return {**top, "final_layernorm": Source((f"{stem}{final_norm}",)), **layers}


def _opt() -> dict[str, Source]:
    table = Source(("decoder.embed_tokens.weight",))
    positions = Source(("decoder.embed_positions.weight",), "without_padding_rows")
    top = {"wte": table, "wpe": positions, "lm_head.weight": table}
    return _fairseq("decoder.", "final_layer_norm", top)


# OPT whose embeddings are narrower than its layers: the projections go into the tables.
_TABLE = "decoder.embed_tokens.weight"
_PROJECT_OUT = "decoder.project_out.weight"
OPT_PROJECTED = {
    "wte": Source((_TABLE, "decoder.project_in.weight"), "projected_in"),
    "lm_head.weight": Source((_TABLE, _PROJECT_OUT), "projected_out"),
}
# OPT and XGLM always have an output table, which is their own only here.
_UNTIED = {"lm_head.weight": Source(("lm_head.weight",))}
_PROJECTED = ("lm_head.weight", _PROJECT_OUT)
OPT_PROJECTED_UNTIED = {"lm_head.weight": Source(_PROJECTED, "projected_out")}


def _xglm() -> dict[str, Source]:
    """XGLM: positions are computed, the head is the table before scaling."""
    top = {
        "wte": Source(("embed_tokens.weight",)),
        "wpe": Source((), "fairseq_sinusoids"),
        "lm_head.weight": Source(("embed_tokens.weight",)),
    }
    return _fairseq("", "layer_norm", top)


DIALECTS: dict[str, dict[str, Source]] = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT_BIGCODE,
    "gpt_neo": GPT_NEO,
    "bloom": BLOOM,
    "mpt": MPT,
    "opt": _opt(),
    "opt_projected": OPT_PROJECTED,
    "opt_projected_untied": OPT_PROJECTED_UNTIED,
    "opt_untied": _UNTIED,
    "xglm": _xglm(),
    "xglm_scaled": {"wte": Source(("embed_tokens.weight",), "scaled_by_root_hidden")},
    "xglm_untied": _UNTIED,
    "llama": LLAMA,
    "stablelm": STABLELM,
    "stablelm_one_norm": LLAMA_ONE_NORM,
    "branch_norms": BRANCH_NORMS,
    "gemma2": GEMMA2,
    "vaultgemma": VAULTGEMMA,
    "phi": PHI,
    "cohere": COHERE,
    "phi3": PHI3,
    "interleaved": INTERLEAVED,
    "glm": GLM,
    "glm4": GLM4,
    "olmo": OLMO,
    "starcoder2": STARCODER2,
    "nemotron": NEMOTRON,
    "apertus": APERTUS,
    "hunyuan": HUNYUAN,
    "nanochat": NANOCHAT,
    "sinks": _ATTENTION_SINKS,
    "hunyuan_moe": HUNYUAN_MOE,
    "afmoe": AFMOE,
    "hy_v3": HY_V3,
    "cohere2_moe": COHERE2_MOE,
    "flex_olmo": QWEN_MOE | BRANCH_NORMS,
    "llama4": LLAMA4,
    "dbrx": DBRX,
    "mimo": MIMO,
    "nemotron_nas": NEMOTRON_NAS,
    "phimoe": MIXTRAL | {"lm_head.bias": Source(("lm_head.bias",))},
    "phimoe_in_memory": QWEN_MOE
    | {"layers.*.mlp.router": Source(("layers.*.mlp.router",), "transposed")},
    "granitemoe_swa": GRANITEMOE | _ATTENTION_SINKS,
    "granitemoe_swa_in_memory": GRANITEMOE_IN_MEMORY,
    "gpt_oss": GPT_OSS,
    "granitemoe": GRANITEMOE,
    "granitemoe_in_memory": GRANITEMOE_IN_MEMORY,
    "mixtral": MIXTRAL,
    "mixtral_in_memory": QWEN_MOE,
    "qwen_moe": QWEN_MOE,
    "biased_moe": BIASED_MOE,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "deepseek": DEEPSEEK,
    "deepseek_interleaved": DEEPSEEK_INTERLEAVED,
    "exaone_moe": EXAONE_MOE,
    "minimax_m2": MINIMAX_M2,
    "minimax_m2_in_memory": MINIMAX_M2_IN_MEMORY,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "codegen": CODEGEN,
    "falcon": FALCON,
    "falcon_one_norm": FALCON_ONE_NORM,
    "falcon_two_norms": FALCON_TWO_NORMS,
    **(mixers.DIALECTS | side_streams.DIALECTS),
    **gpt_nemo.DIALECTS,
}


def dense(result: Mapping[str, Source]) -> dict[str, Source]:
    """The sources of a norm, dialect -> Source, before an MLP in a layer without experts."""
    return {name: source for name, source in result.items() if name not in gpt_nemo.OF_EXPERTS}


def sources(name: str) -> dict[str, Source]:
    """Dialect -> Source of the stored tensor called `name`."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if expert:
        result = sources(name.replace(expert[0], ".experts.#."))
        return {
            dialect: Source(
                tuple(key.replace("#", expert[1]) for key in weights.keys), weights.layout
            )
            for dialect, weights in result.items()
        }
    stem, part = (name, None) if name in _SHARED else name.rsplit(".", 1)
    result = {}
    for dialect, table in DIALECTS.items():
        if name in table:
            result[dialect] = table[name]
        elif stem in table:
            source = table[stem]
            result[dialect] = Source(tuple(f"{key}.{part}" for key in source.keys), source.layout)
    return result
