"""Checkpoints of real shapes for benchmarks/export.py, with as few layers as the disk can take.

Values repeat one block of random numbers: an export neither compresses nor skips anything.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, save

Tensors = dict[str, torch.Tensor]
GPT = {"hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 50304, "positions": 1024}
T5_3B = {"d_model": 1024, "d_kv": 128, "num_heads": 32, "d_ff": 16384, "vocab_size": 32128}
LLAMA = {"hidden": 4096, "ffn": 14336, "qkv": 6144, "vocab": 128256}
LLAMA_ARGUMENTS = {
    "hidden_size": LLAMA["hidden"],
    "ffn_hidden_size": LLAMA["ffn"],
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "max_position_embeddings": 131072,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "use_rope_scaling": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": LLAMA["vocab"],
}
PROMPT_TOKENS, ADAPTER, LORA = 100, 64, 16
_BLOCK = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)


@dataclass(frozen=True)
class BenchmarkSource:
    """A checkpoint on disk: its path, the largest tensor in bytes, more settings to export it."""

    path: Path
    largest: int
    settings: dict[str, Any]


def tensor(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.resize(_BLOCK, shape))


def gpt_345m(folder: Path, layers: int) -> BenchmarkSource:
    """A classic NeMo GPT of one rank, as one plain tar (345M parameters with 24 layers)."""
    return _nemo(folder, layers, tp_size=1, pp_size=1)


def gpt_tp2_pp2(folder: Path, layers: int) -> BenchmarkSource:
    """The same, written by 2 x 2 ranks."""
    return _nemo(folder, layers, tp_size=2, pp_size=2)


def gpt_with_prompts(folder: Path, layers: int) -> BenchmarkSource:
    """The first one with a prompt table of two tasks."""
    source = gpt_345m(folder, layers)
    part = folder / "prompts.nemo"
    names = ("one", "two")
    state = {
        "prompt_table": {
            f"prompt_table.{name}.prompt_embeddings.weight": tensor(PROMPT_TOKENS, GPT["hidden"])
            for name in names
        }
    }
    templates = [{"taskname": name, "total_virtual_tokens": PROMPT_TOKENS} for name in names]
    config = {
        "virtual_prompt_style": "prompt-tuning",
        "existing_tasks": list(names),
        "new_tasks": [],
        "task_templates": templates,
    }
    _archive(part, config, {"model_weights.ckpt": state})
    settings = {"prompt_checkpoints": [str(part)]}
    return BenchmarkSource(source.path, source.largest, settings)


def gpt_with_parts(folder: Path, layers: int) -> BenchmarkSource:
    """The first one with IA3, parallel adapters and LoRA on query, key and value."""
    source = gpt_345m(folder, layers)
    hidden, ffn = GPT["hidden"], GPT["ffn"]
    norm = {"layer_norm.weight": (hidden,), "layer_norm.bias": (hidden,)}
    adapter = {"linear_in.weight": (ADAPTER, hidden), "linear_out.weight": (hidden, ADAPTER)}
    ia3: dict[str, dict[str, tuple[int, ...]]] = {
        ".self_attention:key_infused_adapter": {"scalers": (hidden,)},
        ".self_attention:value_infused_adapter": {"scalers": (hidden,)},
        ".mlp:mlp_infused_adapter": {"scalers": (ffn,)},
    }
    adapters = {f":adapter_{number}": {**adapter, **norm} for number in (1, 2)}
    lora = {
        ".self_attention.adapter_layer.lora_kqv_adapter": {
            "linear_in.weight": (LORA, hidden),
            "linear_out.weight": (3 * hidden, LORA),
        }
    }
    tuning = {"adapter_tuning": {"type": "parallel_adapter", "norm_position": "pre"}}
    scale = {"peft": {"lora_tuning": {"adapter_dim": LORA, "alpha": LORA}}}
    stem = "model.language_model.encoder.layers."
    for name, modules, config in (("ia3", ia3, {}), ("adapters", adapters, tuning)):
        state = {
            f"{stem}{layer}{module}": {part: tensor(*shape) for part, shape in parts.items()}
            for layer in range(layers)
            for module, parts in modules.items()
        }
        _archive(folder / f"{name}.nemo", config, {"model_weights.ckpt": state})
    flat = {
        f"{stem}{layer}{module}.{part}": tensor(*shape)
        for layer in range(layers)
        for module, parts in lora.items()
        for part, shape in parts.items()
    }
    _archive(folder / "lora.nemo", scale, {"model_weights.ckpt": flat})
    settings = {
        "ia3_checkpoints": [str(folder / "ia3.nemo")],
        "adapter_checkpoints": [str(folder / "adapters.nemo"), str(folder / "lora.nemo")],
    }
    return BenchmarkSource(source.path, source.largest, settings)


def t5_3b(folder: Path, layers: int) -> BenchmarkSource:
    """A T5-3B of Hugging Face, one safetensors file (2.9 billion parameters with 24 layers)."""
    path = folder / "t5_3b"
    path.mkdir()
    more = {"num_layers": layers, "num_decoder_layers": layers, "model_type": "t5"}
    (path / "config.json").write_text(json.dumps({**T5_3B, **more, "tie_word_embeddings": True}))
    save_file(dict(_t5_tensors(layers)), path / "model.safetensors")
    return BenchmarkSource(path, T5_3B["vocab_size"] * T5_3B["d_model"] * 4, {})


def llama_core(folder: Path, layers: int) -> BenchmarkSource:
    """Llama 3.1 8B as Megatron-LM core saves it: torch_dist, bf16, a tensor for all layers (16 GB
    with 32 of them)."""
    path = folder / "core"
    iteration = path / "iter_0000001"
    iteration.mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("1")
    (iteration / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    state = {name: values.bfloat16() for name, values in _core_tensors(layers)}
    save(state, storage_writer=FileSystemWriter(iteration), no_dist=True)
    torch.save({"args": Namespace(num_layers=layers, **LLAMA_ARGUMENTS)}, iteration / "common.pt")
    return BenchmarkSource(path, max(values.nbytes for values in state.values()), {})


SOURCES: dict[str, Callable[[Path, int], BenchmarkSource]] = {
    "gpt": gpt_345m,
    "gpt_tp2_pp2": gpt_tp2_pp2,
    "gpt_prompts": gpt_with_prompts,
    "gpt_parts": gpt_with_parts,
    "t5_3b": t5_3b,
    "llama_core": llama_core,
}


def _core_tensors(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, ffn, vocab = LLAMA["hidden"], LLAMA["ffn"], LLAMA["vocab"]
    yield "embedding.word_embeddings.weight", tensor(vocab, hidden)
    yield "output_layer.weight", tensor(vocab, hidden)
    yield "decoder.final_layernorm.weight", tensor(hidden)
    for name, *shape in (
        ("input_layernorm", hidden),
        ("self_attention.linear_qkv", LLAMA["qkv"], hidden),
        ("self_attention.linear_proj", hidden, hidden),
        ("pre_mlp_layernorm", hidden),
        ("mlp.linear_fc1", 2 * ffn, hidden),
        ("mlp.linear_fc2", hidden, ffn),
    ):
        yield f"decoder.layers.{name}.weight", tensor(layers, *shape)


def _nemo(folder: Path, layers: int, tp_size: int, pp_size: int) -> BenchmarkSource:
    path = folder / "gpt.nemo"
    config = {
        "num_layers": layers,
        "hidden_size": GPT["hidden"],
        "ffn_hidden_size": GPT["ffn"],
        "num_attention_heads": GPT["heads"],
        "max_position_embeddings": GPT["positions"],
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": pp_size,
        "nemo_version": "1.18.1",
    }
    states = {}
    for stage in range(pp_size):
        for rank in range(tp_size):
            ranks = f"tp_rank_{rank:02}_pp_rank_{stage:03}/" if pp_size > 1 else ""
            state = dict(_gpt_tensors(layers // pp_size, tp_size, stage, pp_size))
            states[f"{ranks}model_weights.ckpt"] = state
    _archive(path, config, states)
    return BenchmarkSource(path, GPT["vocab"] * GPT["hidden"] * 4, {})


def _archive(path: Path, config: dict[str, Any], states: dict[str, dict[str, Any]]) -> None:
    tree = path.with_suffix(".tree")
    for name, state in states.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, tree / name)
    (tree / "model_config.yaml").write_text(yaml.safe_dump(config))
    with tarfile.open(path, "w") as archive:
        archive.add(tree, "./")
    shutil.rmtree(tree)


def _gpt_tensors(
    layers: int, ranks: int, stage: int, stages: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """What one rank of one stage holds."""
    stem, hidden, ffn = "model.language_model.", GPT["hidden"], GPT["ffn"] // ranks
    if stage == 0:
        yield f"{stem}embedding.word_embeddings.weight", tensor(GPT["vocab"] // ranks, hidden)
        yield f"{stem}embedding.position_embeddings.weight", tensor(GPT["positions"], hidden)
    elif stage == stages - 1:
        yield "model.word_embeddings.weight", tensor(GPT["vocab"] // ranks, hidden)
    for layer in range(layers):
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("self_attention.query_key_value", (3 * hidden // ranks, hidden)),
            ("self_attention.dense", (hidden, hidden // ranks)),
            ("post_attention_layernorm", (hidden,)),
            ("mlp.dense_h_to_4h", (ffn, hidden)),
            ("mlp.dense_4h_to_h", (hidden, ffn)),
        ):
            yield f"{stem}encoder.layers.{layer}.{name}.weight", tensor(*shape)
            yield f"{stem}encoder.layers.{layer}.{name}.bias", tensor(shape[0])
    if stage == stages - 1:
        for part in ("weight", "bias"):
            yield f"{stem}encoder.final_layernorm.{part}", tensor(hidden)


def _t5_tensors(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    width, inner, ffn = T5_3B["d_model"], T5_3B["d_kv"] * T5_3B["num_heads"], T5_3B["d_ff"]
    yield "shared.weight", tensor(T5_3B["vocab_size"], width)
    for stack, attentions in (("encoder", ("Self",)), ("decoder", ("Self", "EncDec"))):
        yield f"{stack}.final_layer_norm.weight", tensor(width)
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield bias, tensor(32, T5_3B["num_heads"])
        for layer in range(layers):
            stem = f"{stack}.block.{layer}.layer"
            for place, kind in enumerate(attentions):
                for name in "qkv":
                    yield f"{stem}.{place}.{kind}Attention.{name}.weight", tensor(inner, width)
                yield f"{stem}.{place}.{kind}Attention.o.weight", tensor(width, inner)
                yield f"{stem}.{place}.layer_norm.weight", tensor(width)
            place = len(attentions)
            yield f"{stem}.{place}.DenseReluDense.wi.weight", tensor(ffn, width)
            yield f"{stem}.{place}.DenseReluDense.wo.weight", tensor(width, ffn)
            yield f"{stem}.{place}.layer_norm.weight", tensor(width)
