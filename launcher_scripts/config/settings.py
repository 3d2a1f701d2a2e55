"""The contract between the login half and the job half: one typed, checked request per stage.

A stage writes its settings as YAML into the job folder; the steps of the job read that file and
nothing else. Sizes are in bytes, times in seconds unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from launcher_scripts.common.errors import ConfigError, Problems
from launcher_scripts.common.files import CANDIDATE, READY, atomic_write, replica_file
from launcher_scripts.common.packages import ERROR
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import KV_CACHE_DTYPES, QUANTIZATIONS
from launcher_scripts.config.evaluation import (
    BenchmarkSettings,
    HarnessSettings,
    LoadSettings,
    ReferenceSettings,
    TaskSettings,
)
from launcher_scripts.config.export import HuggingFaceOptions, TokenizerSettings
from launcher_scripts.config.gateway import DeployedGateway
from launcher_scripts.config.options import (
    PORTS,
    ConfigPath,
    SecretPath,
    build,
    check_options,
    is_required,
    option,
    option_metadata,
)
from launcher_scripts.config.policy import PolicySettings
from launcher_scripts.config.security import (
    LOOPBACK,
    VERIFY_SIGNATURE,
    ClientTls,
    ServerSecurity,
    SigningKey,
    TrustedSigner,
)

AUTO = "auto"
DATA_TYPES = ("fp32", "fp16", "bf16")
SOURCES = (
    *("auto", "nemo", "megatron", "megatron_core", "huggingface", "gguf", "fastertransformer"),
    "random",
)
EXPORT_FORMATS = ("fastertransformer", "huggingface")
DEVICES = ("auto", "cpu", "cuda")
PROTOCOLS = ("http", "grpc")
PROMOTIONS = ("after_gate",)
EXPORTS = ("mlflow", "wandb")
MIN_IDLE_TIMEOUT = 1


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of reading and converting a checkpoint, in the block `export.model`.

    prompt_, ia3_ and adapter_checkpoints are added to the base in order, and lora_checkpoints are
    kept beside it under the names of their files or folders.
    """

    weight_data_type: str = option(
        AUTO,
        "data type of the written files; auto: the checkpoint's own",
        choices=(AUTO, *DATA_TYPES),
    )
    processes: int = option(16, "most processes", lower=1)
    overwrite: bool = option(False, "replace an earlier export in the same folder")
    reuse: bool = option(
        True, "keep the weights of an earlier export of the same checkpoint and settings"
    )
    source: str = option("auto", "format of the checkpoint", choices=SOURCES)
    num_attention_heads: int | None = option(
        None, "attention heads, for a checkpoint that does not say how many"
    )
    encoder_only: bool = option(False, "export only the encoder of an encoder-decoder")
    prediction_layer: bool = option(
        False, "export only the layer for multi-token prediction, as a draft model"
    )
    prompt_checkpoints: tuple[ConfigPath, ...] = option(
        (), "virtual tokens to add, in this order", metavar="PATH"
    )
    ia3_checkpoints: tuple[ConfigPath, ...] = option(
        (), "IA3 vectors to add, in this order", metavar="PATH"
    )
    ia3_in_place: bool = option(False, "fold IA3 into the weights")
    adapter_checkpoints: tuple[ConfigPath, ...] = option(
        (), "adapters and LoRA to add, in this order", metavar="PATH"
    )
    lora_checkpoints: tuple[ConfigPath, ...] = option(
        (), "LoRA adapters of which each request chooses one", metavar="PATH"
    )
    training_checkpoint: str = option(
        "last", "which checkpoint of a training folder", metavar="last|best|NAME"
    )
    verify: bool = option(
        False,
        "rebuild every tensor from the written files and compare with the source; where "
        "transformers (for Megatron-LM core's, megatron-core) is installed, its logits too",
    )
    allow_nonfinite: bool = option(False, "export NaN and infinite weights as they are")
    digest_source: bool | None = option(
        None,
        "record digests of the checkpoint's files in the manifest; by default if the export is "
        "signed or the checkpoint has under 8 GiB",
    )
    allow_custom_code_config: bool = option(
        False,
        "export a Hugging Face model as the one of its model_type, although its config.json names "
        "code or a class of its own",
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of serving the model, in the block `export.triton_deployment`."""

    max_batch_size: int = option(1, "most rows of one request", lower=1)
    quantization: str | None = option(
        None, "quantization of the layers' matrices at load", choices=tuple(QUANTIZATIONS)
    )
    kv_cache_dtype: str = option(
        "auto", "data type of the key/value cache", choices=tuple(KV_CACHE_DTYPES)
    )
    enable_custom_all_reduce: bool = False
    inter_token_target: float = option(
        0.05,
        "seconds that a step over prompts may take while tokens are generated; 0: no limit",
        lower=0,
    )
    enable_prefix_caching: bool | None = option(
        None,
        "compute what prompts of a decoder-only model have in common once; by default unless it "
        "is deterministic or has sessions",
    )
    deterministic: bool = option(
        False, "tokens do not depend on the requests beside, also on a GPU"
    )
    deterministic_ranks: int = option(
        1,
        "number of tensor-parallel ranks whose bits a deterministic model of one rank has",
        lower=1,
    )
    max_loras: int = option(0, "LoRA adapters that can be added while the model is served", lower=0)
    max_lora_rank: int = option(16, "the largest rank of these", lower=1)
    draft_model_dir: ConfigPath | None = option(
        None,
        "the exported files of a small model that proposes tokens, <model>/1/<N>-gpu",
        metavar="FOLDER",
    )
    data_type: str = option(
        AUTO,
        "data type that the engine computes in; auto: the weights' own, and bf16 instead of "
        "fp32 on GPUs that have it",
        choices=(AUTO, *DATA_TYPES),
    )
    decoupled: bool = option(False, "stream tokens as they are generated")
    interactive: bool = option(False, "let requests belong to sessions")
    interactive_sessions: int = option(32, "most sessions at the same time", lower=1)


# Where a user names the checkpoint that is exported, and its draft model's files.
CHECKPOINT_KEY = "export.model.checkpoint_path"
DRAFT_MODEL_KEY = "export.triton_deployment.draft_model_dir"
DECODER_ONLY = ("", "gpt3", "agm")


@dataclass(frozen=True)
class ExportSettings(ServingOptions, ModelOptions):
    """Turn one checkpoint into a model repository.

    triton_model_dir is the model's folder inside the repository; shards go to
    <triton_model_dir>/1/<tp_size>-gpu. model_type is what the model is served as; "" where only the
    shards are wanted. device: of the server, as in ServerOptions. sign: None: no signature. With
    format huggingface a transformers folder is written instead, as `huggingface` says.
    """

    model_name: str
    model_type: str
    checkpoint_path: ConfigPath = field(
        metadata=option_metadata(
            "a .nemo file, an unpacked one, the folder of a training, of Megatron-LM or of Hugging "
            "Face, or a GGUF file",
            metavar="PATH",
        )
    )
    triton_model_dir: ConfigPath = field(
        metadata=option_metadata(
            "the model's folder; the shards go to 1/<N>-gpu in it", metavar="FOLDER"
        )
    )
    parallelism: Parallelism = Parallelism()
    tokenizer: TokenizerSettings = TokenizerSettings()
    device: str = "auto"
    sign: SigningKey | None = None
    format: str = option(
        "fastertransformer",
        "what is written: shards of the engine, or a transformers folder",
        choices=EXPORT_FORMATS,
    )
    huggingface: HuggingFaceOptions = HuggingFaceOptions()

    @staticmethod
    def key_of(name: str) -> str:
        """Return the key where an option is changed."""
        if name == "format":
            return "export.format"
        of_serving = name in (item.name for item in dataclasses.fields(ServingOptions))
        return f"export.{'triton_deployment' if of_serving else 'model'}.{name}"

    def __post_init__(self) -> None:
        problems = Problems("the export settings")
        check_options(self, problems, self.key_of)
        check_options(self.huggingface, problems, "export.huggingface.{}".format)
        if self.format == "huggingface":
            lists = ("prompt_checkpoints",)
            self.huggingface.check(problems, [n for n in lists if getattr(self, n)])
        if self.source == "random" and self.tokenizer.source == "auto":
            problems.add(
                "random weights come without a tokenizer",
                choices=("none", "a mapping with library, model, vocab_file, ..."),
                change="export.model.tokenizer",
            )
        if self.interactive and self.model_type != "gpt3":
            problems.add(
                "interactive text generation needs a decoder-only model",
                got=self.model_type,
                choices=("gpt3",),
                change="export.triton_deployment.interactive",
            )
        if self.draft_model_dir is not None and (
            self.interactive or self.model_type not in DECODER_ONLY
        ):
            problems.add(
                "a draft model needs a decoder-only model without sessions",
                got=self.model_type + " with sessions" * self.interactive,
                choices=("gpt3", "agm"),
                change=DRAFT_MODEL_KEY,
            )
        if self.deterministic_ranks > 1 and not self.deterministic:
            problems.add(
                "deterministic_ranks is of a deterministic model",
                got=self.deterministic_ranks,
                choices=(1,),
                change="export.triton_deployment.deterministic_ranks, or .deterministic",
            )
        if self.max_loras and (self.interactive or self.model_type not in ("", "gpt3")):
            problems.add(
                "adapters can be added to a decoder-only model without sessions",
                got=self.model_type + " with sessions" * self.interactive,
                choices=("gpt3",),
                change="export.triton_deployment.max_loras",
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
    def shares_prefixes(self) -> bool:
        """Return whether what prompts have in common is computed once."""
        if self.enable_prefix_caching is not None:
            return self.enable_prefix_caching
        return self.model_type in DECODER_ONLY and not (self.deterministic or self.interactive)

    @property
    def model_repository(self) -> Path:
        """The repository Triton is given: the folder that holds the model's folder."""
        return Path(self.triton_model_dir).parent

    @property
    def checkpoint_dir(self) -> Path:
        """Where the shards go, or the transformers folder."""
        if self.format == "huggingface":
            return Path(str(self.huggingface.folder))
        return Path(self.triton_model_dir) / "1" / f"{self.parallelism.tp_size}-gpu"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server, in the block `deploy.server`. Port 0 means a free one.

    host is the address to listen on; None: the node's own, see node_address. public_host is what
    the ready file gives to clients; None: the node's own name. max_waiting_rows: rows of one model
    that may wait for their turn; requests beyond that are refused. network_interface: name or
    network (10.0.0.0/16) of what the ranks of several nodes talk over; None: any.
    cloud_credentials is Triton's file of keys for a repository in a cloud storage.
    numpy_dir: a folder with numpy 1 for a server whose Python backend needs it; None: none needed.
    """

    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str | None = LOOPBACK
    device: str = option("auto", "device that the engine runs on", choices=DEVICES)
    tritonserver: str | None = None
    numpy_dir: str | None = None
    public_host: str | None = None
    ready_timeout: float = option(1800.0, "seconds until the server must be ready", lower=0)
    stop_timeout: float = option(
        30.0, "seconds that running requests may take at shutdown", lower=0
    )
    max_waiting_rows: int = option(512, "most rows of one model that wait for their turn", lower=1)
    cloud_credentials: SecretPath | None = None
    network_interface: str | None = None
    security: ServerSecurity = ServerSecurity()

    @property
    def ports(self) -> dict[str, int]:
        """The ports by the names of their options."""
        names = ("http_port", "grpc_port", "metrics_port")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DeploySettings(ServerOptions):
    """Serve one model repository until stopped.

    job_folder tells this run of a server from every other one. replica: which of several servers
    of the same run this is; their ready files have its number. restarts: how often a server that
    was ready may be started again after it lost a rank or died. idle_timeout: seconds without
    requests after which it ends by itself; None: it never does. model_repository may be in a cloud
    storage (s3://, gs://, as://). gateway: OpenAI's interface beside the server; None: none.
    promote: after_gate holds the server back until an evaluation's verdict is GO: it has a
    candidate file instead of the ready file; None: it is not held back. closed: a gateway in a
    job of its own has keys; see is_closed. verify_signature: whose signature the repository must
    have; None: it needs none.
    """

    stage: ClassVar[str] = "deploy"

    model_repository: str
    results_dir: str
    job_folder: str | None = None
    replica: int | None = None
    restarts: int = 0
    idle_timeout: float | None = None
    gateway: DeployedGateway | None = None
    promote: str | None = None
    closed: bool = False
    verify_signature: TrustedSigner | None = None

    def __post_init__(self) -> None:
        problems = Problems("the deploy settings")
        if self.verify_signature is not None and "://" in self.model_repository:
            problems.add(
                "a signature can be verified only where the repository is a folder",
                got=self.model_repository,
                change=f"deploy.model_repository, or {VERIFY_SIGNATURE}=null",
            )
        if self.is_closed:
            self.security.check_closed(problems)
        elif self.gateway is not None:
            self.security.check_gateway(problems)
        if self.promote is not None:
            problems.check_choice("promote", self.promote, PROMOTIONS, "deploy.promote")
        check_options(self, problems, "deploy.server.{}".format)
        for name, port in self.ports.items():
            if not 0 <= port < 65536:
                change = f"deploy.server.{name}"
                problems.add(f"{name} is not a valid port", got=port, choices=PORTS, change=change)
        openai = self.gateway and self.gateway.port
        fixed = [port for port in (*self.ports.values(), openai) if port]
        if len(set(fixed)) < len(fixed):
            change = "deploy.server or deploy.gateway.port"
            problems.add("two of the server's ports are equal", got=fixed, change=change)
        problems.check_minimum("restarts", self.restarts, 0, "deploy.restarts")
        if self.idle_timeout is not None:
            key = "deploy.idle_timeout"
            problems.check_minimum("idle_timeout", self.idle_timeout, MIN_IDLE_TIMEOUT, key)
        problems.raise_if_any(ConfigError)

    @property
    def is_closed(self) -> bool:
        """Return whether only this start's credentials open Triton: the gateway has keys."""
        return self.closed or (self.gateway is not None and self.gateway.api_keys is not None)

    @property
    def hosts(self) -> dict[str, str]:
        """The addresses that http, grpc and metrics listen on; of a closed server that of grpc."""
        hosts = self.security.hosts(LOOPBACK if self.host is None else self.host)
        return {"grpc": hosts["grpc"]} if self.is_closed else hosts

    @property
    def ready_file(self) -> Path:
        """Written when the server is ready: http, grpc, metrics as host:port, models, ranks."""
        return replica_file(Path(self.results_dir) / READY, self.replica)

    @property
    def candidate_file(self) -> Path | None:
        """File of a server that is held back, in place of the ready file."""
        if self.promote is None:
            return None
        return replica_file(Path(self.results_dir) / CANDIDATE, self.replica)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of evaluating a served model, in the block `evaluate`.

    replicas: of how many servers the requests go to; 0: of the one of `ready_file` itself
    policy:   what the report is judged by, or a YAML file of it; None: it is not judged
    export:   where the results go as well, of EXPORTS
    """

    benchmark: BenchmarkSettings | None = None
    twin: ReferenceSettings | None = None
    harness: HarnessSettings | None = None
    load: LoadSettings | None = None
    ready_timeout: float = option(1800.0, "seconds to wait for the server", lower=0)
    request_timeout: float = option(600.0, "seconds to wait for one answer", lower=0)
    protocol: str = option("http", "protocol of the client", choices=PROTOCOLS)
    gpu_price: float | None = option(None, "price of one GPU for an hour, in USD", lower=0)
    replicas: int = 0
    grpc_tls: ClientTls | None = None
    resume: bool = option(True, "continue an interrupted evaluation")
    policy: str | PolicySettings | None = None
    export: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluateSettings(EvaluateOptions):
    """Measure the model served at the address in `ready_file`; reports go to results_dir.

    server_job_folder is that of the run of the server that is meant; None: whoever is ready.
    steps: those of the job, in order; after the last one the next evaluation asks all again
    published_as: the ready file that this server gets after GO; None: it is not held back.
    """

    error_code: ClassVar[int] = ERROR

    ready_file: ConfigPath
    results_dir: str
    model_name: str
    tokenizer_dir: ConfigPath
    tasks: tuple[TaskSettings, ...] = ()
    server_job_folder: str | None = None
    steps: tuple[str, ...] = ()
    published_as: str | None = None

    def __post_init__(self) -> None:
        problems = Problems("the evaluate settings")
        check_options(self, problems, "evaluate.{}".format)
        sections = (self.benchmark, self.twin, self.harness, self.load)
        if not self.tasks and all(block is None for block in sections):
            problems.add("nothing to measure", change="evaluate.tasks or evaluate.benchmark")
        for name in self.export:
            problems.check_choice("export", name, EXPORTS, "evaluate.export")
        problems.raise_if_any(ConfigError)


Settings = TypeVar("Settings")


def settings_text(settings: Any) -> str:
    """One stage's settings as YAML; those that have no default come first."""
    values = {field.name: None for field in dataclasses.fields(settings) if is_required(field)}
    values |= dataclasses.asdict(settings)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)


def write_settings(settings: Any, path: Path) -> None:
    """Write one stage's settings as YAML, completely or not at all."""
    atomic_write(path, settings_text(settings))


def read_settings(kind: type[Settings], path: Path) -> Settings:
    """Read what write_settings wrote; unknown or missing keys are errors that name them."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}") from error
    return build(kind, values, str(path))
