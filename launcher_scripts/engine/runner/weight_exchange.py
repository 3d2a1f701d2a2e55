"""New weights in the tensors of the old ones, on one rank; and LoRA adapters in slots for them.

They are read while steps go on, and each file's bytes are compared with the manifest's digest: to
the device as far as it has room, where an exchange takes milliseconds, else into host memory. Then
these tensors and those that are served have each other's values: CUDA graphs and fused steps, which
know the addresses of tensors, stay valid, and another exchange puts the old weights back. So one
copy of a rank's weights is all that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher_scripts.checkpoint.fastertransformer.folder import FTCheckpoint
from launcher_scripts.checkpoint.fastertransformer.manifest import source_digest
from launcher_scripts.checkpoint.layout.layouts import full_blocks, rank_columns
from launcher_scripts.common.errors import CheckpointError, ConfigError, Problems, problem
from launcher_scripts.common.files import MANIFEST, file_digest
from launcher_scripts.engine.messages.message import (
    ExchangeWeights,
    LoadLoRA,
    RefitWeights,
)
from launcher_scripts.engine.model.gpt_weights import GPTWeightLoader
from launcher_scripts.engine.model.kv_cache import available_memory
from launcher_scripts.engine.model.weight_loader import DTYPES, Reader, Stored
from launcher_scripts.engine.runner.loading import EngineSettings, open_checkpoint, read_weights
from launcher_scripts.engine.runner.refit_source import RefitSource, on_side_stream
from launcher_scripts.engine.runner.runner import Runner
from launcher_scripts.models.adapters import LoRASlots, adapters_of
from launcher_scripts.models.family import ModelConfig, WeightSpec

HOST = torch.device("cpu")
CHUNK_BYTES = 1 << 25
CHUNKS_UNDER_WAY = 4  # an exchange needs so much device memory
MEMORY_SHARE = 0.9  # of the host's free memory that new weights may have
DEVICE_SHARE = 0.5  # the same of the device's; steps may need the other half
Pair = tuple[Tensor, Tensor]
Exchanged = TypeVar("Exchanged", bound=ExchangeWeights | LoadLoRA | RefitWeights)
All = TypeVar("All", bound=ExchangeWeights | RefitWeights)


class TensorExchange(Generic[Exchanged]):
    """One rank's part of an operation that gives tensors on the device new values: what both kinds
    of RankOperation here (runner/operations.py) share. `prepare` collects the pairs.
    """

    def __init__(
        self, operation: Exchanged, runner: Runner, settings: EngineSettings, rank: int
    ) -> None:
        self._operation: Exchanged = operation
        self._network = runner.decoder
        self._settings = settings
        self._rank = rank
        self._pairs: list[Pair] = []

    def apply(self) -> None:
        """Let the tensors that are served have the new values, and the new ones theirs."""
        exchange(self._pairs)
        self._note_change()

    def revert(self) -> None:
        """Undo `apply`: the same exchange once more."""
        self.apply()

    def _note_change(self) -> None:
        """Renew what is derived of the tensors."""


class AllExchange(TensorExchange[All], ABC):
    """One rank's part of the exchange of all weights; its kinds say where they are from.

    values_are_new: nobody has looked at them before, as an export does
    """

    values_are_new = False

    def prepare(self, check: Callable[[], None]) -> None:
        """Read this rank's new weights. Raises CheckpointError and ConfigError."""
        served = named_tensors(self._network.weights)
        count, device = total_bytes(served.values()), self._network.device
        if device.type != "cuda" or count > available_memory(device, DEVICE_SHARE):
            check_memory(count, "the new weights of a rank")
            device = HOST
        checkpoint, read = self._source()

        def read_checked(spec: WeightSpec, layer: int | None) -> Stored:
            check()
            return read(spec, layer)

        with on_side_stream(self._network.device):
            weights = read_weights(self._settings, checkpoint, self._rank, device, read_checked)
            fresh = named_tensors(weights)
            del weights
            check_alike(served, fresh)
            copies = ReachableCopies(self._network.device)
            ends: dict[str, tuple[Tensor, Tensor]] = {}
            for name in served:
                check()
                # One after the other: the host has no room for two copies of all.
                tensors = served[name], fresh.pop(name)
                if self.values_are_new and tensors[1].dtype in DTYPES.values():
                    smallest, largest = tensors[1].aminmax()
                    ends[name] = smallest, largest
                if ".lora_" in name:  # adapters that were added stay as they are
                    stored = len(adapters_of(self._network.config).lora_names)
                    tensors = tensors[0][:stored], tensors[1][:stored]
                self._pairs += copies.pairs(tensors)
            check_finite(ends)

    @abstractmethod
    def _source(self) -> tuple[FTCheckpoint, Reader]:
        """Return an export of the sizes, and what gives this rank's part of new tensors."""

    def _note_change(self) -> None:
        self._network.weights_changed()


class WeightExchange(AllExchange[ExchangeWeights]):
    """The exchange with the weights of another export."""

    def _source(self) -> tuple[FTCheckpoint, Reader]:
        checkpoint = open_exchanged_export(
            self._settings, self._operation.checkpoint_dir, self._network.config
        )
        if (digest := file_digest(checkpoint.folder / MANIFEST)) != self._operation.manifest:
            message = f"{checkpoint.folder / MANIFEST} is another one than rank 0 has"
            raise CheckpointError(problem(message, got=digest, choices=[self._operation.manifest]))
        tp_rank = self._settings.parallelism.tp_rank(self._rank)
        return checkpoint, lambda spec, layer: checkpoint.read_verified(spec, layer, tp_rank)


class WeightRefit(AllExchange[RefitWeights]):
    """The exchange with the weights of a transformers folder, which is not exported before.

    opened: the folder, where this process has opened it
    """

    values_are_new = True
    opened: RefitSource | None = None

    def _source(self) -> tuple[FTCheckpoint, Reader]:
        operation, parallelism = self._operation, self._settings.parallelism
        served = open_checkpoint(self._settings, verify=False)
        source = self.opened or RefitSource.of(operation.folder, served)
        if source.identity != operation.identity:
            message = f"{operation.folder} has other files than rank 0 has"
            raise CheckpointError(
                problem(message, got=source.identity, choices=[operation.identity])
            )
        tp_rank = parallelism.tp_rank(self._rank)
        return served, lambda spec, layer: source.read(spec, layer, parallelism.tp_size, tp_rank)


class LoRALoad(TensorExchange[LoadLoRA]):
    """One rank's part of adding an adapter.

    Its values come into the memory of a slot, which rows of other adapters do not read.
    """

    def prepare(self, check: Callable[[], None]) -> None:
        """Read this rank's part. Raises CheckpointError and ConfigError."""
        # The readers of all formats are loaded when they are needed.
        from launcher_scripts.checkpoint.sources.adapters import read_lora

        path, weights, device = self._operation.path, self._network.weights, self._network.device
        if (digest := source_digest(path)) != self._operation.digest:
            message = f"{path} has other files than rank 0 has"
            raise CheckpointError(problem(message, got=digest, choices=[self._operation.digest]))
        parts, parallelism = adapters_of(weights.config), self._settings.parallelism
        stack = read_lora(path, self._settings.checkpoint_dir)
        check_slots(path, stack.fields, parts.loras)
        slots = replace(parts.loras, count=1)
        config = replace(weights.config, parts=replace(parts, **stack.fields, lora_slots=slots))

        def read(spec: WeightSpec, layer: int | None) -> Stored:
            check()
            (tensor,) = stack.shards[spec.tensor_name(layer)]
            blocks = full_blocks(spec, config.of_layer(layer), tensor.read())
            tp_rank = parallelism.tp_rank(self._rank)
            local = config.of_layer(layer), parallelism.tp_size, tp_rank
            part: NDArray[Any] = np.concatenate(rank_columns(spec, *local, blocks), axis=-1)
            return part

        dtype = DTYPES[self._settings.data_type]
        loader = GPTWeightLoader(config, parallelism, self._rank, dtype, HOST, read)
        for key, served in weights.loras.items():
            loader.lora(*key)
            for name in ("down", "up"):
                values = getattr(loader.loras[key], name)[0]
                if not bool(values.isfinite().all()):
                    stems, layer, _ = key
                    message = f"{path}: {', '.join(stems)} of layer {layer} is not finite"
                    raise CheckpointError(problem(message, got=self._settings.data_type))
                slot = getattr(served, name)[self._operation.slot]
                self._pairs.append((slot, pinned(values, device)))


def check_slots(path: Path, fields: Mapping[str, Any], slots: LoRASlots) -> None:
    """Raise ConfigError where an adapter with such fields does not fit into a slot."""
    problems = Problems(f"the LoRA adapter {path}")
    if fields["lora_rank"] > slots.rank:
        problems.add(
            "its rank is larger than the slots'",
            got=fields["lora_rank"],
            choices=[f"at most {slots.rank}"],
            change="export.triton_deployment.max_lora_rank",
        )
    if others := sorted({*fields["lora_targets"]} - {*slots.targets}):
        message = "it has projections that can only be merged"
        problems.add(message, got=others, choices=slots.targets)
    problems.raise_if_any(ConfigError)


class ReachableCopies:
    """Copies of tensors of the host where the device reaches them fast: on it, as long as it has
    room, then in memory of the host that it reads by itself.

    They are made in blocks, since to lock much memory at once would hold up the steps' launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._free_bytes = available_memory(device, DEVICE_SHARE) if is_cuda else 0
        self._block = torch.empty(0, dtype=torch.uint8)

    def pairs(self, pair: Pair) -> Iterator[Pair]:
        """Yield pieces of a tensor that is served, and of copies of the other one."""
        if not pair[0].is_cuda or pair[1].is_cuda:
            yield pair
            return
        for served, fresh in _chunks([pair]):
            if fresh.dtype != torch.uint8 or fresh.dim() != 1:  # one with gaps
                yield served, fresh.pin_memory()
                continue
            copy = self._locked(len(fresh)).copy_(fresh)
            if len(fresh) <= self._free_bytes:
                self._free_bytes -= len(fresh)
                copy = copy.to(self._device)
            elif copy.data_ptr() == self._block.data_ptr():
                self._block = self._block[len(fresh) :]
            yield served, copy

    def _locked(self, count: int) -> Tensor:
        """Return the first bytes of a block that has as many."""
        if count > len(self._block):
            block = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            if count == CHUNK_BYTES and not self._free_bytes:
                return block  # pieces of other sizes may still fit into the one before
            self._block = block
        return self._block[:count]


def named_tensors(weights: object) -> dict[str, Tensor]:
    """The tensors of a rank's weights by their names in it: `decoder.layers.0.branches...`.

    A tensor that several parts share has the first of its names. The same names for every rank of
    the same part of models of the same config.
    """
    result: dict[str, Tensor] = {}
    shared: set[tuple[int, int]] = set()

    def visit(value: object, name: str) -> None:
        if isinstance(value, Tensor):
            storage = (value.data_ptr(), value.numel())
            if value.numel() and storage not in shared:
                shared.add(storage)
                result[name] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(item, f"{name}.{index}")
        elif is_dataclass(value):
            for field in fields(value):
                if field.name != "config":
                    visit(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))

    visit(weights, "")
    return result


def open_exchanged_export(
    settings: EngineSettings, folder: Path, served: ModelConfig
) -> FTCheckpoint:
    """The export whose weights are to be served, by its small files; its weights are not read.

    Raises ConfigError where it is not of the sizes that are served, with every name that differs,
    and CheckpointError without a manifest or with files of a wrong size.
    """
    checkpoint = open_checkpoint(replace(settings, checkpoint_dir=folder), verify=False)
    if checkpoint.manifest is None:
        message = f"{folder} has no {MANIFEST}, so nothing can be verified; export it again"
        raise CheckpointError(message)
    problems = Problems(f"the weights of {folder} for the model that is served")
    for field in fields(served):
        present, got = getattr(served, field.name), getattr(checkpoint.config, field.name, None)
        if got != present:
            problems.add(f"{field.name} is another one", got=got, choices=[present])
    problems.raise_if_any(ConfigError)
    return checkpoint


def check_memory(count: int, what: str) -> None:
    """Raise ConfigError where the host has no memory for `count` bytes; what: it is for"""
    free = available_memory(HOST, MEMORY_SHARE)
    if count > free:
        gigabytes = f"{count / 1e9:.2f} GB"
        message = f"{what} need {gigabytes} of host memory, and {free / 1e9:.2f} GB are free"
        raise ConfigError(message)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def check_alike(served: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> None:
    """Raise ConfigError with every tensor that only one of them has, or in another form."""
    problems = Problems("the tensors of the new weights")
    for name in sorted(served.keys() | fresh.keys()):
        forms = [
            f"{tensor.dtype} {list(tensor.shape)}" if tensor is not None else "nothing"
            for tensor in (fresh.get(name), served.get(name))
        ]
        if forms[0] != forms[1]:
            problems.add(f"{name} is another tensor", got=forms[0], choices=[forms[1]])
    problems.raise_if_any(ConfigError)


def check_finite(ends: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise CheckpointError where a tensor has other values than finite ones.

    ends: name -> the smallest and the largest value of a tensor
    They are looked at together: for each alone the device, and threads of steps, would be waited
    for.
    """
    for dtype in DTYPES.values():
        pairs = {name: pair for name, pair in ends.items() if pair[0].dtype == dtype}
        values = [value for pair in pairs.values() for value in pair]
        sound = torch.stack(values).isfinite().tolist() if values else []
        for name, *of_ends in zip(pairs, sound[::2], sound[1::2], strict=True):
            if not all(of_ends):
                raise CheckpointError(f"{name} has NaN or infinite values")


@torch.inference_mode()
def exchange(pairs: Sequence[Pair]) -> None:
    """Let the two tensors of each pair have each other's values: the one that is served, and one on
    the same device or on the host.

    On CUDA the two directions go at the same time, and this returns before they are done.
    """
    if not pairs or not pairs[0][0].is_cuda:
        for served, host in _chunks(pairs):
            saved = served.clone()
            served.copy_(host)
            host.copy_(saved)
        return
    incoming, outgoing = torch.cuda.current_stream(), torch.cuda.Stream()
    under_way: deque[torch.cuda.Event] = deque()
    for served, host in _chunks(pairs):
        if host.is_cuda:
            saved = served.clone()
            served.copy_(host)
            host.copy_(saved)
            continue
        if len(under_way) == CHUNKS_UNDER_WAY:
            incoming.wait_event(under_way.popleft())
        saved = served.clone()
        served.copy_(host, non_blocking=True)
        outgoing.wait_event(incoming.record_event())  # the host's values have been read
        with torch.cuda.stream(outgoing):
            host.copy_(saved, non_blocking=True)
        saved.record_stream(outgoing)
        under_way.append(outgoing.record_event())
    incoming.wait_stream(outgoing)


def _chunks(pairs: Sequence[Pair]) -> list[Pair]:
    """Views of the tensors' bytes, piece by piece; tensors with gaps stay whole."""
    result: list[Pair] = []
    for served, host in pairs:
        if served.is_contiguous() and host.is_contiguous():
            flat = (tensor.reshape(-1).view(torch.uint8) for tensor in (served, host))
            result += zip(*(tensor.split(CHUNK_BYTES) for tensor in flat), strict=True)
        else:
            result.append((served, host))
    return result


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in memory that the device reads by itself."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
