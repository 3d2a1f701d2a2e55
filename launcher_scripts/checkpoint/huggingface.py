"""Hugging Face folders: config.json and weights as safetensors or torch files, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint import huggingface_configs as configs
from launcher_scripts.checkpoint.huggingface_configs import RawConfig
from launcher_scripts.errors import CheckpointError, Problems, problem
from launcher_scripts.models.family import ModelConfig

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
PREFIXES = ("transformer.", "model.")
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    "rotary_emb.inv_freq",
    "embed_positions.weights",
    "position_ids",
)


@dataclass(frozen=True)
class Architecture:
    """A row of ARCHITECTURES.

    family:   the row of FAMILIES
    read:     RawConfig -> hyperparameters
    dialect:  the dialect of the weight table
    variant:  RawConfig -> what to add to the dialect's name
    tied:     name of a tensor -> names it may be stored under instead, or twice
    """

    family: str
    read: Callable[[RawConfig], ModelConfig]
    dialect: str
    variant: Callable[[RawConfig], str] | None = None
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _scaled(raw: RawConfig) -> str:
    return "_scaled" if raw("scale_embedding", default=raw.raw["model_type"] != "bart") else ""


def _projected(raw: RawConfig) -> str:
    return "_projected" if "decoder.project_in.weight" in raw.keys else ""


_STACKS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_SHARED = {"shared.weight": (*_STACKS, "lm_head.weight")}
_HEAD = {"embed_tokens.weight": ("lm_head.weight",)}

ARCHITECTURES = {
    "gpt2": Architecture("gpt", configs.gpt2, "gpt2"),
    "bloom": Architecture("gpt", configs.bloom, "bloom"),
    "opt": Architecture(
        "gpt",
        configs.opt,
        "opt",
        _projected,
        {"decoder.embed_tokens.weight": ("lm_head.weight",)},
    ),
    "xglm": Architecture("gpt", configs.xglm, "xglm", _scaled, _HEAD),
    "llama": Architecture("gpt", configs.llama, "llama"),
    "mistral": Architecture("gpt", configs.llama, "llama"),
    "t5": Architecture("t5", configs.t5, "huggingface", tied=_SHARED),
    "mt5": Architecture("t5", configs.t5, "huggingface", tied=_SHARED),
    "bart": Architecture("bart", configs.bart, "bart", _scaled, _SHARED),
    "mbart": Architecture("bart", configs.bart, "bart", _scaled, _SHARED),
    "agm": Architecture(
        "agm",
        configs.agm,
        "agm",
        tied={"shared.weight": ("lm_head.decoder.weight", "decoder.embed_tokens.weight")},
    ),
}


def architecture(raw: Mapping[str, Any], path: Path) -> Architecture:
    """The row for a raw config.json. Agm calls itself bart, but has keys of its own."""
    agm = "mup_scale" in raw or "position_bias_per_layer" in raw
    name = "agm" if agm else raw.get("model_type")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            problem(f"{path}: unknown model_type", got=name, choices=sorted(ARCHITECTURES))
        )
    return ARCHITECTURES[name]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors first; all missing shards are one error."""
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
        if (folder / name).is_file():
            return [folder / name]
    names = list(WEIGHT_FILES) + [f"{name}.index.json" for name in WEIGHT_FILES]
    raise CheckpointError(problem(f"no weights in {folder}", choices=names))


def _shards(index: Path) -> list[Path]:
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    paths = [index.parent / name for name in names]
    problems = Problems(str(index))
    for path in paths:
        if path.parent != index.parent or not path.is_file():
            problems.add("shard is missing", got=path.name)
    problems.raise_if_any(CheckpointError)
    return paths
