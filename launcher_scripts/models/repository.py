"""A look at an exported model repository, for the login side: which models, divided how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.errors import CheckpointError
from launcher_scripts.parallel import Parallelism

_BACKEND = re.compile(r'\bbackend\s*:\s*"fastertransformer"')
_PARAMETER = re.compile(
    r'key\s*:\s*"(?P<key>\w+)"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"(?P<value>[^"]*)"'
)

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
TEXT_MODELS = ("preprocessing", "postprocessing", "ensemble")
# Where Triton fetches a repository from by itself: S3, Google Cloud Storage, Azure Storage.
REMOTE_SCHEMES = ("s3://", "gs://", "as://")


def is_remote(repository: str) -> bool:
    """Whether Triton fetches the repository itself, from a cloud storage."""
    return repository.startswith(REMOTE_SCHEMES)


@dataclass(frozen=True)
class ServedModel:
    """A model of the repository that our backend serves. checkpoint_dir holds its shards.

    model_type: as config.pbtxt says it, a row of CONTRACTS
    """

    name: str
    model_type: str
    parallelism: Parallelism
    checkpoint_dir: Path


def served_models(repository: Path) -> list[ServedModel]:
    """The models of a repository whose config.pbtxt names the fastertransformer backend.

    Raises CheckpointError when a configuration lacks the sizes.
    """
    models = []
    for config in sorted(repository.glob("*/config.pbtxt")):
        text = config.read_text(encoding="utf-8", errors="replace")
        if _BACKEND.search(text):
            models.append(_served_model(config, text))
    return models


def _served_model(config: Path, text: str) -> ServedModel:
    parameters = {match["key"]: match["value"] for match in _PARAMETER.finditer(text)}
    sizes = [parameters.get(f"{kind}_para_size", "") for kind in ("tensor", "pipeline")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise CheckpointError(
            f"{config} must say tensor_para_size and pipeline_para_size; got {sizes}"
        )
    parallelism = Parallelism(int(sizes[0]), int(sizes[1]))
    folder = config.parent / parameters.get("model_checkpoint_path", f"1/{parallelism.tp_size}-gpu")
    model_type = parameters.get("model_type", "GPT")
    return ServedModel(config.parent.name, model_type, parallelism, folder)
