"""Makes tiny, genuine NeMo GPT checkpoints of any kind, driven by the weight table.

Every stored tensor gets random values; the inverse of its row's layout gives the source tensors,
which are then cut for the source's ranks and saved as NeMo saves them. The stored values come
back with the file, so a test can compare what an export made of them.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.distributed.checkpoint import FileSystemWriter, save

from launcher_scripts.checkpoint import verification
from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.layout.layouts import LAYOUTS
from launcher_scripts.models.family import Partition, Source, WeightSpec
from launcher_scripts.models.gpt import GPTConfig
from launcher_scripts.models.gpt_weights import weights

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CLASSIC, CORE = "model.language_model.", "model."


@dataclass(frozen=True)
class Variant:
    """How a checkpoint is written.

    form:        nemo, mcore (a file per rank), zarr or torch_dist (distributed)
    tp_size, pp_size: the source's own ranks; a distributed form has chunks instead
    container:   tar, gzip or folder
    dtype:       fp32, fp16 or bf16
    fused_gate, legacy_qkv, plus_one, local_norms, o2_names: see models/gpt_nemo.py
    raw:         more keys of model_config.yaml
    files:       more files in the archive
    """

    form: str = "nemo"
    tp_size: int = 1
    pp_size: int = 1
    container: str = "tar"
    dtype: str = "fp32"
    fused_gate: bool = False
    legacy_qkv: bool = False
    plus_one: bool = False
    local_norms: bool = False
    o2_names: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def core(self) -> bool:
        return self.form != "nemo"

    def dialects(self, config: GPTConfig) -> tuple[str, ...]:
        base = "mcore" if self.core else "nemo"
        norms = "mcore_local" if self.local_norms else base
        fused = config.gated and (self.core or self.fused_gate)
        return (
            *([f"{base}_fused_gate"] if fused else []),
            *(["nemo_legacy"] if self.legacy_qkv else []),
            *([f"{norms}_plus_one"] if self.plus_one else []),
            *(["mcore_local"] if self.local_norms else []),
            base,
        )


def small_config(**changes: Any) -> GPTConfig:
    """A GPT of a few thousand parameters, all sizes different where they may be."""
    values: dict[str, Any] = {
        "vocab_size": 48,
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_size": 8,
        "ffn_size": 40,
        "max_positions": 16,
    }
    return GPTConfig(**{**values, **changes})


def make_nemo(
    path: Path, config: GPTConfig, variant: Variant = Variant(), seed: int = 0
) -> dict[str, np.ndarray]:
    """Write the checkpoint; returns canonical tensor name -> stored values (float32)."""
    sources, stored = source_tensors(config, variant, np.random.default_rng(seed))
    tree = path.with_name(path.name + ".tree")
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    raw = raw_config(config, variant)
    (tree / "model_config.yaml").write_text(yaml.safe_dump(raw))
    for name, content in variant.files.items():
        (tree / name).write_bytes(content)
    _WRITERS.get(variant.form, write_ranks)(tree, sources, config, variant)
    if variant.container == "folder":
        tree.rename(path)
        return stored
    mode = "w:gz" if variant.container == "gzip" else "w"
    with tarfile.open(path, mode) as archive:
        archive.add(tree, "./")
    shutil.rmtree(tree)
    return stored


@dataclass(frozen=True)
class MadeTensor:
    """A whole source tensor [out, in]; `axis` is where ranks cut it, in `sections` parts."""

    values: torch.Tensor
    axis: int | None
    sections: int

    def shard(self, rank: int, size: int) -> torch.Tensor:
        if self.axis is None:
            return self.values.clone()
        parts = self.values.chunk(self.sections, self.axis)
        return torch.cat([part.chunk(size, self.axis)[rank] for part in parts], self.axis)


def source_tensors(
    config: GPTConfig, variant: Variant, random: np.random.Generator
) -> tuple[dict[str, MadeTensor], dict[str, np.ndarray]]:
    """Source key (without prefix) -> tensor, and canonical name -> stored values."""
    made: dict[str, MadeTensor] = {}
    stored: dict[str, np.ndarray] = {}
    dtype = TORCH_DTYPES[variant.dtype]
    halves: dict[str, torch.Tensor] = {}
    for spec in weights(config):
        source = _source(spec, variant.dialects(config))
        for layer in spec.layer_numbers(config):
            values = torch.from_numpy(random.standard_normal(spec.shape_on(config, 1)))
            values = values.to(dtype)
            key = source.keys[0].replace("*", str(layer))
            name = spec.tensor_name(layer)
            stored[name] = values.float().numpy()
            if source.layout == "plus_one":
                stored[name] = stored[name] + np.float32(1)
            tensor = INVERSES[source.layout](values, config)
            if source.layout == "first_half":
                halves[key] = tensor
                continue
            if source.layout == "second_half":
                tensor = torch.cat([halves.pop(key), tensor])
            axis = {Partition.REPLICATED: None, Partition.ROW_PARALLEL: 1}.get(spec.partition, 0)
            made[key] = MadeTensor(tensor.contiguous(), axis, LAYOUTS[source.layout].sections)
    return made, stored


def _source(spec: WeightSpec, dialects: tuple[str, ...]) -> Source:
    return next(spec.sources[name] for name in dialects if name in spec.sources)


def _heads(values: torch.Tensor, config: GPTConfig) -> list[torch.Tensor]:
    """Rows of the stored q | k | v columns, cut to heads: [heads, head_size, ...] each."""
    sizes = (config.q_size, config.kv_size, config.kv_size)
    rows = values.mT if values.ndim == 2 else values
    return [part.unflatten(0, (-1, config.head_size)) for part in rows.split(sizes)]


def _of_heads(values: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    return torch.stack(_heads(values, config), dim=1).flatten(0, 2)


def _in_blocks(values: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    return torch.cat(_heads(values, config)).flatten(0, 1)


def _of_groups(values: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    q, k, v = _heads(values, config)
    grouped = q.unflatten(0, (config.num_kv_heads, -1))
    return torch.cat([grouped, k[:, None], v[:, None]], dim=1).flatten(0, 2)


def _flipped(values: torch.Tensor, _config: GPTConfig) -> torch.Tensor:
    return values.mT if values.ndim == 2 else values


def _same(values: torch.Tensor, _config: GPTConfig) -> torch.Tensor:
    return values


INVERSES: dict[str, Callable[[torch.Tensor, GPTConfig], torch.Tensor]] = {
    "as_is": _same,
    "plus_one": _same,
    "transposed": _flipped,
    "first_half": _flipped,
    "second_half": _flipped,
    "qkv_of_heads": _of_heads,
    "qkv_of_groups": _of_groups,
    "qkv_in_blocks": _in_blocks,
}


def raw_config(config: GPTConfig, variant: Variant) -> dict[str, Any]:
    """model_config.yaml, with every key that says something about the network."""
    activations = {
        ("gelu", False): "gelu",
        ("gelu_erf", False): "gelu",
        ("squared_relu", False): "squared-relu",
        ("gelu", True): "geglu",
        ("gelu_erf", True): "geglu",
        ("relu", True): "reglu",
        ("silu", True): "swiglu",
    }
    activation = activations[config.activation, config.gated]
    positions = config.position_embedding
    return {
        "mcore_gpt": variant.core,
        "tensor_model_parallel_size": variant.tp_size,
        "pipeline_model_parallel_size": variant.pp_size,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads if variant.core else None,
        "kv_channels": config.head_size,
        "max_position_embeddings": config.max_positions,
        "normalization": "layernorm1p" if variant.plus_one else config.normalization,
        "layernorm_epsilon": config.norm_eps,
        "bias": config.attention_bias,
        "activation": f"fast-{activation}" if variant.fused_gate else activation,
        "bias_activation_fusion": config.activation == "gelu",
        "transformer_block_type": f"{config.norm_placement}_ln",
        "position_embedding_type": "learned_absolute" if positions == "learned" else positions,
        "rotary_percentage": config.rotary_percentage,
        "rotary_base": config.rotary_base,
        "apply_query_key_layer_scaling": config.alibi_layer_scaling,
        "share_embeddings_and_output_weights": config.tied_embeddings,
        "megatron_legacy": variant.legacy_qkv,
        "nemo_version": "1.23.0",
        **variant.raw,
    }


def write_ranks(
    tree: Path, sources: Mapping[str, MadeTensor], config: GPTConfig, variant: Variant
) -> None:
    """One state dict per rank; stages count their layers from 0, tied tables are repeated."""
    prefix = CORE if variant.core else CLASSIC
    if variant.o2_names:
        prefix = prefix.replace("model.", "model.module.", 1)
    for pp in range(variant.pp_size):
        for tp in range(variant.tp_size):
            state: dict[str, Any] = {}
            for key, tensor in sources.items():
                name = stage_name(key, pp, config.num_layers, variant.pp_size)
                if name is not None:
                    state[prefix + name] = tensor.shard(tp, variant.tp_size)
            if config.tied_embeddings and pp == variant.pp_size - 1 and pp > 0:
                table = sources["embedding.word_embeddings.weight"].shard(tp, variant.tp_size)
                copy = (
                    "model.output_layer.weight" if variant.core else "model.word_embeddings.weight"
                )
                state[copy] = table
            state[f"{prefix}encoder.layers.0.self_attention.core._extra_state"] = None
            folder = tree / rank_folder(variant.tp_size, variant.pp_size, tp, pp)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / "model_weights.ckpt")


def rank_folder(tp_size: int, pp_size: int, tp: int, pp: int) -> str:
    """The folder of one rank; "" for the only one."""
    if pp_size > 1:
        return f"tp_rank_{tp:02d}_pp_rank_{pp:03d}"
    return f"mp_rank_{tp:02d}" if tp_size > 1 else ""


def stage_name(key: str, stage: int, num_layers: int, stages: int) -> str | None:
    """The key as a pipeline stage knows it; None when the stage does not hold it."""
    stack, found, rest = key.partition(".layers.")
    per_stage = num_layers // stages
    if found:
        number, _, rest = rest.partition(".")
        if int(number) // per_stage != stage:
            return None
        return f"{stack}.layers.{int(number) % per_stage}.{rest}"
    wanted = 0 if key.startswith("embedding.") else stages - 1
    return key if stage == wanted else None


def stacked(sources: Mapping[str, MadeTensor], config: GPTConfig) -> dict[str, MadeTensor]:
    """Distributed checkpoints' form: the layers of one kind along a leading axis."""
    found = {}
    for key, tensor in sources.items():
        if ".layers.0." in key:
            layers = [
                sources[key.replace(".layers.0.", f".layers.{n}.")]
                for n in range(config.num_layers)
            ]
            values = torch.stack([layer.values for layer in layers])
            axis = None if tensor.axis is None else tensor.axis + 1
            found[key.replace(".layers.0.", ".layers.")] = MadeTensor(values, axis, tensor.sections)
        elif ".layers." not in key:
            found[key] = tensor
    return found


def write_zarr(
    tree: Path, sources: Mapping[str, MadeTensor], config: GPTConfig, variant: Variant
) -> None:
    """zarr 2 by hand: a chunk per layer and rank (and half of a gated MLP)."""
    folder = tree / "model_weights"
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    torch.save({}, folder / "common.pt")
    for key, tensor in stacked(sources, config).items():
        values = tensor.values
        chunks = list(values.shape)
        if ".layers." in key:
            chunks[0] = 1
        if tensor.axis is not None:
            chunks[tensor.axis] //= tensor.sections * variant.tp_size
        place = folder / f"model.{key}"
        place.mkdir()
        dtype = {"fp32": "<f4", "fp16": "<f2", "bf16": "bfloat16"}[variant.dtype]
        meta = {
            "shape": list(values.shape),
            "chunks": chunks,
            "dtype": dtype,
            "compressor": None,
            "filters": None,
            "order": "C",
            "fill_value": None,
            "zarr_format": 2,
        }
        (place / ".zarray").write_text(json.dumps(meta))
        _write_chunks(place, values, chunks)
    state = folder / "model.decoder.layers.mlp.linear_fc1._extra_state"
    state.mkdir()
    torch.save(io.BytesIO(b"state"), state / "shard_0_1.pt")


def _write_chunks(place: Path, values: torch.Tensor, chunks: list[int]) -> None:
    counts = [size // chunk for size, chunk in zip(values.shape, chunks, strict=True)]
    for index in np.ndindex(*counts):
        at = zip(index, chunks, strict=True)
        box = tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in at)
        data = values[box].contiguous().view(torch.uint8).numpy().tobytes()
        (place / ".".join(map(str, index))).write_bytes(data)


def write_torch_dist(
    tree: Path, sources: Mapping[str, MadeTensor], config: GPTConfig, _variant: Variant
) -> None:
    """torch's own distributed checkpoint, written by torch."""

    folder = tree / "model_weights"
    folder.mkdir()
    state: dict[str, Any] = {
        f"model.{key}": tensor.values for key, tensor in stacked(sources, config).items()
    }
    state["model.decoder.layers.mlp.linear_fc1._extra_state/shard_0_1"] = io.BytesIO(b"state")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({}, folder / "common.pt")


_WRITERS = {"zarr": write_zarr, "torch_dist": write_torch_dist}


def rebuilt(checkpoint: FTCheckpoint) -> dict[str, np.ndarray]:
    """Canonical name -> whole stored tensor of an exported folder; copies of heads must agree."""
    config, found = checkpoint.config, {}
    for spec in weights(config):
        for layer in spec.layer_numbers(config):
            whole = verification.rebuilt(checkpoint, spec, layer)
            assert whole is not None, f"copies of a head differ in {spec.tensor_name(layer)}"
            found[spec.tensor_name(layer)] = whole
    return found
