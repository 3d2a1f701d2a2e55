"""The parameters of config.pbtxt as engine settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.engine.core.requests import MAX_BEAMS
from launcher_scripts.engine.engine import EngineSettings
from launcher_scripts.models.repository import checkpoint_folder

WHERE = "parameters in config.pbtxt"
SERVERS_OWN = {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"}  # of its Python backend

PARAMETERS = (
    "tensor_para_size",
    "pipeline_para_size",
    "data_type",
    "model_type",
    "model_checkpoint_path",
    "draft_model_checkpoint_path",
    "int8_mode",
    "quantization",
    "kv_cache_dtype",
    "enable_custom_all_reduce",
    "inter_token_target",
    "enable_prefix_caching",
    "deterministic",
)
# So the guides' sections on several nodes call the pipeline's size.
PIPELINES_OLD_NAME = "layer_para_size"
# The original's guides call these bool, its files say 0 or 1.
FLAGS = ("enable_custom_all_reduce", "enable_prefix_caching", "deterministic")
FLAG_WORDS = {"false": "0", "true": "1"}

# max_batch_size bounds one request; rows of many requests run together whatever it is, and the
# widest beam search fits.
ROWS_IN_FLIGHT = MAX_BEAMS


def model_type(config: Mapping[str, Any]) -> str:
    """The row of CONTRACTS that config.pbtxt names."""
    return _strings(config).get("model_type", "GPT")


def engine_settings(
    config: Mapping[str, Any], model_dir: Path, version: str, device: str
) -> EngineSettings:
    """What config.pbtxt (as Triton's JSON) asks for; wrong values raise one ConfigError.

    Parameters without a meaning are named in the server's log: old guides have some (is_half).

    Where the checkpoint is looked for: see checkpoint_folder.
    """
    values = _strings(config)
    if unknown := sorted(values.keys() - set(PARAMETERS) - SERVERS_OWN):
        print(f"{WHERE} without a meaning: {', '.join(unknown)}", file=sys.stderr, flush=True)
    problems = Problems("the model's config.pbtxt")
    numbers = {
        name: _integer(values, name, least, default, problems)
        for name, least, default in (
            ("tensor_para_size", 1, None),
            ("pipeline_para_size", 1, "1"),
            ("int8_mode", 0, "0"),
            *((name, 0, "0") for name in FLAGS),
        )
    }
    layers = values.get(PIPELINES_OLD_NAME)
    if layers not in (None, str(numbers["pipeline_para_size"])):
        problems.add(
            f"{PIPELINES_OLD_NAME} is not read, and pipeline_para_size says something else",
            got=layers,
            change=f"pipeline_para_size of the {WHERE}",
        )
    served = model_type(config)
    if served not in CONTRACTS:
        problems.add("unknown model_type", got=served, choices=CONTRACTS, change=WHERE)
    quantization, kv_cache_dtype = None, "auto"
    with problems.collecting():
        quantization = quantization_of(
            numbers["int8_mode"], values.get("quantization"), f"{{}} of the {WHERE}"
        )
    with problems.collecting():
        kv_cache_dtype = kv_cache_dtype_of(values.get("kv_cache_dtype"), f"{{}} of the {WHERE}")
    inter_token_target = _seconds(
        values, "inter_token_target", EngineSettings.inter_token_target, problems
    )
    problems.raise_if_any(ConfigError)
    parallelism = Parallelism(numbers["tensor_para_size"], numbers["pipeline_para_size"])
    version_dir, draft = model_dir / version, values.get("draft_model_checkpoint_path")
    return EngineSettings(
        checkpoint_dir=checkpoint_folder(
            values.get("model_checkpoint_path", ""),
            config.get("default_model_filename", ""),
            version_dir,
            parallelism.tp_size,
            Path.cwd(),
        ),
        draft_checkpoint_dir=checkpoint_folder(
            draft, "", version_dir, parallelism.tp_size, Path.cwd()
        )
        if draft
        else None,
        model_type=served,
        data_type=values.get("data_type", "fp32"),
        parallelism=parallelism,
        device=device,
        max_batch_size=max(ROWS_IN_FLIGHT, int(config.get("max_batch_size", 1))),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        inter_token_target=inter_token_target,
        **{name: bool(numbers[name]) for name in FLAGS},
    )


def _integer(
    values: Mapping[str, str], name: str, least: int, default: str | None, problems: Problems
) -> int:
    text = values.get(name, default)
    if name in FLAGS and text is not None:
        text = FLAG_WORDS.get(text.lower(), text)
    if text is None:
        problems.add(f"{name} is missing", change=WHERE)
        return least
    if not text.isdecimal() or int(text) < least:
        problems.add(f"{name} must be a number of at least {least}", got=text, change=WHERE)
        return least
    return int(text)


def _seconds(values: Mapping[str, str], name: str, default: float, problems: Problems) -> float:
    """A time of 0 or more."""
    text = values.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        problems.add(f"{name} must be a number of seconds, 0 or more", got=text, change=WHERE)
    return seconds


def _strings(config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of config.pbtxt that are texts."""
    return {
        name: value["string_value"].strip()
        for name, value in config.get("parameters", {}).items()
        if "string_value" in value
    }
