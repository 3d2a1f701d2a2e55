"""A look at an exported model repository: which models, divided how.

How the text of a checkpoint's config.ini is read: by who converts and serves it, and by who
only looks something up in it.
"""

from __future__ import annotations

import configparser
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import CheckpointError, ServerError, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import kv_cache_dtype_of, quantization_of

FILE_NAME = "config.ini"


def parse_ini(text: str) -> configparser.RawConfigParser:
    """The sections, without comments behind values. Raises configparser.Error."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read_string(text)
    return parser


_BACKEND = re.compile(r'\bbackend\s*:\s*"fastertransformer"')
_PARAMETER = re.compile(
    r'key\s*:\s*"(?P<key>\w+)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"(?P<value>[^"]*)"'
)
_DECOUPLED = re.compile(r"\bdecoupled\s*:\s*true\b", re.IGNORECASE)
_MAX_BATCH_SIZE = re.compile(r"\bmax_batch_size\s*:\s*(?P<value>\d+)")
_SESSIONS = re.compile(r"\bmax_candidate_sequences\s*:\s*(?P<value>\d+)")
_DEFAULT_FILE = re.compile(r'\bdefault_model_filename\s*:\s*"(?P<value>[^"]*)"')

# What the user's `model_type` is called in config.pbtxt.
BACKEND_MODEL_TYPES = {
    "gpt3": "GPT",
    "t5": "T5",
    "mt5": "T5",
    "t5-encoder": "T5-Encoder",
    "agm": "Agm",
    "bart": "BART",
}
# The folders of the text models beside a model; a further model's carry its name in front.
TEXT_MODELS = ("preprocessing", "postprocessing", "ensemble", "text")
# Where Triton fetches a repository from by itself: S3, Google Cloud Storage, Azure Storage.
REMOTE_SCHEMES = ("s3://", "gs://", "as://")


def is_remote(repository: str) -> bool:
    """Return whether Triton fetches the repository itself, from a cloud storage."""
    return repository.startswith(REMOTE_SCHEMES)


def check_repository(repository: str) -> None:
    """A local repository must hold models; Triton itself looks at one in a cloud storage."""
    if is_remote(repository):
        return
    folder = Path(repository)
    models = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    if not models:
        got = f"{repository} (no model in it)" if folder.is_dir() else f"{repository} (no folder)"
        raise ServerError(
            problem("there is no model repository", got=got, change="deploy.model_repository")
        )


@dataclass(frozen=True)
class RepositoryModel:
    """A model of the repository that our backend serves. checkpoint_dir holds its shards.

    model_type: as config.pbtxt says it, a row of CONTRACTS
    decoupled:  whether it streams
    """

    name: str
    model_type: str
    parallelism: Parallelism
    checkpoint_dir: Path
    decoupled: bool


def served_models(repository: Path) -> list[RepositoryModel]:
    """The models of a repository whose config.pbtxt names the fastertransformer backend.

    Raises CheckpointError when a configuration lacks the sizes, ConfigError where it asks for a
    quantization or a kv_cache_dtype that there is not.
    """
    models = []
    for config in sorted(repository.glob("*/config.pbtxt")):
        text = config.read_text(encoding="utf-8", errors="replace")
        if _BACKEND.search(text):
            models.append(_served_model(config, text))
    return models


def config_parameters(text: str) -> dict[str, str]:
    """The parameters of a config.pbtxt."""
    return {match["key"]: match["value"] for match in _PARAMETER.finditer(text)}


def says_decoupled(text: str) -> bool:
    """Return whether a config.pbtxt says that the model streams."""
    return bool(_DECOUPLED.search(text))


# Numbers that a config.pbtxt has where they are not these.
_NUMBERS = {"deterministic_ranks": "1", "max_loras": "0", "max_lora_rank": "16"}


def serving_options(config: Path) -> dict[str, Any]:
    """The values of `export.triton_deployment` that a config.pbtxt was written with, by their
    names there; None for a value that it does not have.
    """
    text = config.read_text(encoding="utf-8", errors="replace")
    parameters = config_parameters(text)
    int8_mode = parameters.get("int8_mode") == "1"
    quantization = "int8" if int8_mode else parameters.get("quantization")
    draft = parameters.get("draft_model_checkpoint_path")
    values: dict[str, Any] = {
        "quantization": quantization,
        "int8_mode": int(int8_mode),
        "data_type": parameters.get("data_type"),
        "kv_cache_dtype": parameters.get("kv_cache_dtype"),
        "draft_model_dir": draft and os.path.normpath(config.parent / draft),
        "decoupled": says_decoupled(text),
        "interactive": "sequence_batching" in text,
    }
    numbers = {"max_batch_size": _MAX_BATCH_SIZE, "interactive_sessions": _SESSIONS}
    for name, pattern in numbers.items():
        if match := pattern.search(text):
            values[name] = int(match["value"])
    for name in ("enable_custom_all_reduce", "enable_prefix_caching", "deterministic"):
        values[name] = {"0": False, "1": True}.get(parameters.get(name, ""))
    for name, default in _NUMBERS.items():
        text_value = parameters.get(name, default)
        values[name] = int(text_value) if text_value.isdecimal() else None
    with suppress(ValueError):
        values["inter_token_target"] = float(parameters.get("inter_token_target", ""))
        values["pipeline_model_parallel_size"] = int(parameters.get("pipeline_para_size", ""))
    return values


def _served_model(config: Path, text: str) -> RepositoryModel:
    parameters = config_parameters(text)
    sizes = [
        parameters.get(f"{kind}_para_size", default).strip()
        for kind, default in (("tensor", ""), ("pipeline", "1"))
    ]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise CheckpointError(
            f"{config} must say tensor_para_size and pipeline_para_size; got {sizes}"
        )
    parallelism = Parallelism(int(sizes[0]), int(sizes[1]))
    int8_mode = parameters.get("int8_mode", "0").strip()
    if int8_mode.isdecimal():  # the server says what is wrong with anything else
        quantization = parameters.get("quantization", "").strip()
        quantization_of(int(int8_mode), quantization, f"{{}} in {config}")
    kv_cache_dtype_of(parameters.get("kv_cache_dtype", "").strip(), f"{{}} in {config}")
    default = _DEFAULT_FILE.search(text)
    versions = [path.name for path in config.parent.iterdir() if path.name.isdecimal()]
    folder = checkpoint_folder(
        parameters.get("model_checkpoint_path", "").strip(),
        default["value"] if default else "",
        config.parent / max(versions, key=int, default="1"),
        parallelism.tp_size,
    )
    model_type = parameters.get("model_type", "GPT")
    name = config.parent.name
    return RepositoryModel(name, model_type, parallelism, folder, says_decoupled(text))


def checkpoint_folder(
    path: str, default: str, version_dir: Path, tp_size: int, *started_in: Path
) -> Path:
    """The first folder there is of those that config.pbtxt may mean, else the likeliest.

    A relative model_checkpoint_path is looked for in the version's folder, in the model's, then
    where the server was started; without one it is `<version>/<default_model_filename>`, and
    without that `<version>/<tp_size>-gpu`. An exported path begins with its version, 1; copied to
    another one it means that one's own.

    path, default: model_checkpoint_path and default_model_filename; empty where they are not said
    started_in:    where the server was started, if that is known
    """
    defaults = version_dir / f"{tp_size}-gpu"
    if not path:
        named = version_dir / default
        return named if default and named.is_dir() else defaults
    first, *remaining = Path(path).parts or (".",)
    candidate = version_dir.joinpath(*remaining) if first.isdecimal() else version_dir / path
    likeliest = version_dir.parent / path
    candidates = (
        version_dir / path,
        candidate,
        likeliest,
        *(folder / path for folder in started_in),
    )
    return next((candidate for candidate in candidates if candidate.is_dir()), likeliest)
