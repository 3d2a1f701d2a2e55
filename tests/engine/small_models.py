"""Small random models: their stored tensors, and engines over them without any file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter, shard_files
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.common.quantization import Quantization
from launcher_scripts.contract.requests import GenerateOutput, GenerateRequest, SamplingParameters
from launcher_scripts.engine.distributed.communicator import Communicator
from launcher_scripts.engine.engine import Engine, EngineSettings
from launcher_scripts.engine.model.families import engine_family, kernels_for
from launcher_scripts.engine.model.weight_loader import DTYPES, Stored
from launcher_scripts.engine.runner.loading import Launches, assemble_runner
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import LORA_TARGETS
from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec
from launcher_scripts.models.gpt import GPTConfig

NOWHERE = Path("unused")
# Of a GPT with latent attention; sizes of queries, keys and values are all different.
_MODERN: dict[str, object] = {
    "position_embedding": "rope",
    "normalization": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA: dict[str, object] = {**_MODERN, "tied_embeddings": False, "num_kv_heads": 2}
LATENT: dict[str, object] = {
    **_MODERN,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "head_size": 10,
    "rope_head_size": 4,
    "value_head_size": 7,
}
DRAWN = SamplingParameters(top_k=9, random_seed=77, repetition_penalty=1.2)
ALONE = Communicator()


def small_config(**changes: object) -> GPTConfig:
    """A GPT-2 of two layers that runs in milliseconds."""
    values: dict[str, object] = {
        "vocab_size": 67,
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_size": 8,
        "ffn_size": 48,
        "max_positions": 96,
        "start_id": 65,
        "end_id": 66,
    }
    return GPTConfig(**{**values, **changes})


def lora_targets(config: ModelConfig) -> tuple[str, ...]:
    """The projections of a model that LoRA can be of."""
    rows = {spec.name for spec in family_of(config).weights(config)}
    return tuple(stem for stem in LORA_TARGETS if f"layers.*.{stem}.weight" in rows)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole tensors (one rank) by canonical name; large enough that logits differ clearly."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for spec in family_of(config).weights(config):
        shape = spec.shape_on(config, 1)
        for layer in spec.layer_numbers(config):
            values = generator.normal(0, 0.3, shape).astype(np.float32)
            if "norm" in spec.name and spec.name.endswith("weight"):
                values += 1
            tensors[spec.tensor_name(layer)] = values
    return tensors


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tp_size: int,
    *,
    source: str | None = None,
    files: Iterable[Path] = (),
) -> Path:
    """The whole tensors as a checkpoint folder cut for `tp_size` ranks.

    source: the format that it is said to be exported from;  files: copied beside the weights
    """
    said = None if source is None else {"format": source}
    with FTWriter(folder, config, tp_size, "fp32", source=said) as writer:
        for file in shard_files(config, tp_size):
            whole = tensors[file.spec.tensor_name(file.layer)]
            part = rank_part(file.spec, config, whole, tp_size, file.tp_rank)
            writer.write(file, [np.ascontiguousarray(part)])
        for path in files:
            writer.copy(path.read_bytes(), path.name)
    return folder


def rank_part(
    spec: WeightSpec, config: ModelConfig, full: np.ndarray, tp_size: int, tp_rank: int
) -> np.ndarray:
    """One rank's part of a whole tensor."""
    if spec.partition is Partition.ROW_PARALLEL:
        return np.split(full, tp_size, axis=0)[tp_rank]
    if spec.partition is not Partition.COLUMN_PARALLEL:
        return full
    if not isinstance(config, GPTConfig) or not spec.blocks:
        blocks = np.split(full, max(1, len(spec.blocks)), axis=-1)
        return np.concatenate([np.split(b, tp_size, axis=-1)[tp_rank] for b in blocks], axis=-1)
    sizes = [getattr(config, block) for block in spec.blocks]
    heads = (*full.shape[:-1], config.num_kv_heads, config.head_size)
    copies = config.kv_copies(tp_size)
    parts = [
        np.repeat(part.reshape(heads), copies, axis=-2).reshape(*full.shape[:-1], -1)
        if block == "kv_size"
        else part
        for block, part in zip(
            spec.blocks, np.split(full, np.cumsum(sizes)[:-1], axis=-1), strict=True
        )
    ]
    return np.concatenate([np.split(part, tp_size, axis=-1)[tp_rank] for part in parts], axis=-1)


def load_engine(
    folder: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray], tp: int, pp: int, **more
) -> Engine:
    """An engine of tp x pp processes over a checkpoint written into `folder`."""
    checkpoint = folder / f"{tp}-gpu"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, config, tensors, tp)
    return Engine.load(
        EngineSettings(
            checkpoint,
            parallelism=Parallelism(tp, pp),
            **{"device": "cpu", "max_batch_size": 8, **more},
        )
    )


class EagerGraphs:
    """Stands for the CUDA graphs: runs every function on a tensor of its own, as they replay."""

    def __init__(self) -> None:
        self.recorded: list[Hashable] = []
        self.asked: list[Hashable] = []

    def run(self, key: Hashable, given: torch.Tensor, function: Callable[..., object]) -> object:
        self.asked.append(key)
        return function(given.clone())

    def record(self, key: Hashable, given: torch.Tensor, function: Callable[..., object]) -> None:
        self.recorded.append(key)
        function(given.clone())

    def clear(self) -> None:
        """There is nothing to give back."""


def runner_for(
    config: ModelConfig,
    tensors: Mapping[str, Stored],
    *,
    device: str = "cpu",
    data_type: str = "fp32",
    max_batch_size: int = 8,
    max_tokens: int | None = None,
    quantization: Quantization | None = None,
    kv_cache_dtype: str = "auto",
    enable_prefix_caching: bool = False,
    deterministic: bool = False,
    deterministic_ranks: int = 1,
    launches: Launches | None = None,
    graphs: EagerGraphs | None = None,
    communicator: Communicator = ALONE,
    draft: tuple[ModelConfig, Mapping[str, Stored]] | None = None,
) -> tuple[EngineSettings, Runner]:
    """One rank over tensors in memory, of which it takes its part.

    draft: the draft model, and its tensors
    """
    parallelism, rank = communicator.parallelism, communicator.rank
    settings = EngineSettings(
        NOWHERE,
        parallelism=parallelism,
        data_type=data_type,
        device=device,
        max_batch_size=max_batch_size,
        max_tokens=max_tokens,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=enable_prefix_caching,
        deterministic=deterministic,
        deterministic_ranks=deterministic_ranks,
    )
    place = torch.device(device)

    def loaded(config: ModelConfig, tensors: Mapping[str, Stored]) -> object:
        def read(spec: WeightSpec, layer: int | None) -> Stored:
            whole = tensors[spec.tensor_name(layer)]
            if parallelism.tp_size == 1:
                return whole
            return rank_part(spec, config, whole, parallelism.tp_size, rank)

        loader, dtype = engine_family(config).loader, DTYPES[data_type]
        return loader(
            config, parallelism, rank, dtype, place, read, quantization=quantization
        ).load()

    if graphs is not None:
        launches = Launches(kernels_for(device), graphs)
    weights, drafting = loaded(config, tensors), draft and loaded(*draft)
    return settings, assemble_runner(weights, settings, communicator, place, launches, drafting)


def engine_for(config: ModelConfig, tensors: Mapping[str, np.ndarray], **options: object) -> Engine:
    settings, runner = runner_for(config, tensors, **options)
    return Engine.from_runner(settings, lambda: runner)


def context_logits(engine: Engine, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits at every prompt position, float32 [T, vocab]."""
    request = GenerateRequest(ids, output_len=0, return_context_logits=True)
    return engine.submit(request).result(60).context_logits


def generate(engine: Engine, ids: tuple[int, ...], output_len: int, **more: object) -> list[int]:
    return list(run(engine, ids, output_len, **more).output_ids)


def run(engine: Engine, ids: tuple[int, ...], output_len: int, **more: object) -> GenerateOutput:
    return engine.submit(GenerateRequest(ids, output_len=output_len, **more)).result(60)


def check_same_answers(alone: Engine, together: Engine, ids: tuple[int, ...]) -> None:
    """Greedy and drawn answers, to the beginnings of `ids`, of one rank and of several."""
    for sampling in (SamplingParameters(), DRAWN):
        requests = [
            GenerateRequest(ids[:length], 12, sampling, return_log_probs=True)
            for length in (3, 10, 1, 6)
        ]
        answers = []
        for engine in (alone, together):
            futures = [engine.submit(request) for request in requests]
            answers.append([future.result(60) for future in futures])
        for one, many in zip(*answers, strict=True):
            assert one.output_ids == many.output_ids
            assert one.output_log_probs == pytest.approx(many.output_log_probs, abs=1e-4)
