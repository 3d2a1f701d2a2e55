"""The combined contents of adapter checkpoints, and whether they fit the base.

LoRA adapters that stay beside the weights: what each learned, stacked for a request's choice.

A layout of the weight table moves outputs of a projection, and B has the projection's outputs: so
the layout is that of B. A has its inputs, which no layout of a supported projection moves.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.formats.nemo_config import section
from launcher_scripts.checkpoint.formats.source_tensor import (
    SourceTensor,
    Workspace,
    concatenated,
    float32,
)
from launcher_scripts.checkpoint.layout.layouts import LAYOUTS
from launcher_scripts.checkpoint.layout.source_checkpoint import SourceCheckpoint
from launcher_scripts.checkpoint.layout.tasks import Task, plan_tasks
from launcher_scripts.checkpoint.sources.merging import LearnedAdapter, LowRank, Target, Update
from launcher_scripts.checkpoint.sources.nemo_adapters import (
    PartFile,
    read_parts,
    read_tables,
    selects_layers,
)
from launcher_scripts.checkpoint.sources.training_options import TrainingOptions
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import (
    LORA_TARGETS,
    Adapters,
    LoRATarget,
    PromptTask,
    ia3_keys,
    ia3_sites,
)
from launcher_scripts.models.family import ModelConfig, Partition, WeightSpec, stack_layers

KEY = "export.model.lora_checkpoints"
MERGED = "export.model.adapter_checkpoints, which merges it"


@dataclass(frozen=True)
class AdapterPart:
    """The parameters of one adapter for a projection, or for one block of its outputs.

    adapter: its number
    """

    adapter: int
    place: Target
    update: LowRank

    @property
    def blocks(self) -> slice:
        """The outputs that it applies to."""
        blocks = self.place.blocks
        return slice(blocks.start, blocks.stop)

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

    parts: Sequence[AdapterPart]
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


def stacked_lora(adapters: Mapping[str, LearnedAdapter], base: SourceCheckpoint) -> LoRAStack:
    """The adapters, by their names.

    Raises CheckpointError with everything that does not fit the base, or can only be merged.
    """
    problems = Problems("the LoRA adapters")
    family = family_of(base.config)
    if family.name != "gpt":
        problems.add("LoRA of this family can only be merged", got=family.name, change=MERGED)
        problems.raise_if_any(CheckpointError)
    tasks = plan_tasks(base, family.weights(base.config), "the base")
    groups: dict[tuple[str, int], list[AdapterPart]] = {}
    for number, adapter in enumerate(adapters.values()):
        try:
            targets = adapter.places(tasks)
        except LauncherError as error:
            problems.merge(error)
            continue
        for name, updates in adapter.updates.items():
            for target in targets[name]:
                stem, layer = _stem_of(target.spec), tasks[target.number].layer
                update = _stacked(updates, target)
                if update is None or layer is None:
                    text = f"what {adapter.path} learned for {name} can only be merged"
                    problems.add(text, change=MERGED)
                    continue
                groups.setdefault((stem, layer), []).append(AdapterPart(number, target, update))
    problems.raise_if_any(CheckpointError)
    bases = {(_stem_of(task.spec), task.layer) for task in tasks}
    return _stack(groups, list(adapters), base.config, bases)


def _stem_of(spec: WeightSpec) -> str:
    return spec.name.removeprefix("layers.*.").removesuffix(".weight")


def _stacked(updates: Sequence[Update], position: Target) -> LowRank | None:
    """The update, if it can stay beside its weight."""
    target, update = LORA_TARGETS.get(_stem_of(position.spec)), updates[0]
    if target is None or len(updates) > 1 or not isinstance(update, LowRank) or update.magnitude:
        return None
    inputs_stay = position.layout in (LAYOUTS["transposed"], LAYOUTS["as_is"])
    if target.partition is Partition.ROW_PARALLEL and not inputs_stay:
        return None
    laid = position.laid(update)
    return laid if isinstance(laid, LowRank) else None


def _stack(
    groups: Mapping[tuple[str, int], Sequence[AdapterPart]],
    names: Sequence[str],
    config: ModelConfig,
    bases: Container[tuple[str, int | None]],
) -> LoRAStack:
    """bases: stems and layers of the projections that there are"""
    ranks = [part.update.down.shape[0] for parts in groups.values() for part in parts]
    count, rank = len(names), max(ranks, default=1)
    stems = {stem for stem, _ in groups}
    targets = [target for stem, target in LORA_TARGETS.items() if stem in stems]
    fields = {
        "lora_names": tuple(names),
        "lora_rank": rank,
        "lora_targets": tuple(target.stem for target in targets),
    }
    shards: dict[str, tuple[SourceTensor, ...]] = {}
    for target in targets:
        for layer in range(config.num_layers):
            if (target.stem, layer) not in bases:
                continue
            parts = groups.get((target.stem, layer), ())
            stem = f"layers.{layer}.{target.stem}"
            down, up = _tensors(target, parts, count, rank, config.of_layer(layer))
            shards |= {f"{stem}.lora_in.weight": (down,), f"{stem}.lora_out.weight": (up,)}
    return LoRAStack(fields, shards)


def _tensors(
    target: LoRATarget, parts: Sequence[AdapterPart], count: int, rank: int, config: Any
) -> tuple[StackedTensor, StackedTensor]:
    """A and B of one projection of a layer."""
    blocks, dtype = max(1, len(target.blocks)), np.dtype("<f4")
    inputs, outputs = (getattr(config, axis) for axis in (target.inputs, target.outputs))
    down = (inputs, count * blocks * rank)
    return (
        StackedTensor(down, dtype, (), parts, (count, blocks, rank)),
        StackedTensor((count * rank, outputs), dtype, (), parts, (count, rank)),
    )


KEYS = {
    "prompt": "export.model.prompt_checkpoints",
    "ia3": "export.model.ia3_checkpoints",
    "adapter": "export.model.adapter_checkpoints",
    "lora": KEY,
}

# What NeMo's adapters may say of themselves (None: absent or null).
_ADAPTER_VALUES: dict[str, tuple[Any, ...]] = {
    "type": (None, "linear_adapter", "parallel_adapter"),
    "norm_type": (None, "mixedfusedlayernorm", "layernorm"),
    "norm_position": (None, "pre", "post"),
    "weight_tying": (None, False),
}


@dataclass
class Collected:
    """The contents of all checkpoints of parts, in order.

    base:     what they were trained on
    in_place: IA3 is folded into the weights
    inserted: NeMo's checkpoints of adapters that stay modules of their own
    adapters: what is merged into the stored form
    """

    base: SourceCheckpoint
    in_place: bool
    shards: dict[str, tuple[SourceTensor, ...]] = field(default_factory=dict)
    folded: dict[str, tuple[SourceTensor, ...]] = field(default_factory=dict)
    tasks: list[PromptTask] = field(default_factory=list)
    inserted: list[PartFile] = field(default_factory=list)
    adapters: list[LearnedAdapter] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    starts_with_pad: bool = False

    def add(self, part: PartFile, kind: str, number: int) -> None:
        """Take in a checkpoint of a kind, a key of KEYS.  number: of those before it"""
        if kind == "prompt":
            self._add_prompts(part)
        elif kind == "ia3":
            target = self.folded if self.in_place else self.shards
            target.update({f"{number}:{name}": shards for name, shards in part.ia3.items()})
        else:
            if part.adapters:
                self.inserted.append(part)
                self.shards.update(part.adapters)
            if part.loras:
                self.adapters.append(_lora(part, self.base))
            self.notes += part.notes

    def _add_prompts(self, part: PartFile) -> None:
        problems = Problems(str(part.path))
        for task, table in read_tables(part, len(self.tasks)).items():
            if task in {supported.name for supported in self.tasks}:
                problems.add("two checkpoints have a task of this name", got=task)
            self.tasks.append(PromptTask(task, table.shape[0]))
            self.shards[f"prompt_table.{task}.weight"] = (table,)
        starts = section(part.raw, "data").get("decoder_starts_with_pad")
        if starts and family_of(self.base.config).name == "t5":
            self.starts_with_pad = True
        problems.raise_if_any(CheckpointError)

    def parts(self, ia3_count: int, problems: Problems, loras: Mapping[str, Any]) -> Adapters:
        """The adapters that the model then has.

        ia3_count: how many checkpoints of IA3 there are;  loras: the fields about LoRA
        """
        if len(self.inserted) > 1:
            problems.add(
                "a model takes one set of adapters",
                got=[part.path.name for part in self.inserted],
                change=KEYS["adapter"],
            )
        values: dict[str, Any] = dict(loras)
        if self.tasks:
            values["prompt_tasks"] = tuple(self.tasks)
            values["prompt_start_id"] = self.base.config.vocab_size
        if ia3_count:
            values |= {"ia3_adapted": True} if self.in_place else {"ia3_num_tasks": ia3_count}
        for part in self.inserted[:1]:
            values |= _adapter_values(part, problems)
        return Adapters(**values)

    def check_folded(self, ia3_count: int, problems: Problems) -> None:
        """Every vector to be folded in is there, has its size, and is known."""
        if not self.folded:
            return
        config, family = self.base.config, family_of(self.base.config).name
        expected: dict[str, int] = {}
        for site in ia3_sites(family, decoder=family == "t5" and not config.encoder_only):
            layers = getattr(config, stack_layers(site.name))
            for key in ia3_keys(site, ia3_count):
                size = int(getattr(config, site.axis))
                expected |= {key.replace("*", str(layer)): size for layer in range(layers)}
        for key in sorted(expected.keys() - self.folded.keys()):
            problems.add(f"{key} is missing")
        for key in sorted(self.folded.keys() - expected.keys()):
            problems.add(f"{key} is a vector this model should not have")
        for key in expected.keys() & self.folded.keys():
            shapes = [shard.shape for shard in self.folded[key]]
            vectors = all(len(shape) == 1 for shape in shapes)
            if not vectors or sum(shape[0] for shape in shapes) != expected[key]:
                problems.add(f"{key} has another shape", got=shapes, choices=[(expected[key],)])


def opened(path: Path, kind: str, family: str, scratch: Path | None) -> PartFile:
    if not path.exists():
        raise CheckpointError(
            problem("the checkpoint does not exist", got=str(path), change=KEYS[kind])
        )
    part = read_parts(path, scratch)
    problems = Problems(str(path))
    others = sorted(part.kinds - {kind})
    if not part.kinds:
        problems.add("it holds no adapters", change=KEYS[kind])
    if others:
        listed = sorted(part.others)[:3] if "prompt" in others else others
        problems.add(f"it holds what does not belong into {KEYS[kind]}", got=listed)
    if part.family not in (None, family):
        problems.add(
            "its parts are of another family than the base", got=part.family, choices=[family]
        )
    problems.raise_if_any(CheckpointError)
    return part


def _check_layers(part: PartFile, base: SourceCheckpoint, problems: Problems) -> None:
    """LoRA that is there for one layer is there for all that the base has, or says otherwise."""
    if selects_layers(part.raw):
        return
    numbered = re.compile(r"(.+\.layers\.)\d+(\..+)")
    kinds = {match.expand(r"\1*\2") for name in part.loras if (match := numbered.fullmatch(name))}
    for name in sorted(base.names()):
        match = numbered.fullmatch(name)
        if match and match.expand(r"\1*\2") in kinds and name not in part.loras:
            problems.add(f"LoRA of {name} is missing")


def nemo_lora(part: PartFile, base: SourceCheckpoint) -> LearnedAdapter:
    """NeMo 1's LoRA as an adapter that stays beside the weights, of which there is nothing else."""
    problems = Problems(str(part.path))
    if part.adapters:
        problems.add("it holds adapters that are not LoRA", change=KEYS["adapter"])
    problems.raise_if_any(CheckpointError)
    return _lora(part, base)


def _lora(part: PartFile, base: SourceCheckpoint) -> LearnedAdapter:
    """NeMo 1's LoRA as an adapter for the tensors of its base."""
    problems, scale = Problems(str(part.path)), lora_scale(part)
    for name, sides in part.loras.items():
        if set(sides) != {"in", "out"}:
            problems.add(f"LoRA of {name} is incomplete", got=sorted(sides), choices=["in", "out"])
    _check_layers(part, base, problems)
    problems.raise_if_any(CheckpointError)
    updates: dict[str, tuple[LowRank, ...]] = {}
    for task in plan_tasks(base, family_of(base.config).weights(base.config), "the base"):
        for name, tensor in zip(task.keys, task.tensors, strict=True):
            if name in part.loras.keys() - updates.keys():
                value = _low_rank(part.loras[name], scale, task)
                updates[name] = (value,)
                if value.problem() or value.shape != tensor.shape:
                    got = [value.up.shape, value.down.shape]
                    problems.add(f"LoRA of {name} does not fit", got=got, choices=[tensor.shape])
    missing = sorted(part.loras.keys() - updates.keys())
    if missing:
        problems.add("LoRA is for tensors that the base does not have", got=missing[:3])
    problems.raise_if_any(CheckpointError)
    return LearnedAdapter(part.path, updates, [base.dialects])


def _low_rank(sides: Mapping[str, tuple[SourceTensor, ...]], scale: float, task: Task) -> LowRank:
    """Read the low-rank matrices that training left on its tensor-parallel ranks. NeMo shares `out`
    by its rows always; `in` by the rank's axis, or by its columns where the weight's own ranks
    share the inputs.
    """
    row_parallel = task.spec.partition is Partition.ROW_PARALLEL
    down = concatenated(sides["in"], 1 if row_parallel else 0)
    up = concatenated(sides["out"], 0, 1 if row_parallel else task.layout.sections)
    return LowRank(down, up, scale)


def lora_scale(part: PartFile) -> float:
    """alpha / rank where the configuration has an alpha (NeMo 2.0), else 1."""
    tuning = section(section(part.raw, "peft"), "lora_tuning")
    alpha, rank = tuning.get("alpha"), tuning.get("adapter_dim")
    try:
        return 1.0 if alpha is None or not rank else float(alpha) / float(rank)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            problem(f"{part.path}: alpha and adapter_dim must be numbers", got=(alpha, rank))
        ) from error


def _adapter_values(part: PartFile, problems: Problems) -> dict[str, Any]:
    """Size and place of the adapters; what their configuration says that is not supported."""
    tuning = section(section(part.raw, "peft") or part.raw, "adapter_tuning")
    TrainingOptions(tuning, problems).reject_others(_ADAPTER_VALUES, " of adapter_tuning")
    wide = next(
        (shards for name, shards in part.adapters.items() if name.endswith("wi.weight")), ()
    )
    size = sum(shard.shape[0] for shard in wide if shard.shape)
    if not size:
        problems.add(f"the adapters of {part.path} have no matrices")
    return {
        "adapter_size": size,
        "adapter_norm_position": tuning.get("norm_position") or "pre",
    }
