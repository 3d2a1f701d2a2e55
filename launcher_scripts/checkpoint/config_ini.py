"""config.ini of a GPT checkpoint: FasterTransformer's own keys and this project's extension.

Section [gpt] starts with the keys FasterTransformer's NeMo converter writes, in its order, and goes
on with the keys its runtime reads and that converter forgets. Section [extension] holds the
hyperparameters that FasterTransformer has no words for. docs/checkpoint-format.md lists them all.
"""

from __future__ import annotations

import configparser
import dataclasses
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.models.gpt import GPTConfig

FILE_NAME = "config.ini"
EXTENSION_VERSION = 1

# GPTConfig's fields that [gpt] expresses completely, by the key that holds them.
_SIZES = {
    "head_num": "num_heads",
    "size_per_head": "head_size",
    "inter_size": "ffn_size",
    "num_layer": "num_layers",
    "max_pos_seq_len": "max_positions",
    "vocab_size": "vocab_size",
    "start_id": "start_id",
    "end_id": "end_id",
}
# FasterTransformer's names of (activation, gated); its Gelu is the tanh form.
_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
    "geglu": ("gelu", True),
    "reglu": ("relu", True),
    "siglu": ("silu", True),
}
_ACTIVATION_NAMES = {
    ("gelu", False): "Gelu",
    ("gelu_erf", False): "Gelu",
    ("relu", False): "Relu",
    ("silu", False): "Silu",
    ("gelu", True): "GeGLU",
    ("gelu_erf", True): "GeGLU",
    ("relu", True): "ReGLU",
    ("silu", True): "SiGLU",
}
_EXTENSION_FIELDS = (
    "hidden_size",
    "num_kv_heads",
    "position_embedding",
    "rotary_percentage",
    "rotary_base",
    "rotary_interpolation_factor",
    "alibi_layer_scaling",
    "normalization",
    "activation",
    "gated",
    "attention_bias",
    "mlp_bias",
    "tied_embeddings",
    "pad_id",
)
_BOOLEANS = configparser.RawConfigParser.BOOLEAN_STATES


@dataclass(frozen=True)
class ConfigIni:
    """What one config.ini says: the model, and how its files are cut and typed."""

    config: GPTConfig
    tp_size: int
    weight_data_type: str


def format_config(config: GPTConfig, tp_size: int, weight_data_type: str) -> str:
    """The text of config.ini."""
    parser = configparser.RawConfigParser()
    parser["gpt"] = {
        "model_name": "gpt",
        "tensor_para_size": str(tp_size),
        "head_num": str(config.num_heads),
        "size_per_head": str(config.head_size),
        "inter_size": str(config.ffn_size),
        "num_layer": str(config.num_layers),
        "max_pos_seq_len": str(config.max_positions),
        "weight_data_type": weight_data_type,
        "vocab_size": str(config.vocab_size),
        "start_id": str(config.start_id),
        "end_id": str(config.end_id),
        "layernorm_eps": repr(config.norm_eps),
        "layernorm_type": f"{config.norm_placement}_layernorm",
        "activation_type": _ACTIVATION_NAMES.get(
            (config.activation, config.gated), config.activation
        ),
        "has_positional_encoding": str(config.position_embedding == "learned"),
        "has_pre_decoder_layernorm": str(config.embedding_norm),
        "has_post_decoder_layernorm": str(config.final_norm),
        "use_attention_linear_bias": str(config.position_embedding == "alibi"),
    }
    extension = {name: getattr(config, name) for name in _EXTENSION_FIELDS}
    parser["extension"] = {"version": str(EXTENSION_VERSION)} | {
        name: str(value) for name, value in extension.items() if value is not None
    }
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def read_config(folder: Path) -> ConfigIni:
    """Read `folder`/config.ini, this project's or the original's.

    Keys the original leaves out take its runtime's defaults; what its file does not say at all
    (a separate output layer, the tensor-parallel size of an OPT checkpoint) is read from the
    names in the folder. Raises CheckpointError with every problem found.
    """
    path = folder / FILE_NAME
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not parser.has_section("gpt"):
        raise CheckpointError(
            problem(f"{path} is no GPT checkpoint's", got=parser.sections(), choices=["gpt"])
        )
    keys = _Keys(path, dict(parser["gpt"]))
    values = _gpt_values(keys, folder)
    if parser.has_section("extension"):
        values |= _extension_values(path, dict(parser["extension"]), keys)
    tp_size = keys.number("tensor_para_size", _size_in_name(folder))
    weight_data_type = keys.text("weight_data_type", "fp32", ("fp32", "fp16"))
    keys.problems.raise_if_any(CheckpointError)
    try:
        return ConfigIni(GPTConfig(**values), tp_size, weight_data_type)
    except LauncherError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _gpt_values(keys: _Keys, folder: Path) -> dict[str, Any]:
    """GPTConfig's fields from [gpt] alone, with the defaults of FasterTransformer's runtime."""
    values: dict[str, Any] = {}
    for key, field in _SIZES.items():
        default = {"start_id": 50256, "end_id": 50256, "max_pos_seq_len": 2048}.get(key)
        values[field] = keys.number(key, default)
    values["hidden_size"] = values["num_heads"] * values["head_size"]
    values["num_kv_heads"] = values["num_heads"]
    values["norm_eps"] = keys.real("layernorm_eps", 1e-6)
    placement = keys.text("layernorm_type", "pre_layernorm", ("pre_layernorm", "post_layernorm"))
    values["norm_placement"] = placement.removesuffix("_layernorm")
    values["embedding_norm"] = keys.boolean("has_pre_decoder_layernorm", False)
    values["final_norm"] = keys.boolean("has_post_decoder_layernorm", True)
    activation = keys.values.get("activation_type", "Gelu").lower()
    values["activation"], values["gated"] = _ACTIVATIONS.get(activation, (activation, False))
    learned = keys.boolean("has_positional_encoding", True)
    alibi = keys.boolean("use_attention_linear_bias", False)
    values["position_embedding"] = "alibi" if alibi else "learned" if learned else "none"
    values["tied_embeddings"] = not (folder / "model.lm_head.weight.bin").exists()
    if keys.values.get("model_variant", "").endswith("-post") and placement == "pre_layernorm":
        keys.problems.add(
            "residuals taken after the norm are not supported", got=keys.values["model_variant"]
        )
    if keys.boolean("has_adapters", False):
        keys.problems.add("adapter layers are not supported", got="has_adapters = True")
    return values


def _extension_values(path: Path, section: Mapping[str, str], gpt_keys: _Keys) -> dict[str, Any]:
    """GPTConfig's fields from [extension]; an unknown key means a newer format."""
    keys = _Keys(path, section, gpt_keys.problems)
    version = keys.number("version", EXTENSION_VERSION)
    if version != EXTENSION_VERSION:
        keys.problems.add(
            f"{path}: unknown extension version", got=version, choices=[EXTENSION_VERSION]
        )
    for name in sorted(section.keys() - {"version", *_EXTENSION_FIELDS}):
        keys.problems.add(f"{path}: unknown extension key", got=name, choices=_EXTENSION_FIELDS)
    types = {field.name: str(field.type) for field in dataclasses.fields(GPTConfig)}
    readers = {"int": keys.number, "float": keys.real, "bool": keys.boolean}
    values: dict[str, Any] = {}
    for name in section.keys() & set(_EXTENSION_FIELDS):
        reader = readers.get(types[name].split(" ")[0])
        values[name] = section[name] if reader is None else reader(name, None)
    return values


class _Keys:
    """The keys of one section, read with a type; problems are collected."""

    def __init__(
        self, path: Path, values: Mapping[str, str], problems: Problems | None = None
    ) -> None:
        self.path = path
        self.values = values
        self.problems = problems if problems is not None else Problems(str(path))

    def number(self, key: str, default: int | None) -> int:
        return int(self._read(key, int, default, 1))

    def real(self, key: str, default: float | None) -> float:
        return float(self._read(key, float, default, 1.0))

    def boolean(self, key: str, default: bool | None) -> bool:
        return bool(self._read(key, lambda text: _BOOLEANS[text.lower()], default, False))

    def text(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        value = self.values.get(key, default)
        if value not in choices:
            self.problems.add(f"unknown {key}", got=value, choices=choices)
        return value

    def _read(self, key: str, convert: Any, default: Any, stand_in: Any) -> Any:
        """The value; `stand_in` keeps the reading going after a problem was noted."""
        if key not in self.values:
            if default is None:
                self.problems.add("missing key", got=key)
                return stand_in
            return default
        try:
            return convert(self.values[key])
        except (ValueError, KeyError):
            self.problems.add(f"wrong value of {key}", got=self.values[key])
            return stand_in


def _size_in_name(folder: Path) -> int | None:
    match = re.fullmatch(r"(\d+)-gpu", folder.resolve().name)
    return int(match.group(1)) if match else None
