"""The weight table of a T5, with the dialects of Hugging Face and NeMo.

Keys are as in the state dict; NeMo's without "enc_dec_model.", however often it leads. Variants of
NeMo's dialect ("nemo_legacy", "nemo_fused_gate", "nemo_plus_one") have only the rows that differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from launcher_scripts.models import adapters
from launcher_scripts.models.family import Partition, Source, WeightSpec, stack_layers
from launcher_scripts.models.t5 import T5Config


def weights(config: T5Config) -> list[WeightSpec]:
    """One row per tensor of a T5 with these hyperparameters; layer tensors come last."""
    specs = _embeddings(config)
    for side in ("encoder",) if config.encoder_only else ("encoder", "decoder"):
        if config.position_embedding == "relative":
            specs.append(_relative_bias(config, side, "layer.0.SelfAttention", side))
        specs += _norm(config, f"{side}.final_layer_norm", f"{side}.model.final_layernorm")
    if config.cross_attention_relative_bias:
        attention = "layer.1.EncDecAttention"
        specs.append(_relative_bias(config, "decoder", attention, "decoder_cross_attention"))
    specs += _encoder_layer(config)
    if not config.encoder_only:
        specs += _decoder_layer(config)
    if config.num_experts is not None:
        specs = [_of_switch(spec) for spec in specs]
    if config.encoder_sliding_window is not None:
        specs = [_of_long(spec) for spec in specs]
    if config.sandwich_norms:
        specs = [_of_gemma(config, spec) for spec in specs if spec.name != "shared.weight"]
    return specs + adapters.weights("t5", config.parts, not config.encoder_only)


# Parts of names: Hugging Face's of a T5, and of a T5Gemma.
_GEMMA = (
    ("shared.weight", "encoder.embed_tokens.weight"),
    ("final_layer_norm", "norm"),
    (".block.*", ".layers.*"),
    *((f".SelfAttention.{part}.", f".self_attn.{part}_proj.") for part in "qkvo"),
    (".SelfAttention.", ".self_attn."),
    *((f".EncDecAttention.{part}.", f".cross_attn.{part}_proj.") for part in "qkvo"),
    (".DenseReluDense.wi_0.", ".mlp.gate_proj."),
    (".DenseReluDense.wi_1.", ".mlp.up_proj."),
    (".DenseReluDense.wo.", ".mlp.down_proj."),
)
_GEMMA_BRANCHES = ("self_attn", "cross_attn", "feedforward")
_MERGED_BRANCHES = ("self_attn", "feedforward")


def _of_switch(spec: WeightSpec) -> WeightSpec:
    """The row with the dialect "switch"; what no T5 has is of that dialect alone."""
    source = spec.sources.get("huggingface")
    if source is None:
        return spec
    keys = tuple(_switch_key(key) for key in source.keys)
    of_experts = ".experts." in spec.name or ".router." in spec.name
    sources = {} if of_experts else spec.sources
    return replace(spec, sources={**sources, "switch": Source(keys, source.layout)})


def _of_long(spec: WeightSpec) -> WeightSpec:
    """The row with the dialect "longt5"."""
    source = spec.sources.get("huggingface")
    if source is None or not spec.name.startswith("encoder."):
        return spec
    keys = tuple(key.replace(".SelfAttention.", ".LocalSelfAttention.") for key in source.keys)
    return replace(spec, sources={**spec.sources, "longt5": Source(keys, source.layout)})


def _switch_key(key: str) -> str:
    key = key.replace(".DenseReluDense.", ".mlp.").replace(".router.", ".router.classifier.")
    return re.sub(r"\.experts\.(\d+)\.", r".experts.expert_\1.", key)


def _of_gemma(config: T5Config, spec: WeightSpec) -> WeightSpec:
    """The row with the dialect "t5gemma"."""
    source = spec.sources["huggingface"]
    keys = tuple(_gemma_key(key, bool(config.merged_attention)) for key in source.keys)
    return replace(spec, sources={**spec.sources, "t5gemma": Source(keys, source.layout)})


def _gemma_key(key: str, merged: bool) -> str:
    for old, new in _GEMMA:
        key = key.replace(old, new)
    side = key.split(".")[0]
    branches = _MERGED_BRANCHES if merged or side == "encoder" else _GEMMA_BRANCHES
    for number, branch in enumerate(branches):
        stem = f"{side}.layers.*.layer.{number}."
        key = key.replace(f"{stem}layer_norm", f"{side}.layers.*.pre_{branch}_layernorm")
        key = key.replace(f"{stem}output_norm", f"{side}.layers.*.post_{branch}_layernorm")
        key = key.replace(stem, f"{side}.layers.*.")
    return key


def _embeddings(config: T5Config) -> list[WeightSpec]:
    table = ("vocab_size", "hidden_size")
    positions = ("max_positions", "hidden_size")
    learned = config.position_embedding == "learned"
    specs = [
        _row("shared.weight_T", table, "shared.weight", "encoder_embedding.word_embeddings.weight"),
        WeightSpec(
            "shared.weight",
            ("hidden_size", "vocab_size"),
            sources={"huggingface": Source(("shared.weight",), "transposed")},
            prefix="",
            required=False,
        ),
    ]
    if learned:
        nemo = "encoder_embedding.position_embeddings.weight"
        specs.append(_row("shared.ape", positions, None, nemo))
    if config.encoder_only:
        return specs
    decoder = "decoder_embedding" if not config.shared_embeddings else "encoder_embedding"
    if not config.shared_embeddings:
        nemo = f"{decoder}.word_embeddings.weight"
        specs.append(
            _row("decoder.embed_tokens.weight", table, "decoder.embed_tokens.weight", nemo)
        )
        if learned:
            nemo = f"{decoder}.position_embeddings.weight"
            specs.append(_row("decoder.embed_positions.weight", positions, None, nemo))
    name = "shared.weight" if config.shared_embeddings else "decoder.embed_tokens.weight"
    head = (name, f"{decoder}.word_embeddings.weight")
    if not config.tied_embeddings:
        head = ("lm_head.weight", "tokens_head.weight")
    specs.append(_row("lm_head.weight", table, *head))
    if config.logits_bias:
        specs.append(_row("shared.bias", ("vocab_size",), None, "tokens_head.bias"))
    return specs


def _encoder_layer(config: T5Config) -> list[WeightSpec]:
    stem, nemo = "encoder.block.*.layer", "encoder.model.layers.*"
    specs = _norm(config, f"{stem}.0.layer_norm", f"{nemo}.input_layernorm")
    for part, layout in (("q", "query"), ("k", "key"), ("v", "value")):
        specs += _column(
            config,
            f"{stem}.0.SelfAttention.{part}",
            "inner_size" if part == "q" else "kv_size",
            nemo=f"{nemo}.self_attention.query_key_value",
            layouts={"nemo": f"{layout}_of_heads", "nemo_legacy": f"{layout}_in_blocks"},
        )
    specs += _output(config, f"{stem}.0.SelfAttention.o", f"{nemo}.self_attention.dense")
    specs += _head_norms(config, f"{stem}.0.SelfAttention")
    specs += _norm(config, f"{stem}.1.layer_norm", f"{nemo}.post_attention_layernorm")
    return specs + _mlp(config, f"{stem}.1.DenseReluDense", f"{nemo}.mlp")


def _decoder_layer(config: T5Config) -> list[WeightSpec]:
    stem, nemo = "decoder.block.*.layer", "decoder.model.layers.*"
    attention = f"{stem}.0.SelfAttention"
    specs = _norm(config, f"{stem}.0.layer_norm", f"{nemo}.input_layernorm")
    specs += _column(
        config,
        f"{attention}.qkv",
        "qkv_size",
        blocks=("inner_size", "kv_size", "kv_size"),
        huggingface=Source(tuple(f"{attention}.{part}" for part in "qkv"), "transposed_columns"),
        nemo=f"{nemo}.self_attention.query_key_value",
        layouts={"nemo": "qkv_of_heads", "nemo_legacy": "qkv_in_blocks"},
    )
    specs += _output(config, f"{attention}.o", f"{nemo}.self_attention.dense")
    specs += _head_norms(config, attention)
    specs += _norm(config, f"{stem}.1.layer_norm", f"{nemo}.post_attention_layernorm")
    if config.merged_attention:
        return specs + _mlp(config, f"{stem}.1.DenseReluDense", f"{nemo}.mlp")
    for part, key, layouts in (
        ("q", "query", {"nemo": "transposed"}),
        ("k", "key_value", {"nemo": "first_of_two_heads", "nemo_legacy": "first_half"}),
        ("v", "key_value", {"nemo": "second_of_two_heads", "nemo_legacy": "second_half"}),
    ):
        specs += _column(
            config,
            f"{stem}.1.EncDecAttention.{part}",
            "inner_size" if part == "q" else "kv_size",
            nemo=f"{nemo}.inter_attention.{key}",
            layouts=layouts,
        )
    specs += _output(config, f"{stem}.1.EncDecAttention.o", f"{nemo}.inter_attention.dense")
    specs += _norm(config, f"{stem}.2.layer_norm", f"{nemo}.post_inter_attention_layernorm")
    return specs + _mlp(config, f"{stem}.2.DenseReluDense", f"{nemo}.mlp")


def _mlp(config: T5Config, stem: str, nemo: str) -> list[WeightSpec]:
    """The MLP of a stack's layers, and the experts of those that have such instead."""
    dense = _one_mlp(config, stem, nemo)
    if config.num_experts is None:
        return dense
    side = stem.partition(".")[0]
    specs = [
        WeightSpec(
            f"{stem}.router.{part}",
            ("hidden_size", "num_experts") if part == "weight" else ("num_experts",),
            sources={"huggingface": Source((f"{stem}.router.{part}",), "transposed")},
            layers=stack_layers(stem),
            prefix="",
        )
        for part in (("weight", "bias") if config.router_bias else ("weight",))
    ]
    for expert in range(config.num_experts):
        specs += _one_mlp(config, f"{stem}.experts.{expert}", nemo)
    return [
        *(replace(spec, only=f"{side}_is_dense") for spec in dense),
        *(replace(spec, only=f"{side}_has_experts") for spec in specs),
    ]


def _one_mlp(config: T5Config, stem: str, nemo: str) -> list[WeightSpec]:
    specs = []
    up = f"{nemo}.dense_h_to_4h"
    names: tuple[tuple[str, str, str, str], ...] = (("wi", "wi", up, ""),)
    if config.gated:
        names = (("wi", "wi_0", up, "first_half"), ("wi2", "wi_1", f"{up}_2", "second_half"))
    for name, huggingface, key, half in names:
        specs += _column(
            config,
            f"{stem}.{name}",
            "ffn_size",
            huggingface=Source((f"{stem}.{huggingface}",), "transposed"),
            nemo=key,
            layouts={"nemo": "transposed"},
            fused=Source((up,), half) if half else None,
        )
    return specs + _output(config, f"{stem}.wo", f"{nemo}.dense_4h_to_h", "ffn_size")


def _column(
    config: T5Config,
    stem: str,
    width: str,
    *,
    nemo: str,
    layouts: Mapping[str, str],
    huggingface: Source | None = None,
    fused: Source | None = None,
    blocks: tuple[str, ...] = (),
) -> list[WeightSpec]:
    """A linear layer [hidden, width] whose outputs the ranks share, and its bias.

    nemo, layouts: the key in NeMo's checkpoints, and its layout in each of their dialects
    fused:         where dialect "nemo_fused_gate" has it, both halves of a gate in one matrix
    """
    sources = {"huggingface": huggingface or Source((stem,), "transposed")}
    sources |= {dialect: Source((nemo,), layout) for dialect, layout in layouts.items()}
    if fused is not None:
        sources["nemo_fused_gate"] = fused
    return [
        WeightSpec(
            f"{stem}.{part}",
            ("hidden_size", width) if part == "weight" else (width,),
            Partition.COLUMN_PARALLEL,
            blocks,
            {
                dialect: Source(tuple(f"{key}.{part}" for key in source.keys), source.layout)
                for dialect, source in sources.items()
            },
            layers=stack_layers(stem),
            prefix="",
        )
        for part in _parts(config)
    ]


def _output(config: T5Config, stem: str, nemo: str, width: str = "inner_size") -> list[WeightSpec]:
    """A linear layer [width, hidden] whose inputs the ranks share, and its bias, added once."""
    return [
        WeightSpec(
            f"{stem}.{part}",
            (width, "hidden_size") if part == "weight" else ("hidden_size",),
            Partition.ROW_PARALLEL if part == "weight" else Partition.REPLICATED,
            sources={
                "huggingface": Source((f"{stem}.{part}",), "transposed"),
                "nemo": Source((f"{nemo}.{part}",), "transposed"),
            },
            layers=stack_layers(stem),
            prefix="",
        )
        for part in _parts(config)
    ]


def _norm(config: T5Config, stem: str, nemo: str) -> list[WeightSpec]:
    parts = ("weight", "bias") if config.normalization == "layernorm" else ("weight",)
    specs = [
        _row(f"{stem}.{part}", ("hidden_size",), f"{stem}.{part}", f"{nemo}.{part}")
        for part in parts
    ]
    plus_one = {"nemo_plus_one": Source((f"{nemo}.weight",), "plus_one")}
    specs[0] = replace(specs[0], sources={**specs[0].sources, **plus_one})
    if config.sandwich_norms and stem.endswith(".layer_norm"):
        name = stem.removesuffix("layer_norm") + "output_norm.weight"
        specs.append(_row(name, ("hidden_size",), name, name))
    return specs


def _head_norms(config: T5Config, attention: str) -> list[WeightSpec]:
    if not config.qk_norm:
        return []
    names = (f"{attention}.{part}_norm.weight" for part in "qk")
    return [_row(name, ("head_size",), name, name) for name in names]


def _relative_bias(config: T5Config, side: str, attention: str, nemo: str) -> WeightSpec:
    """The table [heads, buckets] of the first layer, which all layers share, or of each."""
    layer = "*" if config.relative_bias_per_layer else "0"
    name = f"{side}.block.{layer}.{attention}.relative_attention_bias.weight"
    key = f"{nemo}_relative_position_embedding.relative_position_embedding.weight"
    return WeightSpec(
        name,
        ("num_heads", "num_buckets"),
        Partition.ROW_PARALLEL,
        sources={
            "huggingface": Source((name,), "transposed"),
            "nemo": Source((key,), "transposed_whole"),
        },
        layers=stack_layers(name),
        prefix="",
    )


def _row(name: str, shape: tuple[str, ...], huggingface: str | None, nemo: str) -> WeightSpec:
    """A tensor stored as it is in the source, without parts per rank."""
    table = shape[0] == "vocab_size"
    sources = {"huggingface": huggingface, "nemo": nemo}
    return WeightSpec(
        name,
        shape,
        Partition.VOCAB_PARALLEL if table else Partition.REPLICATED,
        sources={dialect: Source((key,)) for dialect, key in sources.items() if key},
        layers=stack_layers(name),
        prefix="",
    )


def _parts(config: T5Config) -> tuple[str, ...]:
    return ("weight", "bias") if config.bias else ("weight",)
