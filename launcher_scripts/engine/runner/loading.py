"""From settings to a runner: the same steps on every rank of an engine."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.common.errors import ConfigError, Problems, ServerError, lookup, problem
from launcher_scripts.common.hosts import node_name
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.processes import bus_errors_as
from launcher_scripts.common.quantization import (
    Quantization,
    kv_cache_dtype_of,
    quantization_of,
)
from launcher_scripts.contract.contracts import CONTRACTS
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.distributed.heartbeat import RankProgress
from launcher_scripts.engine.messages.message import Message, RankInfo
from launcher_scripts.engine.model.draft_head import DraftHead, Features, with_tables
from launcher_scripts.engine.model.families import (
    FAMILIES,
    engine_family,
    kernels_for,
    stage_states,
)
from launcher_scripts.engine.model.forward_context import StepGraphs
from launcher_scripts.engine.model.kv_cache import (
    KVCache,
    LayerStates,
    RowStatePool,
    available_memory,
    block_tokens,
    bytes_per_row,
    bytes_per_token,
    plan_capacity,
    plan_snapshots,
)
from launcher_scripts.engine.model.network import Network
from launcher_scripts.engine.model.virtual_ranks import VirtualRanksNetwork, check_virtual_ranks
from launcher_scripts.engine.model.weight_loader import DTYPES, Reader
from launcher_scripts.engine.model.weights import ModelWeights
from launcher_scripts.engine.runner.graphs import GraphCache, watch_steps
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.kernels.cuda.compiling import traits_of
from launcher_scripts.kernels.ops import Ops
from launcher_scripts.kernels.quantization import FP8
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import with_lora_slots
from launcher_scripts.models.draft_heads import check_draft_model, reject_head
from launcher_scripts.models.family import ModelConfig


class Timeline:
    """Events of a start, with the time of day in seconds since 1970, in order."""

    def __init__(self) -> None:
        self._events: list[tuple[str, float]] = []

    def note(self, event: str) -> None:
        self._events.append((event, round(time.time(), 3)))

    @property
    def events(self) -> list[tuple[str, float]]:
        return list(self._events)


MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85, "meta": 1.0}  # meta tensors take none
THREADS_VARIABLE = "OMP_NUM_THREADS"  # torch itself follows it
PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
# Tokens of a prompt's passes in a deterministic model with a prefix cache. A pass is the same,
# whether those before it ran or were found. A longer one would be found less often; a shorter one
# takes longer per token.
FIXED_CHUNK = 512
# After this time a thread that runs Python lets another one that waits run. A step's tokens are
# there, and the thread that steps waits for those that take requests and send responses: with
# Python's own 5 ms, 128 clients of a 1.3B got 7 % fewer tokens a second, and with 0.1 ms, too.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class EngineSettings:
    """Settings from which an engine is loaded.

    checkpoint_dir:  folder of shards, `<tp_size>-gpu`
    draft_checkpoint_dir: the same of the draft model, which proposes tokens; None: there is none
    model_type:      a row of CONTRACTS; None: what the checkpoint is
    data_type:       compute type: fp32, fp16, bf16; independent of the files' type
    device:          auto (CUDA where there is one), cpu, cuda
    max_batch_size:  most rows in flight
    max_tokens:      most tokens in the key/value cache; None: max_batch_size rows of the model's
                     full length, as far as memory reaches
    quantization:    what is made of the layers' matrices when they are loaded
    kv_cache_dtype:  what keys and values are kept in: auto (data_type) or fp8 (e4m3)
    enable_custom_all_reduce: sum over ranks through the GPUs' shared memory where they have it
    enable_prefix_caching: prompts of a decoder-only model that begin alike are computed once
    deterministic:   a row's tokens do not depend on the rows beside: every step has the same shape,
                     that of max_batch_size rows of full length, and prompts run one by one
    deterministic_ranks: tensor-parallel ranks whose bits a deterministic model of one rank has
    max_loras:       slots for LoRA adapters that are added while the model is served, of at most
                     max_lora_rank
    inter_token_target: seconds that a step over prompts may take, so that rows which decode get
                     their next tokens, and new requests their turn, in time; 0: no limit
    stall_timeout:   seconds without a sign of life after which a rank counts as lost
    start_timeout:   seconds a rank may take to load
    """

    checkpoint_dir: Path
    draft_checkpoint_dir: Path | None = None
    model_type: str | None = None
    data_type: str = "fp32"
    parallelism: Parallelism = Parallelism()
    device: str = "auto"
    max_batch_size: int = 64
    max_tokens: int | None = None
    quantization: Quantization | None = None
    kv_cache_dtype: str = "auto"
    enable_custom_all_reduce: bool = False
    enable_prefix_caching: bool = False
    deterministic: bool = False
    deterministic_ranks: int = 1
    verify: bool = True
    max_loras: int = 0
    max_lora_rank: int = 16
    inter_token_target: float = 0.05
    stall_timeout: float = 4.0
    start_timeout: float = 1800.0
    nodes: int = 1

    def __post_init__(self) -> None:
        problems = Problems("the engine's settings")
        if self.data_type not in DTYPES:
            problems.add(
                "unknown data_type", got=self.data_type, choices=DTYPES, change="data_type"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            problems.add("unknown device", got=self.device, choices=("auto", "cpu", "cuda"))
        if self.max_batch_size < 1:
            problems.add("max_batch_size must be at least 1", got=self.max_batch_size)
        problems.check_minimum("max_loras", self.max_loras, 0)
        problems.check_minimum("max_lora_rank", self.max_lora_rank, 1)
        if not 0 <= self.inter_token_target < inf:
            problems.add("inter_token_target must be 0 or more", got=self.inter_token_target)
        with problems.collecting():
            quantization_of(0, self.quantization, "{} in config.pbtxt")
        with problems.collecting():
            kv_cache_dtype_of(self.kv_cache_dtype, "{} in config.pbtxt")
        problems.raise_if_any(ConfigError)

    @property
    def has_virtual_ranks(self) -> bool:
        """True if a model computes as on another number of ranks."""
        return self.deterministic_ranks not in (1, self.parallelism.tp_size)

    @property
    def fixed_chunk(self) -> int | None:
        """Number of tokens of the passes that share prompts in a deterministic model."""
        shares = self.deterministic and self.enable_prefix_caching
        return FIXED_CHUNK if shares else None

    @property
    def cache_type(self) -> torch.dtype:
        """Element type of the KV cache."""
        return FP8 if self.kv_cache_dtype == "fp8" else DTYPES[self.data_type]

    @property
    def ranks_per_node(self) -> int:
        return self.parallelism.world_size // self.nodes

    def ranks_of_node(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    @property
    def device_type(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


class RankSetup(Message, frozen=True):
    """The first message to a rank."""

    settings: EngineSettings


def rank_device(settings: EngineSettings, rank: int) -> torch.device:
    """The device of one rank: the GPU of its number on its node, or the CPU."""
    if settings.device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ServerError("device cuda was asked for, and this machine shows no CUDA device")
    here, visible = settings.ranks_per_node, torch.cuda.device_count()
    if here > visible:
        raise ServerError(
            f"tensor_para_size * pipeline_para_size = {settings.parallelism.world_size} ranks on "
            f"{settings.nodes} node(s) need a GPU each, and {visible} are visible on this node"
        )
    return torch.device("cuda", rank % here)


def prepare_process(settings: EngineSettings, device: torch.device) -> None:
    """Set what is kept per process: the current GPU, exact float32, a fair share of cores, and how
    soon threads take turns.

    Of the cores this process may use its node's ranks get equal shares, unless the user has said.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    elif settings.parallelism.world_size > 1 and THREADS_VARIABLE not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // settings.ranks_per_node))


def rank_info(rank: int, device: torch.device) -> RankInfo:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    label = f"{device} ({name})" if device.type == "cuda" else "cpu"
    return RankInfo(rank, os.getpid(), node_name(os.environ), label)


class Checkpoints(NamedTuple):
    """The opened checkpoints of a model and of its draft model, where it has one."""

    model: FTCheckpoint
    draft: FTCheckpoint | None = None

    @property
    def configs(self) -> tuple[ModelConfig, ModelConfig | None]:
        """Configurations of the checkpoints."""
        return self.model.config, None if self.draft is None else self.draft.config


class Weights(NamedTuple):
    """One rank's weights of a model and of its draft model, as load_weights gives them."""

    model: Any
    draft: Any = None


def open_checkpoints(settings: EngineSettings, *, verify: bool) -> Checkpoints:
    """Both, checked against each other."""
    model = open_checkpoint(settings, verify=verify)
    if settings.draft_checkpoint_dir is None:
        return Checkpoints(model)
    folder = settings.draft_checkpoint_dir
    draft = FTCheckpoint.open(folder, verify=verify)
    problems = Problems(f"the draft model in {folder}")
    check_draft_model(
        problems,
        draft.config,
        draft.tp_size,
        model.config,
        settings.parallelism,
        "draft_model_checkpoint_path in config.pbtxt",
    )
    problems.raise_if_any(ConfigError)
    return Checkpoints(model, draft)


def load_both(
    settings: EngineSettings, checkpoints: Checkpoints, rank: int, device: torch.device
) -> Weights:
    """See load_weights."""
    return Weights(
        *(
            checkpoint and load_weights(settings, checkpoint, rank, device)
            for checkpoint in checkpoints
        )
    )


def open_checkpoint(settings: EngineSettings, *, verify: bool) -> FTCheckpoint:
    """The checkpoint, checked against the parallelism it must serve."""
    checkpoint = FTCheckpoint.open(Path(settings.checkpoint_dir), verify=verify)
    family = family_of(checkpoint.config).name
    if family not in FAMILIES:
        raise ConfigError(
            problem(
                f"the engine cannot run the checkpoint in {checkpoint.folder}",
                got=f"family {family}",
                choices=FAMILIES,
            )
        )
    reject_head(checkpoint.config, str(checkpoint.folder))
    parallelism = settings.parallelism
    if checkpoint.tp_size != parallelism.tp_size:
        raise ConfigError(
            f"the checkpoint in {checkpoint.folder} is split for tensor_para_size "
            f"{checkpoint.tp_size}; got {parallelism.tp_size}; change tensor_para_size in "
            f"config.pbtxt, or export again"
        )
    config = served_part(checkpoint.config, settings.model_type)
    if settings.max_loras:
        rows = family_of(config).weights(config)
        config = with_lora_slots(config, rows, settings.max_loras, settings.max_lora_rank)
    checkpoint = replace(checkpoint, config=config)
    depth = engine_family(checkpoint.config).depth(checkpoint.config)
    if parallelism.pp_size > depth:
        raise ConfigError(
            f"pipeline_para_size {parallelism.pp_size} exceeds the model's "
            f"{depth} layers; change pipeline_para_size in config.pbtxt"
        )
    return checkpoint


def served_part(config: ModelConfig, model_type: str | None) -> ModelConfig:
    """Return the part of a checkpoint that `model_type` serves: all of it, or an encoder-decoder's
    encoder."""
    if model_type is None:
        return config
    contract = lookup(CONTRACTS, model_type, "model_type")
    family = family_of(config).name
    fitting = [
        name
        for name, row in CONTRACTS.items()
        if row.family == family and (row.encoder_only or not getattr(config, "encoder_only", False))
    ]
    if model_type not in fitting:
        raise ConfigError(
            problem(
                f"the checkpoint, of family {family}, cannot be served as this model_type",
                got=model_type,
                choices=fitting,
                change="model_type in config.pbtxt",
            )
        )
    return replace(config, encoder_only=True) if contract.encoder_only else config


def load_weights(
    settings: EngineSettings, checkpoint: FTCheckpoint, rank: int, device: torch.device
) -> Any:
    """This rank's weights, as the family's loader gives them, on its device.

    Needs no other rank, so whatever fails, fails alone.
    """
    reject_fp8(settings, device)
    tp_rank = settings.parallelism.tp_rank(rank)
    return read_weights(
        settings,
        checkpoint,
        rank,
        device,
        lambda spec, layer: checkpoint.read(spec, layer, tp_rank),
    )


def read_weights(
    settings: EngineSettings,
    checkpoint: FTCheckpoint,
    rank: int,
    device: torch.device,
    read: Reader,
) -> Any:
    """See load_weights. device: any, also one whose kernels do not take them"""
    loader = engine_family(checkpoint.config).loader(
        checkpoint.config,
        settings.parallelism,
        rank,
        DTYPES[settings.data_type],
        device,
        read,
        quantization=settings.quantization,
    )
    shortened = f"a file of {checkpoint.folder} became shorter, or its disk failed, while loading"
    with bus_errors_as(shortened):
        return loader.load()


def reject_fp8(settings: EngineSettings, device: torch.device) -> None:
    """Raise ConfigError where fp8 is asked for and the device's kernels cannot read it."""
    problems = Problems("the GPU's kernels cannot read fp8")
    for name, choices in (("quantization", ("int8", "none")), ("kv_cache_dtype", ("auto",))):
        if getattr(settings, name) == "fp8" and not traits_of(device).has_fp8:
            problems.add(
                "fp8 needs compute capability 8.9",
                got=torch.cuda.get_device_name(device),
                choices=choices,
                change=f"{name} in config.pbtxt",
            )
    problems.raise_if_any(ConfigError)


@dataclass(frozen=True)
class Launches:
    """The way a rank launches its operations: as those of `kernels`, and full steps as `graphs`."""

    kernels: Ops
    graphs: StepGraphs | None = None

    @classmethod
    def on(cls, device: torch.device, progress: RankProgress) -> Launches:
        """As the device is used."""
        graphs = GraphCache(progress) if device.type == "cuda" else None
        return cls(kernels_for(device.type), graphs)


def assemble_runner(
    weights: Any,
    settings: EngineSettings,
    communicator: Communicator,
    device: torch.device,
    launches: Launches | None = None,
    draft: Any = None,
) -> Runner:
    """Plan the cache, as all ranks agree, and put the decoder together.

    launches: other than those of the device;  draft: the weights of the draft model
    """
    config, target = weights.config, weights
    if draft is not None and draft.draft is not None:
        draft = with_tables(draft, weights)
    if settings.enable_custom_all_reduce:
        communicator.use_peer_memory()
    family, both = engine_family(config), [weights] if draft is None else [weights, draft]
    size = block_tokens(device)
    max_tokens = settings.max_tokens or family.row_tokens(config, settings.max_batch_size, size)
    ranks = 1 if device.type == "cuda" else settings.ranks_per_node
    rows, longest, dtype = settings.max_batch_size, family.longest(config), settings.cache_type
    states = [_states(model.config, settings, communicator) for model in both]
    memory = available_memory(device, MEMORY_SHARE[device.type] / ranks)
    memory -= weights.bytes() * settings.has_virtual_ranks  # shards are copies
    row_bytes = bytes_per_row(states[0].values(), DTYPES[settings.data_type])
    snapshots = 0
    if config.has_row_states:
        snapshots = communicator.minimum(plan_snapshots(rows, row_bytes, memory))
    token_bytes = sum(bytes_per_token(state.values(), dtype) for state in states)
    if draft is not None and draft.draft is not None:
        token_bytes += config.hidden_size * DTYPES[settings.data_type].itemsize
    memory -= (rows + 1 + snapshots) * row_bytes
    capacity = communicator.minimum(plan_capacity(max_tokens, token_bytes, memory, size, rows))
    if not capacity:
        suffix = " and the draft model's" if draft else ""
        raise ServerError(
            f"no memory is left for keys and values beside the model's{suffix} weights"
        )
    if device.type == "cuda" and settings.parallelism.world_size > 1:
        watch_steps(communicator.progress, config, settings.parallelism, settings.nodes)

    def runner_of(weights: Any, draft_runner: Runner | None) -> Runner:
        by = launches or Launches.on(device, communicator.progress)
        retained = _states(weights.config, settings, communicator)
        row_states = RowStatePool(retained, rows, snapshots, DTYPES[settings.data_type], device)
        arrivals = rows * family.heads(weights.config, communicator.tp_size).num_heads
        sizes = retained, capacity, dtype, device, row_states, arrivals
        table = None if draft_runner is None else draft_runner.decoder.cache.table
        cache = KVCache(*sizes, slots=rows, table=table)
        parts = cache, by.kernels, communicator, device
        network = _network_of(settings, weights, parts, is_target=weights is target)
        if draft_runner is not None and isinstance(draft_runner.decoder, DraftHead):
            draft_runner.decoder.features = Features(draft.draft, network)
        return Runner(
            network,
            communicator,
            rows,
            device,
            longest,
            by.graphs,
            draft_runner,
            deterministic=settings.deterministic and weights is target,
        )

    return runner_of(weights, None if draft is None else runner_of(draft, None))


NetworkParts = tuple[KVCache, Ops, Communicator, torch.device]


def _network_of(
    settings: EngineSettings, weights: ModelWeights, parts: NetworkParts, *, is_target: bool
) -> Network:
    """Return the network of a model, or of its draft model or head."""
    if weights.draft is not None:
        return DraftHead(weights, *parts, settings.max_batch_size)
    if is_target and settings.has_virtual_ranks:
        fixed = settings.deterministic and not settings.enable_custom_all_reduce
        ranks = settings.deterministic_ranks
        check_virtual_ranks(weights, ranks, settings.parallelism, fixed=fixed)
        return VirtualRanksNetwork(weights, *parts, ranks)
    return Network(weights, *parts)


def _states(
    config: ModelConfig, settings: EngineSettings, communicator: Communicator
) -> dict[int, LayerStates]:
    """What a rank keeps of a row, layer by layer."""
    parallelism, rank = settings.parallelism, communicator.pp_rank
    return stage_states(config, parallelism, rank, communicator.tp_size)
