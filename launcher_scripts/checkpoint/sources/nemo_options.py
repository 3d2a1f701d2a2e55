"""How values of a model_config.yaml are read, whatever model it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.checkpoint.sources.training_options import TrainingOptions

# activation -> (function, gated); "gelu" is settled by `gelu`.
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "reglu": ("relu", True),
    "fast-reglu": ("relu", True),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "squared-relu": ("squared_relu", False),
}
NORMALIZATIONS = {
    "layernorm": "layernorm",
    "layernorm1p": "layernorm",
    "low_precision_layernorm": "layernorm",
    "rmsnorm": "rmsnorm",
}


def nemo_version(options: TrainingOptions) -> tuple[int, int]:
    """(major, minor) of the release that wrote the file; (0, 0) when it does not say."""
    match = re.match(r"(\d+)\.(\d+)", str(options.get("nemo_version") or ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def gelu(options: TrainingOptions) -> str:
    """The fused kernel and openai_gelu are the tanh form, torch's own is the exact one."""
    fused = options.flag("bias_activation_fusion", options.flag("bias_gelu_fusion", True))
    return "gelu" if fused or options.flag("openai_gelu", False) else "gelu_erf"


@dataclass(frozen=True)
class NemoModel:
    """What a model_config.yaml says.

    fields:   the family's hyperparameters, but vocab_size (the table's rows) and the token ids
    dialects: dialects of the weight table, the first that has a row wins
    notes:    what a user should know about the model, if anything
    """

    fields: Mapping[str, Any]
    dialects: tuple[str, ...]
    notes: tuple[str, ...] = ()


def nemo_dialects(*, fused: bool, plus_one: bool, legacy: bool = False) -> tuple[str, ...]:
    """Dialects of the weight table for tensors under NeMo's classic names.

    Variants come first: a row of theirs goes before the plain dialect's.
    fused:    a gate lies in one matrix with what it gates
    plus_one: norms' scales are stored as their distance from one
    legacy:   query, key and value lie in Megatron-LM's older order
    """
    variants = {"nemo_fused_gate": fused, "nemo_legacy": legacy, "nemo_plus_one": plus_one}
    return (*(name for name, there in variants.items() if there), "nemo")


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of the file; an empty one where it has none."""
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}
