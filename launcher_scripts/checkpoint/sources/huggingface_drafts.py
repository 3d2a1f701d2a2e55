"""Draft heads in Hugging Face folders: layers for multi-token prediction, and EAGLE-3's.

A layer for multi-token prediction is stored after a model's last layer (DeepSeek-V3, GLM-4.5) or in
a module of its own (Qwen3-Next). Its tables are copies of the model's, which the engine takes. A
folder of EAGLE-3 has the head alone, and maps its vocabulary to the model's: `d2t` has the ids of
its rows, each less the row's index, and `t2d` marks the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.sources.huggingface_raw import (
    PREDICTING,
    PREDICTORS,
    RawConfig,
)
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.models.draft_heads import EAGLE3, IDS, MTP
from launcher_scripts.models.gpt import GPTConfig

Tensors = dict[str, SourceTensor]

EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Names in the layer after the last one, and in the module `mtp` -> the weight table's.
_IN_LAYER = {
    "enorm.weight": "draft.embedding_norm.weight",
    "hnorm.weight": "draft.hidden_norm.weight",
    "eh_proj.weight": "draft.input.weight",
    "shared_head.norm.weight": "norm.weight",
}
_IN_MODULE = {
    "pre_fc_norm_embedding.weight": "draft.embedding_norm.weight",
    "pre_fc_norm_hidden.weight": "draft.hidden_norm.weight",
    "fc.weight": "draft.input.weight",
    "norm.weight": "norm.weight",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
# Model types whose layer for multi-token prediction is known: its names outside of the layer, and
# values of a config.json of this layer alone, which has experts if any layer of the model has.
_Row = tuple[Mapping[str, str], Mapping[str, Any]]
PREDICTION_LAYERS: dict[str, _Row] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), (_IN_LAYER, {"first_k_dense_replace": 0})),
    "glm4_moe_lite": (
        _IN_LAYER,
        {"mlp_layer_types": ["sparse"], "first_k_dense_replace": None},
    ),
    **dict.fromkeys(
        PREDICTING, (_IN_MODULE, {"layer_types": ["full_attention"], "mlp_only_layers": []})
    ),
}
_ONE_LAYER = {"num_hidden_layers": 1, "tie_word_embeddings": True, "architectures": None}
_EAGLE3_NAMES = {
    "hidden_norm.weight": "draft.hidden_norm.weight",
    "fc.weight": "draft.input.weight",
    "d2t": IDS,
    "t2d": None,
    "embed_tokens.weight": None,
}


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Return whether config.json is of a head of EAGLE-3."""
    classes = raw.get("architectures")
    return isinstance(classes, list) and any(name in EAGLE3_CLASSES for name in classes)


def eagle3(tensors: Tensors, raw: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Return the head's tensors by the names of the weight table, and its config.json as a Llama's
    of one layer."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        plain = name.replace("midlayer.", "layers.0.")
        target = _EAGLE3_NAMES.get(plain.removeprefix("layers.0."), plain)
        if target == IDS:  # below 2 ** 24, so exact
            tensor = SourceTensor.full(tensor.read().astype(np.float32))
        if target is not None:
            result[target] = tensor
    return result, {**raw, "architectures": None, "tie_word_embeddings": True}


def prediction_layer(
    tensors: Tensors, raw: Mapping[str, Any], path: str
) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a model's first layer for multi-token prediction, as of a model of this
    layer alone, and the config.json of such a model.

    Raises CheckpointError where there is none, or where its names are unknown.
    """
    row = PREDICTION_LAYERS.get(raw["model_type"])
    if row is None:
        raise CheckpointError(
            problem(
                f"{path}: layers for multi-token prediction of this model type are not supported",
                got=raw["model_type"],
                choices=sorted(PREDICTION_LAYERS),
                change="export.model.prediction_layer",
            )
        )
    names, changes = row
    layer = f"layers.{raw.get('num_hidden_layers')}."
    prefix = "mtp." if names is _IN_MODULE else layer
    result: Tensors = {}
    for name, tensor in tensors.items():
        local = name.removeprefix(prefix)
        if local != name and local not in _COPIES:
            in_layer = names is _IN_LAYER and local not in names
            result[f"layers.0.{local}" if in_layer else names.get(local, local)] = tensor
    if "draft.input.weight" not in result:
        raise CheckpointError(
            problem(
                f"{path} has no layer for multi-token prediction",
                got=f"no tensors {prefix}*",
                change="export.model.prediction_layer",
            )
        )
    result = {name: t for name, t in result.items() if not re.match(r"layers\.[1-9]", name)}
    return result, {**raw, **_ONE_LAYER, **changes}


def as_head(config: GPTConfig, raw: RawConfig, kind: str) -> GPTConfig:
    """Return the configuration of a head from the one of its layer."""
    vocabulary = raw.size("draft_vocab_size", default=config.vocab_size) if kind == EAGLE3 else None
    return replace(config, draft_head=kind, draft_vocab_size=vocabulary, tied_embeddings=False)


def head_kind(raw: Mapping[str, Any], predicts: bool) -> str | None:
    """Return the kind of a folder's draft head; None for a full model."""
    return EAGLE3 if is_eagle3(raw) else MTP if predicts else None


def without_predictors(tensors: Tensors, raw: Mapping[str, Any]) -> tuple[Tensors, bool]:
    """Return the tensors without those of layers after the last one that predict further tokens,
    if config.json says that there may be such; and whether there were."""
    layers = raw.get("num_hidden_layers")
    promised = raw.get("model_type") in PREDICTING or any(raw.get(key) for key in PREDICTORS)
    if not isinstance(layers, int) or not promised:
        return tensors, False
    remaining = {}
    for name, tensor in tensors.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if not name.startswith("mtp") and (layer is None or int(layer[1]) < layers):
            remaining[name] = tensor
    return remaining, len(remaining) < len(tensors)
