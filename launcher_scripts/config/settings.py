"""The contract between the login half and the job half: one typed, checked request per stage.

A stage writes its settings as YAML into the job folder; the steps of the job read that file and
nothing else. Sizes are in bytes, times in seconds unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from launcher_scripts.common.atomic_write import atomic_write
from launcher_scripts.common.errors import ConfigError, Problems, problem
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.ready_file import replica_file
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.config.schema import build
from launcher_scripts.config.security import LOOPBACK, ClientTls, ServerSecurity
from launcher_scripts.config.tasks import BenchmarkSettings, TaskSettings

DATA_TYPES = ("fp32", "fp16", "bf16")
WEIGHT_DATA_TYPES = ("fp32", "fp16", "bf16")
SOURCES = ("auto", "nemo", "megatron", "megatron_core", "huggingface", "gguf", "random")
DEVICES = ("auto", "cpu", "cuda")
PROTOCOLS = ("http", "grpc")


@dataclass(frozen=True)
class TokenizerSettings:
    """Where the tokenizer comes from: `auto` (the checkpoint's own), `none`, or `files`."""

    source: str = "auto"
    library: str | None = None
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    start_id: int | None = None
    end_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        choices = ("auto", "none", "files")
        if self.source not in choices:
            raise ConfigError(
                problem(
                    "unknown tokenizer",
                    got=self.source,
                    choices=("auto", "none", "a mapping with library, model, vocab_file, ..."),
                    change="export.model.tokenizer",
                )
            )


@dataclass(frozen=True)
class ExportSettings:
    """Turn one checkpoint into a model repository.

    triton_model_dir is the model's folder inside the repository; shards go to
    <triton_model_dir>/1/<tp_size>-gpu. model_type is what the model is served as; "" where only the
    shards are wanted. num_attention_heads is for checkpoints that do not say it.
    prompt_, ia3_ and adapter_checkpoints are added to the base in order; ia3_in_place folds IA3
    into the weights. allow_nonfinite: weights may be NaN or infinite. decoupled: the served model
    answers as tokens come. interactive: its requests belong to sessions, interactive_sessions of
    them at once.
    """

    model_name: str
    model_type: str
    checkpoint_path: str
    triton_model_dir: str
    parallelism: Parallelism = Parallelism()
    weight_data_type: str = "fp32"
    processes: int = 16
    overwrite: bool = False
    tokenizer: TokenizerSettings = TokenizerSettings()
    max_batch_size: int = 1
    int8_mode: int = 0
    enable_custom_all_reduce: bool = False
    data_type: str = "fp32"
    decoupled: bool = False
    interactive: bool = False
    interactive_sessions: int = 32
    source: str = "auto"
    num_attention_heads: int | None = None
    encoder_only: bool = False
    prompt_checkpoints: tuple[str, ...] = ()
    ia3_checkpoints: tuple[str, ...] = ()
    ia3_in_place: bool = False
    adapter_checkpoints: tuple[str, ...] = ()
    training_checkpoint: str = "last"
    verify: bool = False
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        problems = Problems("the export settings")
        problems.check_choice("source", self.source, SOURCES, "export.model.source")
        problems.check_choice(
            "weight_data_type",
            self.weight_data_type,
            WEIGHT_DATA_TYPES,
            "export.model.weight_data_type",
        )
        problems.check_choice(
            "data_type",
            self.data_type,
            DATA_TYPES,
            "export.triton_deployment.data_type",
        )
        if self.source == "random" and self.tokenizer.source == "auto":
            problems.add(
                "random weights come without a tokenizer",
                choices=("none", "a mapping with library, model, vocab_file, ..."),
                change="export.model.tokenizer",
            )
        problems.check_at_least("processes", self.processes, 1, "export.model.processes")
        problems.check_at_least(
            "max_batch_size",
            self.max_batch_size,
            1,
            "export.triton_deployment.max_batch_size",
        )
        problems.check_at_least(
            "interactive_sessions",
            self.interactive_sessions,
            1,
            "export.triton_deployment.interactive_sessions",
        )
        if self.interactive and self.model_type != "gpt3":
            problems.add(
                "interactive text generation needs a decoder-only model",
                got=self.model_type,
                choices=("gpt3",),
                change="export.triton_deployment.interactive",
            )
        if self.interactive and self.max_batch_size != 1:
            problems.add(
                "a model with sessions has max_batch_size 1; interactive_sessions says how many "
                "are served at once",
                got=self.max_batch_size,
                change="export.triton_deployment.max_batch_size",
            )
        problems.raise_if_any(ConfigError)

    @property
    def model_repository(self) -> Path:
        """The repository Triton is given: the folder that holds the model's folder."""
        return Path(self.triton_model_dir).parent

    @property
    def checkpoint_dir(self) -> Path:
        """Where the shards go."""
        return Path(self.triton_model_dir) / "1" / f"{self.parallelism.tp_size}-gpu"


@dataclass(frozen=True)
class DeploySettings:
    """Serve one model repository until stopped. Port 0 means a free one.

    host is the address to listen on; None: the node's own, see node_address. public_host is what
    the ready file gives to clients; None: the node's own name. max_waiting_rows: rows of one model
    that may wait for their turn; requests beyond that are refused.
    job_folder tells this run of a server from every other one. replica: which of several servers
    of the same run this is; their ready files have its number. network_interface: name or network
    (10.0.0.0/16) of what the ranks of several nodes talk over; None: any. restarts: how often a
    server that was ready may be started again after it lost a rank or died. model_repository may
    be in a cloud storage (s3://, gs://, as://); cloud_credentials is Triton's file of keys for it.
    numpy_dir: a folder with numpy 1 for a server whose Python backend needs it; None: none needed.
    gateway: OpenAI's interface beside the server; None: there is none.
    """

    stage: ClassVar[str] = "deploy"

    model_repository: str
    results_dir: str
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str | None = LOOPBACK
    device: str = "auto"
    tritonserver: str | None = None
    numpy_dir: str | None = None
    public_host: str | None = None
    ready_timeout: float = 1800.0
    stop_timeout: float = 30.0
    cloud_credentials: str | None = None
    job_folder: str | None = None
    replica: int | None = None
    network_interface: str | None = None
    restarts: int = 0
    max_waiting_rows: int = 512
    security: ServerSecurity = ServerSecurity()
    gateway: DeployedGateway | None = None

    def __post_init__(self) -> None:
        problems = Problems("the deploy settings")
        problems.check_choice("device", self.device, DEVICES, "deploy.server.device")
        for name in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self, name)
            if not 0 <= port < 65536:
                problems.add(
                    f"{name} is not a valid port",
                    got=port,
                    choices=("0 (a free one)", "1-65535"),
                    change=f"deploy.server.{name}",
                )
        openai = self.gateway and self.gateway.port
        fixed = [p for p in (self.http_port, self.grpc_port, self.metrics_port, openai) if p]
        if len(set(fixed)) < len(fixed):
            change = "deploy.server or deploy.gateway.port"
            problems.add("two of the server's ports are equal", got=fixed, change=change)
        for name in ("ready_timeout", "stop_timeout"):
            problems.check_at_least(name, getattr(self, name), 0, f"deploy.server.{name}")
        problems.check_at_least("restarts", self.restarts, 0, "deploy.restarts")
        key = "deploy.server.max_waiting_rows"
        problems.check_at_least("max_waiting_rows", self.max_waiting_rows, 1, key)
        problems.raise_if_any(ConfigError)

    @property
    def hosts(self) -> dict[str, str]:
        """The addresses that http, grpc and metrics listen on."""
        return self.security.hosts(LOOPBACK if self.host is None else self.host)

    @property
    def ready_file(self) -> Path:
        """Written when the server is ready: http, grpc, metrics as host:port, models, ranks."""
        return replica_file(Path(self.results_dir) / "ready.json", self.replica)


@dataclass(frozen=True)
class GatewayJobSettings:
    """One gateway before all servers of `ready`, as a job of its own. Times in seconds.

    ready: ready files of the servers, or the folders that hold them. host and public_host are as
    in DeploySettings. ready_timeout: how long to wait until each of `ready` has a server.
    stop_timeout: for running requests, once it is stopped. restarts: how often a gateway that was
    ready may be started again. tokenizer_dir: see GatewaySettings.
    """

    stage: ClassVar[str] = "gateway"

    ready: tuple[str, ...]
    results_dir: str
    gateway: DeployedGateway
    host: str | None = LOOPBACK
    public_host: str | None = None
    tokenizer_dir: str | None = None
    ready_timeout: float = 1800.0
    stop_timeout: float = 30.0
    restarts: int = 0
    job_folder: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the settings of the gateway's job")
        if not self.ready:
            problems.add("no server is named", change="gateway.ready")
        for name in ("ready_timeout", "stop_timeout"):
            problems.check_at_least(name, getattr(self, name), 0, f"gateway.{name}")
        problems.check_at_least("restarts", self.restarts, 0, "deploy.restarts")
        problems.raise_if_any(ConfigError)

    @property
    def ready_file(self) -> Path:
        """Written when the gateway answers: openai as http://host:port/v1, and models."""
        return Path(self.results_dir) / "ready.json"


@dataclass(frozen=True)
class EvaluateSettings:
    """Measure the model served at the address in `ready_file`; reports go to results_dir.

    server_job_folder is that of the run of the server that is meant; None: whoever is ready.
    replicas: of how many servers the requests go to; 0: of the one of `ready_file` itself.
    """

    ready_file: str
    results_dir: str
    model_name: str
    tokenizer_dir: str
    tasks: tuple[TaskSettings, ...] = ()
    benchmark: BenchmarkSettings | None = None
    ready_timeout: float = 1800.0
    request_timeout: float = 600.0
    protocol: str = "http"
    server_job_folder: str | None = None
    replicas: int = 0
    grpc_tls: ClientTls | None = None

    def __post_init__(self) -> None:
        problems = Problems("the evaluate settings")
        problems.check_choice("protocol", self.protocol, PROTOCOLS, "evaluate.protocol")
        for name in ("ready_timeout", "request_timeout"):
            problems.check_at_least(name, getattr(self, name), 0, f"evaluate.{name}")
        if not self.tasks and self.benchmark is None:
            problems.add("nothing to measure", change="evaluate.tasks or evaluate.benchmark")
        problems.raise_if_any(ConfigError)


Settings = TypeVar("Settings", ExportSettings, DeploySettings, GatewayJobSettings, EvaluateSettings)


def settings_text(settings: Any) -> str:
    """One stage's settings as YAML."""
    plain = _plain(dataclasses.asdict(settings))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10_000)


def write_settings(settings: Any, path: Path) -> None:
    """Write one stage's settings as YAML, completely or not at all."""
    atomic_write(path, settings_text(settings))


def read_settings(kind: type[Settings], path: Path) -> Settings:
    """Read what write_settings wrote; unknown or missing keys are errors that name them."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}") from error
    return build_settings(kind, values, str(path))


def build_settings(kind: type[Settings], values: Any, origin: str) -> Settings:
    """A settings object from plain mappings and lists; `origin` names them in errors."""
    return build(kind, values, origin)


def _plain(value: Any) -> Any:
    """The value with tuples as lists, so that YAML stays plain."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
