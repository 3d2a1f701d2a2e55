"""Models of the servers, and their properties that the gateway needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.clients.remote import parameter
from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems, problem
from launcher_scripts.common.files import DigestChain, parse_json, read_plain
from launcher_scripts.common.tokenizer import (
    COMPANION_FILES,
    GENERATION_FILE,
    OPTIONAL_FILES,
    SpecialIds,
    Tokenizer,
    TokenizerError,
    chat_templates,
    load_tokenizer,
)
from launcher_scripts.config.gateway import GatewaySettings
from launcher_scripts.gateway.backend import Backend, Replicas
from launcher_scripts.gateway.fleet import EMBEDDING, GENERATING, Fleet, TokenModel
from launcher_scripts.gateway.served_model import DEFAULT, ChatTemplate, ServedModel
from launcher_scripts.models.adapters import adapters_of
from launcher_scripts.models.repository import FILE_NAME

# A prompt with more characters has too many tokens, unless most of it is white space.
CHARS_PER_TOKEN = 32
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


async def load_models(settings: GatewaySettings, fleet: Fleet) -> list[ServedModel]:
    """The models of all servers of the fleet, once they are ready.

    Raises ServerError where they are not in time, ConfigError where none can be served as text.
    """
    result = await fleet.until_ready()
    if unknown := sorted({*settings.models} - result.keys()):
        subject = "no server serves a model of this name that generates or encodes text"
        raise ConfigError(problem(subject, got=unknown, choices=sorted(result), change="--models"))
    problems = Problems("the models that the gateway could serve")
    models = []
    for name in sorted({*(settings.models or result)}):
        with problems.collecting():
            models.append(_served(name, result[name], Replicas(name, fleet.replicas), settings))
    if not result:
        subject = "no server serves a model that generates or encodes text"
        problems.add(subject, got=list(settings.ready))
    if not models:
        problems.raise_if_any(ConfigError)
    for message in problems.messages:
        print(f"not served: {message}", flush=True)
    return models


def local_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template beside a tokenizer, None without one; ValueError for a damaged one."""
    files = _companions(folder)
    return _template(files, _token_names(files, tokenizer))


def _companions(folder: Path) -> dict[str, bytes]:
    """Name -> content of the files beside a tokenizer."""
    present = [file for file in COMPANION_FILES if (folder / file).is_file()]
    return {name: read_plain(folder / name) for name in present}


def _served(
    name: str, model: TokenModel, backend: Backend, settings: GatewaySettings
) -> ServedModel:
    """The model with its tokenizer. Raises ConfigError for one that has none."""
    folder = Path(settings.tokenizer_dir) if settings.tokenizer_dir else model.folder
    if folder is None:
        raise ConfigError(
            problem(f"where the tokenizer of {name} lies is not known", change="--tokenizer-dir")
        )
    try:
        tokenizer = load_tokenizer(folder)
        files = _companions(folder)
        generation = _mapping(files, GENERATION_FILE)
        tokens = _token_names(files, tokenizer)
        template = _template(files, tokens, settings.chat_template)
        max_len, end_id = _sizes(folder, tokenizer.end_id)
        lora_names = adapters_in(model.folder or folder)
    except (TokenizerError, ValueError, OSError, CheckpointError) as error:
        raise ConfigError(problem(f"{name}: {error}", change="--tokenizer-dir")) from error
    special = SpecialIds.of(model.text_parameters)
    max_len = settings.max_model_len or max_len
    model_type = parameter(model.config, "model_type") or "GPT"
    return ServedModel(
        name=name,
        backend=backend,
        tokenizer=tokenizer,
        template=template,
        special=special,
        end_ids=tuple(token_id for token_id in (end_id, *special.ends) if token_id is not None),
        defaults={
            key: generation[key]
            for key in _SAMPLING
            if isinstance(generation.get(key), int | float) and generation[key] >= 0
        },
        max_len=max_len,
        max_chars=settings.max_prompt_chars or (max_len and max_len * CHARS_PER_TOKEN),
        encodes=GENERATING.get(model_type, True),
        embeds=model_type == EMBEDDING,
        token_names=tokens,
        digests=_digests(model.folder),
        lora_names=lora_names,
    )


def _digests(folder: Path | None) -> DigestChain | None:
    """The digests of exported shards; None where they have no manifest, or are not to be read."""
    try:
        return None if folder is None else DigestChain.of(folder)
    except (OSError, ValueError):
        return None


def _sizes(folder: Path, end_id: int | None) -> tuple[int | None, int | None]:
    """The positions of the model and its end token, by config.ini; without one the tokenizer's.

    A T5 has relative positions, and no end of them.
    """
    if not (folder / FILE_NAME).is_file():
        return None, end_id
    config: Any = read_config(folder).config
    limited = getattr(config, "position_embedding", None) in ("learned", "rope")
    return (config.max_positions if limited else None), config.end_id


def adapters_in(folder: Path) -> tuple[str, ...]:
    """The LoRA adapters of the checkpoint in the folder, by its config.ini."""
    if not (folder / FILE_NAME).is_file():
        return ()
    return adapters_of(read_config(folder).config).lora_names


def _template(
    files: Mapping[str, bytes], tokens: Mapping[str, str], other: str | None = None
) -> ChatTemplate | None:
    """Return the template of the file `other`, else the checkpoint's, if it has one."""
    if other is None:
        source, templates = "the chat template", chat_templates(files)
    else:
        source, templates = other, {DEFAULT: Path(other).read_text(encoding="utf-8")}
    try:
        return ChatTemplate(templates, tokens) if templates else None
    except ValueError as error:
        raise ValueError(f"{source} is not a valid Jinja template: {error}") from error


def _token_names(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token and the like, as the files beside the tokenizer say them, else the tokenizer."""
    ids = {
        "bos_token": tokenizer.start_id,
        "eos_token": tokenizer.end_id,
        "pad_token": tokenizer.pad_id,
    }
    names = {
        name: tokenizer.token_bytes(token_id).decode(errors="replace")
        for name, token_id in ids.items()
        if token_id is not None
    }
    for file in OPTIONAL_FILES:
        raw = _mapping(files, file)
        for name in _NAMED_TOKENS:
            token = raw.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[name] = token
    return names


def _mapping(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The content of a JSON file; {} without it. Raises ValueError for a damaged one."""
    content = parse_json(files.get(name, b"{}"))
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds no mapping")
    return content
