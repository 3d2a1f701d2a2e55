"""LoRA adapters that stay beside the weights: what each learned, stacked for a request's choice.

A layout of the weight table moves outputs of a projection, and B has the projection's outputs: so
the layout is that of B. A has its inputs, which no layout of a supported projection moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.dtypes import float32
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.formats.workspace import Workspace
from launcher_scripts.checkpoint.layout.layouts import LAYOUTS
from launcher_scripts.checkpoint.layout.source_checkpoint import SourceCheckpoint
from launcher_scripts.checkpoint.layout.tasks import make_plan
from launcher_scripts.checkpoint.sources.merging import Adapter, LowRank, Place, Update
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import LORA_TARGETS, LoRATarget
from launcher_scripts.models.family import Partition

KEY = "export.model.lora_checkpoints"
MERGED = "export.model.adapter_checkpoints, which merges it"


@dataclass(frozen=True)
class Part:
    """What one adapter learned for a projection, or for one block of its outputs.

    adapter: its number
    """

    adapter: int
    place: Place
    update: LowRank

    @property
    def blocks(self) -> slice:
        """Of the outputs that it is for."""
        whole = self.place.count == 1
        return slice(None) if whole else slice(self.place.index, self.place.index + 1)

    def down(self) -> NDArray[Any]:
        """A, float32 [in, rank]."""
        return float32(self.update.down.read()).T

    def up(self) -> list[NDArray[Any]]:
        """B times its scale, float32 [rank, outputs] of each block; zeros where it has none."""
        values = float32(self.update.up.read()) * np.float32(self.update.scale)
        return self.place.stored(values.T if self.update.input_first else values)


@dataclass(frozen=True)
class StackedTensor(SourceTensor):
    """A or B of one projection, of all adapters, computed when it is read.

    size: the adapters, blocks and ranks of A [in, size], the adapters and ranks of B [size, out]
    """

    parts: Sequence[Part]
    size: tuple[int, ...]

    def read(self, workspace: Workspace | None = None, name: str = "whole") -> NDArray[Any]:
        stacked = (workspace or Workspace()).array(name, self.shape, self.dtype)
        stacked.fill(0)
        if len(self.size) == 3:
            downs = stacked.reshape(-1, *self.size)
            for part in self.parts:
                down = part.down()
                downs[:, part.adapter, part.blocks, : down.shape[1]] = down[:, None]
            return stacked
        ups = stacked.reshape(*self.size, -1)
        for part in self.parts:
            up = np.concatenate(part.up(), axis=1)
            ups[part.adapter, : len(up)] += up
        return stacked


@dataclass(frozen=True)
class LoRAStack:
    """The adapters of a base: fields of models.adapters.Adapters, and tensors by the names of rows
    there.
    """

    fields: Mapping[str, Any]
    shards: Mapping[str, tuple[SourceTensor, ...]]


def stacked_lora(adapters: Mapping[str, Adapter], base: SourceCheckpoint) -> LoRAStack:
    """The adapters, by their names.

    Raises CheckpointError with everything that does not fit the base, or can only be merged.
    """
    problems = Problems("the LoRA adapters")
    family = family_of(base.config)
    if family.name != "gpt":
        problems.add("LoRA of this family can only be merged", got=family.name, change=MERGED)
        problems.raise_if_any(CheckpointError)
    tasks = make_plan(base, family.weights(base.config), "the base")
    found: dict[tuple[str, int], list[Part]] = {}
    for number, adapter in enumerate(adapters.values()):
        try:
            places = adapter.places(tasks)
        except LauncherError as error:
            problems.merge(error)
            continue
        for name, updates in adapter.updates.items():
            for place in places[name]:
                stem, layer = _stem(place), tasks[place.number].layer
                update = _kept(updates, place)
                if update is None or layer is None:
                    text = f"what {adapter.path} learned for {name} can only be merged"
                    problems.add(text, change=MERGED)
                    continue
                found.setdefault((stem, layer), []).append(Part(number, place, update))
    problems.raise_if_any(CheckpointError)
    return _stack(found, list(adapters), base.config)


def _stem(place: Place) -> str:
    return place.spec.name.removeprefix("layers.*.").removesuffix(".weight")


def _kept(updates: Sequence[Update], place: Place) -> LowRank | None:
    """The update, if it can stay beside its weight."""
    target, update = LORA_TARGETS.get(_stem(place)), updates[0]
    if target is None or len(updates) > 1 or not isinstance(update, LowRank) or update.magnitude:
        return None
    inputs_stay = place.layout in (LAYOUTS["transposed"], LAYOUTS["as_is"])
    if target.partition is Partition.ROW_PARALLEL and not inputs_stay:
        return None
    laid = place.laid(update)
    return laid if isinstance(laid, LowRank) else None


def _stack(
    found: Mapping[tuple[str, int], Sequence[Part]], names: Sequence[str], config: Any
) -> LoRAStack:
    ranks = [part.update.down.shape[0] for parts in found.values() for part in parts]
    count, rank = len(names), max(ranks, default=1)
    stems = {stem for stem, _ in found}
    targets = [target for stem, target in LORA_TARGETS.items() if stem in stems]
    fields = {
        "lora_names": tuple(names),
        "lora_rank": rank,
        "lora_targets": tuple(target.stem for target in targets),
    }
    shards: dict[str, tuple[SourceTensor, ...]] = {}
    for target in targets:
        for layer in range(config.num_layers):
            parts = found.get((target.stem, layer), ())
            stem = f"layers.{layer}.{target.stem}"
            down, up = _tensors(target, parts, count, rank, config)
            shards |= {f"{stem}.lora_in.weight": (down,), f"{stem}.lora_out.weight": (up,)}
    return LoRAStack(fields, shards)


def _tensors(
    target: LoRATarget, parts: Sequence[Part], count: int, rank: int, config: Any
) -> tuple[StackedTensor, StackedTensor]:
    """A and B of one projection of a layer."""
    blocks, dtype = max(1, len(target.blocks)), np.dtype("<f4")
    inputs, outputs = (getattr(config, axis) for axis in (target.inputs, target.outputs))
    down = (inputs, count * blocks * rank)
    return (
        StackedTensor(down, dtype, (), parts, (count, blocks, rank)),
        StackedTensor((count * rank, outputs), dtype, (), parts, (count, rank)),
    )
