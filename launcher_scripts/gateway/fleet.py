"""The gateway's servers: found by their ready files, asked how they are, forgotten when gone; their
models, and the properties of these that the gateway needs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.config_ini import read_config
from launcher_scripts.clients.async_connection import ServerFailure, TritonServer
from launcher_scripts.clients.remote import parameter, parameters_of
from launcher_scripts.common.errors import (
    CheckpointError,
    ConfigError,
    Problems,
    ServerError,
    problem,
)
from launcher_scripts.common.files import (
    READY_FILES,
    STALE_SECONDS,
    DigestChain,
    parse_json,
    read_plain,
    ready_paths,
    seconds_silent,
)
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
from launcher_scripts.config.security import ClientTls
from launcher_scripts.gateway.backend import Backend, Replica, Replicas, ServerBackend
from launcher_scripts.gateway.metrics import cache_use, server_metrics
from launcher_scripts.gateway.served_model import DEFAULT, ChatTemplate, ServedModel
from launcher_scripts.gateway.triton_backend import TritonBackend
from launcher_scripts.models.adapters import adapters_of
from launcher_scripts.models.repository import FILE_NAME, is_remote, served_models

LOG = logging.getLogger("gateway")
# Whether prompts are the encoder's input, by the model_type of config.pbtxt.
GENERATING = {"GPT": False, "T5": True, "BART": True}
EMBEDDING = "T5-Encoder"  # the model_type of an encoder alone
_START_SECONDS = 0.2  # between two looks at servers that are not there yet
_CHECK_SECONDS = 1.0
_MAX_SECONDS = 16.0  # between two looks at a server that does not come back
_LOAD_SECONDS = 2.0  # between two looks at a server's metrics
_MIN_SECONDS = 0.1  # between a server's failure and the look at it


@dataclass(frozen=True)
class TokenModel:
    """A token model that a server serves. folder: where its tokenizer may lie."""

    config: Mapping[str, Any]
    text_parameters: Mapping[str, str]
    folder: Path | None
    backend: ServerBackend


@dataclass(eq=False)
class Member:
    """One server of the fleet.

    next_check: by time.monotonic(), of one that is not healthy
    failures:   so many checks have failed one after another
    why:        the last one did
    """

    replica: Replica
    server: TritonServer
    ready: Mapping[str, Any] = field(default_factory=dict)
    token_models: Mapping[str, TokenModel] = field(default_factory=dict)
    next_check: float = -math.inf
    failures: int = 0
    why: str = ""


class Fleet:
    """All servers that the ready files name; `replicas` has them in the order in which they came.

    A server whose ready file goes gets no new rows, and is forgotten when its last one has ended.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.replicas: list[Replica] = []
        self._settings = settings
        self._members: dict[str, Member] = {}  # by their addresses
        self._files: dict[Path, Mapping[str, Any]] = {}  # what the ready files said last
        self._tls: ClientTls | None = None
        if settings.server_ca is not None:
            self._tls = ClientTls(
                settings.server_ca, settings.server_certificate, settings.server_key
            )
        self._failed = asyncio.Event()

    async def until_ready(self) -> dict[str, TokenModel]:
        """Every model that a server serves, once each place of the settings has a healthy server.

        Raises ServerError where that takes longer than ready_timeout.
        """
        deadline = time.monotonic() + self._settings.ready_timeout
        while True:
            await self.find()
            for member in self._members.values():
                member.next_check = -math.inf
            await self.check(time.monotonic())
            missing = [why for path in self._settings.ready if (why := self._missing(Path(path)))]
            if not missing:
                healthy = [member for member in self._members.values() if member.replica.healthy]
                return {
                    k: v for member in reversed(healthy) for k, v in member.token_models.items()
                }
            if time.monotonic() > deadline:
                seconds = f"{self._settings.ready_timeout:g}"
                message = f"no server was ready within {seconds} s: {'; '.join(missing)}"
                raise ServerError(problem(message, change="--ready or --ready-timeout"))
            await asyncio.sleep(_START_SECONDS)

    async def watch(self) -> None:
        """Look after the servers until cancelled. A file system that hangs holds up no check."""

        async def files() -> None:
            await asyncio.sleep(_CHECK_SECONDS)
            await self.find()

        async def servers() -> None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._failed.wait(), _CHECK_SECONDS)
                await asyncio.sleep(_MIN_SECONDS)
            self._failed.clear()
            await self.check(time.monotonic())

        async def loads() -> None:
            await asyncio.sleep(_LOAD_SECONDS)
            await self.check_loads()

        await asyncio.gather(_repeat(files), _repeat(servers), _repeat(loads))

    async def find(self) -> None:
        """Read the ready files: which servers there are now."""
        listed = await asyncio.to_thread(self._listed, set(self._members))
        for address, ready in listed.items():
            if address not in self._members:
                self._join(address)
            self._members[address].ready = ready
        for address, member in self._members.items():
            leaving = address not in listed
            if leaving != member.replica.leaving:
                LOG.info("server %s %s", address, "leaves" if leaving else "is back")
            member.replica.leaving = leaving

    async def check(self, now: float) -> None:
        """Look at every server whose time has come; forget those that have left. now: seconds"""
        for address, member in list(self._members.items()):
            if member.replica.leaving and not member.replica.running:
                del self._members[address]
                self.replicas.remove(member.replica)
                await member.server.close()
        members = [member for member in self._members.values() if not member.replica.leaving]
        await asyncio.gather(
            *(_check(member, now) for member in members if member.next_check <= now)
        )

    async def check_loads(self) -> None:
        """Read how full the servers' caches are. It decides nothing: it is for people to see."""

        async def update(member: Member) -> None:
            replica = member.replica
            replica.metrics_address = _metrics_address(member.ready) if replica.healthy else None
            replica.cache_use = cache_use(await server_metrics(replica.metrics_address))

        await asyncio.gather(*(update(member) for member in self._members.values()))

    async def close(self) -> None:
        """Leave all servers."""
        for member in self._members.values():
            await member.server.close()

    def _join(self, address: str) -> None:
        def check_again() -> None:
            member.next_check = -math.inf
            self._failed.set()

        replica = Replica(address, on_failure=check_again)
        member = Member(replica, TritonServer(address, self._tls))
        self._members[address] = member
        self.replicas.append(replica)

    def _missing(self, position: Path) -> str | None:
        """Why a place of the settings has no healthy server; None: it has one."""
        why = f"{position} has no {' or '.join(READY_FILES)}"
        for path in ready_paths(position):
            why, ready = _read_ready(path)
            member = self._members.get(str(ready["grpc"])) if ready is not None else None
            if member is not None:
                if member.replica.healthy:
                    return None
                why = member.why
        return why

    def _listed(self, excluded: Container[str]) -> dict[str, Mapping[str, Any]]:
        """Address -> ready file. excluded: addresses that may be old: their servers are asked.

        A file that cannot be opened now, as where this process has no descriptor left, says nothing
        of its server, which stays.
        """
        files: dict[Path, Mapping[str, Any]] = {}
        for path in itertools.chain.from_iterable(
            map(ready_paths, map(Path, self._settings.ready))
        ):
            try:
                ready: Mapping[str, Any] | None = _load_ready(path, excluded)[1]
            except FileNotFoundError:
                continue
            except OSError as error:
                LOG.warning("%s cannot be read: %s", path, error)
                ready = self._files.get(path)
            if ready is not None:
                files[path] = ready
        self._files = files
        return {str(ready["grpc"]): ready for ready in files.values()}


async def _repeat(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            LOG.exception("the servers could not be looked after")
            await asyncio.sleep(_CHECK_SECONDS)


async def _check(member: Member, now: float) -> None:
    """Check that the server is healthy. One that was not is asked for its models again."""
    replica = member.replica
    try:
        if not replica.healthy:
            member.token_models = await _models_of(member.server, member.ready)
        for name in member.token_models:
            if not await member.server.is_ready(name):
                raise ServerFailure(f"{name} is not ready")
    except ServerFailure as error:
        member.why = f"the server at {replica.address} does not answer: {error.message()}"
        if replica.healthy:
            LOG.warning("%s", member.why)
        replica.healthy = False
        member.next_check = now + min(_MAX_SECONDS, _CHECK_SECONDS * 2**member.failures)
        member.failures += 1
        return
    if not replica.healthy:
        replica.backends = {name: model.backend for name, model in member.token_models.items()}
        LOG.info("server %s is healthy and serves %s", replica.address, sorted(member.token_models))
    replica.healthy, member.failures, member.next_check = True, 0, -math.inf


def _metrics_address(ready: Mapping[str, Any]) -> str | None:
    """Where a server's metrics are read; of a closed one only on its node, by its user."""
    address = ready.get("metrics") or (ready.get("listens_on") or {}).get("metrics")
    return None if address is None else str(address)


def _read_ready(path: Path) -> tuple[str, dict[str, Any] | None]:
    """The content of a ready file, or why there is none to use yet."""
    try:
        return _load_ready(path)
    except FileNotFoundError:
        return f"{path} is not there", None
    except OSError as error:
        return f"{path} cannot be read: {error}", None


def _load_ready(path: Path, excluded: Container[str] = ()) -> tuple[str, dict[str, Any] | None]:
    """As _read_ready. Raises OSError where the file cannot be opened.

    excluded: addresses of servers that are asked themselves whether they live
    """
    try:
        ready = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(ready, dict):
            raise ValueError("it holds no mapping")
        age = seconds_silent(ready)
    except (ValueError, TypeError) as error:
        return f"{path} cannot be read: {error}", None
    if "grpc" not in ready:
        return f"{path} gives no grpc address", None
    if age is not None and age > STALE_SECONDS and str(ready["grpc"]) not in excluded:
        return f"{path} was last renewed {age:.0f} s ago: its server was killed", None
    return "", ready


async def _models_of(server: TritonServer, ready: Mapping[str, Any]) -> dict[str, TokenModel]:
    """The token models of a server. Raises ServerFailure where it does not answer."""
    configs = {name: await server.model_config(name) for name in await server.models()}
    text = {
        parameters["token_model"]: parameters
        for config in configs.values()
        if "token_model" in (parameters := parameters_of(config))
    }
    folders = await asyncio.to_thread(_folders, str(ready.get("model_repository") or ""))
    return {
        name: TokenModel(
            config, text.get(name, {}), folders.get(name), TritonBackend(server, config)
        )
        for name, config in configs.items()
        if config.get("backend") == "fastertransformer"
        and (parameter(config, "model_type") or "GPT") in (*GENERATING, EMBEDDING)
        and "sequence_batching" not in config
    }


def _folders(repository: str) -> dict[str, Path]:
    """Model -> the folder of its checkpoint; none for a repository that is not to be read here."""
    if not repository or is_remote(repository) or not Path(repository).is_dir():
        return {}
    return {model.name: model.checkpoint_dir for model in served_models(Path(repository))}


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
