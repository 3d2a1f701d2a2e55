"""What a decode step of a served model has to read, by the files of its repository."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import LauncherError
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.evaluation.served.tokenizer_dir import read_model_ini
from launcher_scripts.models.repository import config_parameters, served_models

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
# Not read whole: positions, embeddings beside a head, and of T5 the encoder with the keys and
# values that are made of its output.
_GPT = re.compile(r"model\.(layers\.|final_layernorm|lm_head)")
_T5 = re.compile(r"decoder\.(?!.*EncDecAttention\.[kv]\.)|lm_head\.")
# With one of these a step reads a part that depends on the tokens.
_PARTIAL = {"num_experts", "sliding_window"}


def step_reads(ready: Mapping[str, Any], model_name: str) -> dict[str, float] | None:
    """`step_bytes` of weights, `token_bytes` of keys and values per token of context, and `ranks`.

    step_bytes are those of all ranks together, of which `ranks` (tensor-parallel ones) read at
    once. None where the repository cannot be read from here, for quantized weights, and for a model
    that reads only a part of itself.
    """
    try:
        repository = Path(ready["model_repository"])
        model = next(model for model in served_models(repository) if model.name == model_name)
        text = (repository / model_name / "config.pbtxt").read_text(encoding="utf-8")
        parameters = config_parameters(text)
        ini = read_model_ini(model.checkpoint_dir)
        item_bytes = ITEM_BYTES[parameters["data_type"]]
        mode, said = int(parameters.get("int8_mode", "0")), parameters.get("quantization")
        if quantization_of(mode, said, "{}") or _PARTIAL & set(_section(ini, "extension")):
            return None
        in_bytes = kv_cache_dtype_of(parameters.get("kv_cache_dtype"), "{}") == "fp8"
        weights, cached = _gpt(ini, model.checkpoint_dir) if "gpt" in ini else _t5(ini)
        main = ini["gpt" if "gpt" in ini else "decoder"]
        stored = ITEM_BYTES[main["weight_data_type"]]
        files = (path for path in model.checkpoint_dir.glob("*.bin") if weights.match(path.name))
        return {
            "step_bytes": sum(path.stat().st_size for path in files) / stored * item_bytes,
            "token_bytes": float(cached * (1 if in_bytes else item_bytes)),
            "ranks": model.parallelism.tp_size,
        }
    except (LauncherError, OSError, KeyError, ValueError, StopIteration):
        return None


def _gpt(ini: configparser.RawConfigParser, folder: Path) -> tuple[re.Pattern[str], int]:
    """The files that a step reads, and the numbers that it keeps for every token."""
    gpt = ini["gpt"]
    heads = int(_section(ini, "extension").get("num_kv_heads", gpt["head_num"]))
    cached = 2 * int(gpt["num_layer"]) * heads * int(gpt["size_per_head"])
    if any(folder.glob("model.lm_head.weight*")):
        return _GPT, cached
    return re.compile(rf"{_GPT.pattern}|model\.wte"), cached


def _t5(ini: configparser.RawConfigParser) -> tuple[re.Pattern[str], int]:
    decoder = ini["decoder"]
    heads = int(_section(ini, "extension").get("num_kv_heads", decoder["num_heads"]))
    return _T5, 2 * int(decoder["num_layers"]) * heads * int(decoder["d_kv"])


def _section(ini: configparser.RawConfigParser, name: str) -> Mapping[str, str]:
    return ini[name] if ini.has_section(name) else {}
