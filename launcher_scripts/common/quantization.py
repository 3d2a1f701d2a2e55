"""Quantization of weights and cache, clamped activations and batch-invariant results.

The gated activation of OpenAI's gpt-oss: x * sigmoid(SLOPE * x) * (1 + gate), where x is at most
CLAMP and the gate between -CLAMP and CLAMP.
"""

from __future__ import annotations

from typing import Literal

from launcher_scripts.common.errors import ConfigError, lookup, problem

Quantization = Literal["int8", "fp8", "int4", "mxfp4", "nvfp4"]
# What can be made of the layers' matrices at load; fp8 is e4m3, mxfp4 and nvfp4 e2m1 by groups.
QUANTIZATIONS: dict[str, Quantization] = {
    "int8": "int8",
    "fp8": "fp8",
    "int4": "int4",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
FOUR_BITS: tuple[Quantization, ...] = ("int4", "mxfp4", "nvfp4")
# Of a matrix with its scales: in four bits with one for 32 weights each, of nvfp4 for 16.
BYTES_PER_WEIGHT: dict[Quantization, float] = {
    "int8": 1,
    "fp8": 1,
    "int4": 0.5 + 2 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 2 / 16,
}
# What the cache of keys and values is kept in, as vLLM names it; auto: in data_type, fp8: in e4m3.
KV_CACHE_DTYPES = {name: name for name in ("auto", "fp8")}
# int8_mode of config.pbtxt -> what it means
INT8_MODES = {0: "no quantization", 1: "int8 weights, made at load"}


def quantization_of(int8_mode: int, value: str | None, setting: str) -> Quantization | None:
    """Return the quantization for int8_mode and quantization; "" and None are no quantization.

    Raises ConfigError for what the engine does not have (the modes 2 and 3 are
    FasterTransformer's), and where one says something else than the other.

    setting: where both are said, with {} for their names
    """
    if int8_mode not in INT8_MODES:
        raise ConfigError(
            problem(
                "this int8_mode is not supported",
                got=int8_mode,
                choices=[f"{number} ({meaning})" for number, meaning in INT8_MODES.items()],
                change=setting.format("int8_mode"),
            )
        )
    change = setting.format("quantization")
    quantization = lookup(QUANTIZATIONS, value, change) if value else None
    if int8_mode and quantization not in (None, "int8"):
        raise ConfigError(
            problem(
                f"int8_mode {int8_mode} and quantization {quantization} exclude each other",
                got="both",
                choices=[f"int8_mode 0 with quantization {quantization}", "int8_mode 1 alone"],
                change=f"{setting.format('int8_mode')}, or {change}",
            )
        )
    return "int8" if int8_mode else quantization


def kv_cache_dtype_of(value: str | None, setting: str) -> str:
    """A row of KV_CACHE_DTYPES; "" and None are auto. Raises ConfigError for another one.

    setting: as in quantization_of
    """
    return lookup(KV_CACHE_DTYPES, value or "auto", setting.format("kv_cache_dtype"))


SLOPE = 1.702
CLAMP = 7.0
