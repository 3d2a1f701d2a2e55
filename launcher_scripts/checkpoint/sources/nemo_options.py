"""How values of a model_config.yaml are read, whatever model it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
