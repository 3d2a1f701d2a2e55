"""How values of a model_config.yaml are read, whatever model it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher_scripts.common.errors import Problems

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


def nemo_version(raw: Mapping[str, Any]) -> tuple[int, int]:
    """(major, minor) of the release that wrote the file; (0, 0) when it does not say."""
    match = re.match(r"(\d+)\.(\d+)", str(raw.get("nemo_version") or ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def gelu(raw: Mapping[str, Any]) -> str:
    """The fused kernel and openai_gelu are the tanh form, torch's own is the exact one."""
    fused = flag(raw, "bias_activation_fusion", flag(raw, "bias_gelu_fusion", True))
    return "gelu" if fused or flag(raw, "openai_gelu", False) else "gelu_erf"


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


def refuse_others(
    raw: Mapping[str, Any],
    problems: Problems,
    known_values: Mapping[str, tuple[Any, ...]],
    whose: str = "",
) -> None:
    """Note keys whose values change the network in ways this project does not know.

    known_values: by key, those that it does know (None: absent or null);  whose: for the text
    """
    for key, values in known_values.items():
        if raw.get(key) not in values:
            problems.add(f"{key}{whose} is not supported", got=raw.get(key), choices=values)


def choice(
    raw: Mapping[str, Any], key: str, default: str, table: Mapping[str, Any], problems: Problems
) -> Any:
    value = str(raw.get(key) or default).lower()
    if value not in table:
        problems.add(f"{key} is not supported", got=value, choices=sorted(table))
        return table[default]
    return table[value]


def size(raw: Mapping[str, Any], key: str, problems: Problems, default: int | None = None) -> int:
    """A whole number of at least 1; `default`, if any, where there is none."""
    value = raw.get(key) or default
    if type(value) is int and value > 0:
        return value
    problems.add(f"{key} must be a positive number", got=raw.get(key))
    return 1


def real(raw: Mapping[str, Any], key: str, default: float, problems: Problems) -> float:
    """A positive number, which YAML may have read as a text (1e-5)."""
    value = raw.get(key) or default
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if found > 0:
        return found
    problems.add(f"{key} must be a positive number", got=value)
    return default


def flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key)
    return default if value is None else bool(value)


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of the file; an empty one where it has none."""
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}
