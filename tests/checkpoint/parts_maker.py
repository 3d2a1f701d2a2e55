"""Makes NeMo's checkpoints of adapters for a small GPT or T5, cut for any TP and PP."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.checkpoint_maker import rank_folder

Tensors = dict[str, torch.Tensor]


def write_parts(
    path: Path, states: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> Path:
    """states: folder of a rank ("" for the only one) -> state dict."""
    members = {"model_config.yaml": yaml.safe_dump(dict(config or {})).encode()}
    for folder, state in states.items():
        buffer = io.BytesIO()
        torch.save(state, buffer)
        members[f"{folder}/model_weights.ckpt".lstrip("/")] = buffer.getvalue()
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def ranks(layers: Mapping[int, Tensors], axes: Mapping[str, int], tp: int, pp: int, stack: str):
    """State dicts of all ranks: stages count their layers from 0.

    layers: global number -> name behind the layer's -> whole tensor
    axes:   last part of a name -> the axis that ranks share; absent: whole on every rank
    """
    per_stage = len(layers) // pp
    states = {}
    for stage in range(pp):
        for rank in range(tp):
            state: dict[str, Any] = {}
            for local in range(per_stage):
                for name, tensor in layers[stage * per_stage + local].items():
                    axis = next((axis for end, axis in axes.items() if name.endswith(end)), None)
                    part = tensor if axis is None else tensor.chunk(tp, axis)[rank]
                    state[f"{stack}{local}{name}"] = part.clone()
            states[rank_folder(tp, pp, rank, stage)] = state
    return states


def nested(states: Mapping[str, Tensors]) -> dict[str, dict[str, Tensors]]:
    """As NeMo 1.18 nests them: a dictionary per module, its name ending at the part."""
    out: dict[str, dict[str, Tensors]] = {}
    for folder, state in states.items():
        modules: dict[str, Tensors] = {}
        for name, tensor in state.items():
            module, _, rest = name.partition("|")
            modules.setdefault(module, {})[rest] = tensor
        out[folder] = modules
    return out


def flat(states: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """As NeMo 1.23 names them."""
    return {
        folder: {
            name.replace(":", ".adapter_layer.").replace("|", "."): tensor
            for name, tensor in state.items()
        }
        for folder, state in states.items()
    }


class Random:
    """Tensors of a reproducible generator."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self._random.standard_normal(shape).astype(np.float32))


def ia3_layers(random: Random, layers: int, width: int, ffn: int) -> dict[int, Tensors]:
    return {
        layer: {
            ".self_attention:key_infused_adapter|scalers": random(width),
            ".self_attention:value_infused_adapter|scalers": random(width),
            ".mlp:mlp_infused_adapter|scalers": random(ffn),
        }
        for layer in range(layers)
    }


def adapter_layers(random: Random, layers: int, hidden: int, size: int) -> dict[int, Tensors]:
    return {
        layer: {
            f":adapter_{number}|{name}": random(*shape)
            for number in (1, 2)
            for name, shape in (
                ("linear_in.weight", (size, hidden)),
                ("linear_out.weight", (hidden, size)),
                ("layer_norm.weight", (hidden,)),
                ("layer_norm.bias", (hidden,)),
            )
        }
        for layer in range(layers)
    }


def prompt_state(tables: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A filled prompt table as NeMo 1.18 stores it."""
    table: Tensors = {}
    for task, values in tables.items():
        table[f"prompt_table.{task}.prompt_embeddings.weight"] = values
        table[f"prompt_table.{task}.indices"] = torch.arange(len(values))
    return {"prompt_table": table}


def prompt_config(**lengths: int) -> dict[str, Any]:
    return {
        "task_templates": [
            {"taskname": task, "total_virtual_tokens": length} for task, length in lengths.items()
        ]
    }
