"""Makes tiny, genuine NeMo T5 checkpoints of any kind, driven by the weight table.

As tests/checkpoint_maker.py does for GPT. What differs: several stored tensors come from one source
tensor, and the pipeline has a rank at which the encoder ends and the decoder begins.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from launcher_scripts.checkpoint.layout.layouts import LAYOUTS
from launcher_scripts.models.family import Partition, Source, WeightSpec
from launcher_scripts.models.t5 import T5Config
from launcher_scripts.models.t5_weights import weights
from tests.checkpoint_maker import TORCH_DTYPES, MadeTensor, rank_folder

PREFIX = "enc_dec_model."


@dataclass(frozen=True)
class T5Variant:
    """How a checkpoint is written.

    split:   the first decoder stage, where there are several stages
    flat:    the sizes stand at the top of model_config.yaml, not in sections
    raw:     more keys of model_config.yaml, `stack` more keys of its two sections
    """

    tp_size: int = 1
    pp_size: int = 1
    split: int = 0
    container: str = "tar"
    dtype: str = "fp32"
    fused_gate: bool = False
    legacy_qkv: bool = False
    plus_one: bool = False
    flat: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    stack: Mapping[str, Any] = field(default_factory=dict)

    def dialects(self) -> tuple[str, ...]:
        flags = {
            "nemo_fused_gate": self.fused_gate,
            "nemo_legacy": self.legacy_qkv,
            "nemo_plus_one": self.plus_one,
        }
        return (*(name for name, on in flags.items() if on), "nemo")


def small_t5(**changes: Any) -> T5Config:
    """A T5 as NeMo makes them by default, all sizes different where they may be."""
    values: dict[str, Any] = {
        "vocab_size": 48,
        "num_layers": 2,
        "num_decoder_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "head_size": 6,
        "ffn_size": 40,
        "position_embedding": "learned",
        "max_positions": 16,
        "normalization": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu",
        "bias": True,
        "logits_bias": True,
        "attention_scale": 6**-0.5,
    }
    return T5Config(**{**values, **changes})


def make_t5(
    path: Path, config: T5Config, variant: T5Variant = T5Variant(), seed: int = 0
) -> dict[str, np.ndarray]:
    """Write the checkpoint; returns canonical tensor name -> stored values (float32)."""
    sources, stored = t5_sources(config, variant, np.random.default_rng(seed))
    tree = path.with_name(path.name + ".tree")
    tree.mkdir(parents=True)
    (tree / "model_config.yaml").write_text(yaml.safe_dump(raw_t5(config, variant)))
    for pp in range(variant.pp_size):
        for tp in range(variant.tp_size):
            folder = tree / rank_folder(variant.tp_size, variant.pp_size, tp, pp)
            folder.mkdir(parents=True, exist_ok=True)
            state = _stage(sources, config, variant, tp, pp)
            torch.save(state, folder / "model_weights.ckpt")
    if variant.container == "folder":
        tree.rename(path)
        return stored
    with tarfile.open(path, "w") as archive:
        archive.add(tree, "./")
    shutil.rmtree(tree)
    return stored


def t5_sources(
    config: T5Config, variant: T5Variant, random: np.random.Generator
) -> tuple[dict[str, MadeTensor], dict[str, np.ndarray]]:
    """Source key -> whole tensor, and canonical name -> stored values."""
    parts: dict[str, list[tuple[WeightSpec, Source, torch.Tensor]]] = {}
    stored: dict[str, np.ndarray] = {}
    for spec in weights(config):
        names = [name for name in variant.dialects() if name in spec.sources]
        if not names:
            continue
        source = spec.sources[names[0]]
        for layer in spec.layer_numbers(config):
            key = source.keys[0].replace("*", str(layer))
            values = torch.from_numpy(random.standard_normal(spec.shape_on(config, 1)))
            values = values.to(TORCH_DTYPES[variant.dtype])
            if source.layout == "as_is" and key in parts:
                values = parts[key][0][2]
            parts.setdefault(key, []).append((spec, source, values))
            offset = np.float32(source.layout == "plus_one")
            stored[spec.tensor_name(layer)] = values.float().numpy() + offset
    return {key: _assembled(rows, config) for key, rows in parts.items()}, stored


def _assembled(rows: list[tuple[WeightSpec, Source, torch.Tensor]], config: T5Config) -> MadeTensor:
    """The source tensor [out, in] of the stored tensors it holds."""
    spec, source, _ = rows[0]
    layout = source.layout
    turned = [
        values.mT if values.ndim == 2 and layout not in ("as_is", "plus_one") else values
        for *_, values in rows
    ]
    if layout == "qkv_of_heads":
        turned = list(turned[0].chunk(3))
    if layout.endswith("_heads"):
        heads = [values.unflatten(0, (config.num_heads, config.head_size)) for values in turned]
        whole = torch.stack(heads, dim=1).flatten(0, 2)
    elif layout == "as_is":
        whole = turned[0]
    else:
        whole = torch.cat(turned)
    axis = {Partition.REPLICATED: None, Partition.ROW_PARALLEL: 1}.get(spec.partition, 0)
    if LAYOUTS[layout].full:
        axis = None
    return MadeTensor(whole.contiguous(), axis, LAYOUTS[layout].sections)


def _stage(
    sources: Mapping[str, MadeTensor], config: T5Config, variant: T5Variant, tp: int, pp: int
) -> dict[str, Any]:
    """The state dict of one rank; what a later stage repeats, it repeats."""
    state: dict[str, Any] = {}
    for key, tensor in sources.items():
        name = _stage_name(key, pp, config, variant)
        if name is None:
            continue
        prefix = PREFIX * (2 if name.startswith(("encoder.", "decoder.")) else 1)
        values = tensor.shard(tp, variant.tp_size)
        first = variant.split if name.startswith("decoder") else 0
        if "relative_position" in name and pp > first:
            values = torch.zeros_like(values)
        state[prefix + name] = values
    if config.shared_embeddings and pp == variant.split:
        for key, tensor in sources.items():
            if key.startswith("encoder_embedding."):
                copy = key.replace("encoder_", "decoder_", 1)
                state[PREFIX + copy] = tensor.shard(tp, variant.tp_size)
    if variant.pp_size - 1 == pp > variant.split:
        table = sources["encoder_embedding.word_embeddings.weight"]
        state[f"{PREFIX}word_embeddings.weight"] = table.shard(tp, variant.tp_size)
    return state


def _stage_name(key: str, stage: int, config: T5Config, variant: T5Variant) -> str | None:
    """The key as a pipeline stage knows it; None when the stage does not hold it."""
    if variant.pp_size == 1:
        return key
    encoder = key.startswith("encoder")
    first, stop = (0, variant.split) if encoder else (variant.split, variant.pp_size)
    stem, found, rest = key.partition(".layers.")
    if found:
        layers = config.num_layers if encoder else config.num_decoder_layers
        per_stage = layers // (stop - first)
        number, _, rest = rest.partition(".")
        if first + int(number) // per_stage != stage:
            return None
        return f"{stem}.layers.{int(number) % per_stage}.{rest}"
    if "relative_position" in key:
        return key if first <= stage < stop else None
    return key if stage == (first if "_embedding." in key else stop - 1) else None


def raw_t5(config: T5Config, variant: T5Variant) -> dict[str, Any]:
    """model_config.yaml, with every key that says something about the network."""
    gated = {"gelu": "geglu", "gelu_erf": "geglu", "silu": "swiglu", "relu": "reglu"}
    plain = {"gelu": "gelu", "gelu_erf": "gelu", "squared_relu": "squared-relu"}
    activation = (gated if config.gated else plain)[config.activation]
    learned = config.position_embedding == "learned"
    stack = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.head_size,
        "position_embedding_type": "learned_absolute" if learned else "relative",
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "relative_position_bias_self_attention_only": not config.cross_attention_relative_bias,
        "apply_query_key_layer_scaling": config.relative_bias_layer_scaling,
        "normalization": "layernorm1p" if variant.plus_one else config.normalization,
        "layernorm_epsilon": config.norm_eps,
        "activation": f"fast-{activation}" if variant.fused_gate else activation,
        "bias_activation_fusion": config.activation == "gelu",
        "bias": config.bias,
        "normalize_attention_scores": config.attention_scale != 1.0,
        "megatron_legacy": variant.legacy_qkv,
        **variant.stack,
    }
    sections = {"encoder": stack, "decoder": stack | {"num_layers": config.num_decoder_layers}}
    return {
        "tensor_model_parallel_size": variant.tp_size,
        "pipeline_model_parallel_size": variant.pp_size,
        "pipeline_model_parallel_split_rank": variant.split,
        "max_position_embeddings": config.max_positions,
        "share_token_embeddings": config.shared_embeddings,
        "share_decoder_tokens_head_embeddings": config.tied_embeddings,
        "tokens_head_bias": config.logits_bias,
        "nemo_version": "1.23.0",
        **(stack if variant.flat else sections),
        **variant.raw,
    }
