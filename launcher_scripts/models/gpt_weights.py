"""The weight table of a GPT.

Names and shapes of the stored tensors follow FasterTransformer's GPT checkpoint; what it cannot
represent (gated activations, rotary positions, RMS norm, grouped queries) extends the same file
set, as docs/checkpoint-format.md describes.
"""

from __future__ import annotations

from dataclasses import replace

from launcher_scripts.models import adapters, draft_heads, gpt_dialects, mixers, side_streams
from launcher_scripts.models.family import MIXERS, RECURRENT_KINDS, XIELU, Partition, WeightSpec
from launcher_scripts.models.gpt import GPTConfig


def weights(config: GPTConfig) -> list[WeightSpec]:
    """One row per tensor of a GPT with these hyperparameters; every row is required.

    Layer tensors come last and carry `*`. Norms have a bias exactly when they are layer norms.
    """
    if config.draft_head is not None:
        return draft_heads.weights(config, _norm, _layer(config))
    specs = [_spec("wte", ("vocab_size", "hidden_size"), Partition.VOCAB_PARALLEL)]
    if config.position_embedding == "learned":
        specs.append(_spec("wpe", ("max_positions", "hidden_size")))
    if config.embedding_norm:
        specs += _norm(config, "pre_decoder_layernorm")
    if config.final_norm:
        specs += _norm(config, "final_layernorm")
    if not config.tied_embeddings:
        specs.append(
            _spec("lm_head.weight", ("vocab_size", "hidden_size"), Partition.VOCAB_PARALLEL)
        )
    if config.logits_bias:
        specs.append(_spec("lm_head.bias", ("vocab_size",), Partition.VOCAB_PARALLEL))
    specs += _layer(config)
    return specs + adapters.beside(adapters.weights("gpt", config.parts), specs)


def _layer(config: GPTConfig) -> list[WeightSpec]:
    before, kinds = config.norm_placement != "branch", config.branch_kinds
    specs = _of(config, MIXERS, _norm(config, "layers.*.input_layernorm") if before else [])
    if "attention" in kinds:
        specs += _of(config, ("attention",), _attention(config))
    for kind in RECURRENT_KINDS:
        if kind in kinds:
            specs += _of(config, (kind,), mixers.weights(config, kind, _linear, _spec))
    if config.norm_placement in ("sandwich", "branch"):
        specs += _norm(config, "layers.*.attention.output_norm")
        specs += _norm(config, "layers.*.mlp.output_norm")
    specs += side_streams.weights(config, _linear, _norm, _spec)
    if config.layer_scale:
        specs.append(_spec("layers.*.scale", ("1",)))
    if config.activation == XIELU:
        specs.append(_spec("layers.*.mlp.activation", ("4",)))
    for kind, name in (("linear", "attention.linear"), ("linear_mlp", "mlp.linear")):
        if kind in kinds:
            square = ("hidden_size", "hidden_size")
            rows = [_spec(f"layers.*.{name}.weight", square, Partition.ROW_PARALLEL)]
            specs += _of(config, (kind,), rows)
    norm = _norm(config, "layers.*.post_attention_layernorm") if before else []
    if config.num_experts is None:
        specs += _of(config, ("mlp", "linear_mlp"), norm)
        return specs + _of(config, ("mlp",), _mlp(config, "layers.*.mlp"))
    if config.dense_ffn_size is not None:
        dense = [replace(spec, sources=gpt_dialects.dense(spec.sources)) for spec in norm]
        dense += _mlp(config, "layers.*.mlp", "dense_ffn_size")
        specs += [replace(spec, kinds=("mlp",)) for spec in dense]
    norm += _experts(config, config.num_experts)
    return specs + [replace(spec, kinds=("moe",)) for spec in norm]


def _of(config: GPTConfig, kinds: tuple[str, ...], specs: list[WeightSpec]) -> list[WeightSpec]:
    """Rows of branches of these kinds, where layers differ."""
    if config.layer_branches is None:
        return specs
    present = tuple(kind for kind in kinds if kind in config.branch_kinds)
    return [replace(spec, kinds=present) for spec in specs] if present else []


def _attention(config: GPTConfig) -> list[WeightSpec]:
    if config.kv_lora_rank is not None:
        specs = _latent(config)
    else:
        columns, bias = Partition.COLUMN_PARALLEL, config.attention_bias
        blocks = ("q_size", "kv_size", "kv_size")
        name, shape = "layers.*.attention.query", ("hidden_size", "qkv_size")
        specs = _linear(f"{name}_key_value", shape, columns, bias=bias, blocks=blocks)
        if config.layer_kv_sources is not None:
            specs = [replace(spec, only="has_keys") for spec in specs]
            queries = _linear(name, ("hidden_size", "q_size"), columns, bias=bias)
            specs += [replace(spec, only="shares_keys") for spec in queries]
    norms = {"query": "q_size", "key": "kv_size"} if config.qk_norm else {}
    for part, size in norms.items():
        name = f"layers.*.attention.{part}_norm"
        if config.joint_qk_norm or config.qk_norm_per_head:
            parallel = Partition.COLUMN_PARALLEL
            specs.append(_spec(f"{name}.weight", (size,), parallel, blocks=(size,)))
        else:
            local = _norm(config, name, "head_size")
            only = "normalizes_heads" if part == "query" else "normalizes_keys"
            specs += [replace(spec, only=only) for spec in local]
    if config.attention_sinks:
        parallel = Partition.COLUMN_PARALLEL
        sinks = _spec("layers.*.attention.sinks", ("num_heads",), parallel, ("num_heads",))
        specs.append(replace(sinks, only="has_sinks"))
    if config.attention_output_gate:
        specs += _linear(
            "layers.*.attention.gate",
            ("hidden_size", "q_size"),
            Partition.COLUMN_PARALLEL,
            bias=config.attention_bias,
        )
    return specs + _linear(
        "layers.*.attention.dense",
        ("attended_size", "hidden_size"),
        Partition.ROW_PARALLEL,
        bias=config.dense_bias,
    )


def _latent(config: GPTConfig) -> list[WeightSpec]:
    """Ranks share the heads; every rank makes the latent vectors."""
    stem, columns = "layers.*.attention", Partition.COLUMN_PARALLEL
    specs = []
    if config.q_lora_rank is None:
        specs += _linear(f"{stem}.query", ("hidden_size", "q_size"), columns, bias=False)
    else:
        down, bias = ("hidden_size", "q_lora_rank"), config.attention_bias
        specs += _linear(f"{stem}.query_down", down, Partition.REPLICATED, bias=bias)
        specs += _norm(config, f"{stem}.query_latent_norm", "q_lora_rank")
        specs += _linear(f"{stem}.query_up", ("q_lora_rank", "q_size"), columns, bias=False)
    specs += _linear(
        f"{stem}.kv_down",
        ("hidden_size", "kv_down_size"),
        Partition.REPLICATED,
        bias=config.attention_bias,
    )
    specs += _norm(config, f"{stem}.kv_latent_norm", "kv_lora_rank")
    return specs + _linear(f"{stem}.kv_up", ("kv_lora_rank", "kv_up_size"), columns, bias=False)


def _experts(config: GPTConfig, count: int) -> list[WeightSpec]:
    specs = [_spec("layers.*.mlp.router.weight", ("hidden_size", "num_experts"))]
    if config.router_bias:
        specs.append(_spec("layers.*.mlp.router.bias", ("num_experts",)))
    if config.expert_bias:
        specs.append(_spec(gpt_dialects.EXPERT_BIAS, ("3", "num_experts")))
    if config.shared_expert_size is not None:
        specs += _mlp(config, "layers.*.mlp.shared_expert", "shared_expert_size")
        if config.shared_expert_gate is not False:
            specs.append(_spec("layers.*.mlp.shared_expert_gate.weight", ("hidden_size", "1")))
    if config.expert_norms:
        for name in ("expert_norm", "expert_output_norm", "shared_output_norm", "router.norm"):
            specs += _norm(config, f"layers.*.mlp.{name}")
        specs.append(_spec("layers.*.mlp.router.expert_scale", ("num_experts",)))
    if config.moe_latent_size is not None:
        specs.append(_spec("layers.*.mlp.latent_in.weight", ("hidden_size", "moe_latent_size")))
        specs.append(_spec("layers.*.mlp.latent_out.weight", ("moe_latent_size", "hidden_size")))
    for expert in range(count):
        specs += _mlp(config, f"layers.*.mlp.experts.{expert}", hidden="expert_hidden_size")
    return specs


def _mlp(
    config: GPTConfig, name: str, size: str = "ffn_size", hidden: str = "hidden_size"
) -> list[WeightSpec]:
    specs = []
    for up in ("dense_h_to_4h", "dense_h_to_4h_2") if config.gated else ("dense_h_to_4h",):
        specs += _linear(
            f"{name}.{up}",
            (hidden, size),
            Partition.COLUMN_PARALLEL,
            bias=config.mlp_bias,
        )
    return specs + _linear(
        f"{name}.dense_4h_to_h",
        (size, hidden),
        Partition.ROW_PARALLEL,
        bias=config.mlp_bias,
    )


def _linear(
    name: str,
    shape: tuple[str, str],
    partition: Partition,
    *,
    bias: bool,
    blocks: tuple[str, ...] = (),
) -> list[WeightSpec]:
    """The weight [in, out] and, with `bias`, the bias [out]; a row-parallel bias is added once."""
    specs = [_spec(f"{name}.weight", shape, partition, blocks)]
    if bias and partition is Partition.ROW_PARALLEL:
        specs.append(_spec(f"{name}.bias", shape[1:]))
    elif bias:
        specs.append(_spec(f"{name}.bias", shape[1:], partition, blocks))
    return specs


def _norm(config: GPTConfig, name: str, size: str = "hidden_size") -> list[WeightSpec]:
    parts = ("weight", "bias") if config.normalization == "layernorm" else ("weight",)
    return [_spec(f"{name}.{part}", (size,)) for part in parts]


def _spec(
    name: str,
    shape: tuple[str, ...],
    partition: Partition = Partition.REPLICATED,
    blocks: tuple[str, ...] = (),
) -> WeightSpec:
    return WeightSpec(name, shape, partition, blocks, gpt_dialects.sources(name))
