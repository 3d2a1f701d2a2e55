"""A source checkpoint together with the parts that were learned on top of it.

To the export it looks like any other source: LoRA changes the tensors that are found, prompt
tables, IA3 vectors and adapters are further tensors, for the rows that models/learned_parts.py
adds to the weight table. IA3 that is folded in scales the stored form of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.lora import LoRA, MergedTensor
from launcher_scripts.checkpoint.nemo_parts import PartFile, read_parts
from launcher_scripts.checkpoint.plan import Scale, SourceCheckpoint, Task
from launcher_scripts.checkpoint.prompt_tables import read_tables
from launcher_scripts.checkpoint.shards import Shards, find_whole
from launcher_scripts.checkpoint.source_tensor import SourceTensor
from launcher_scripts.checkpoint.tokenizer_files import TokenRule
from launcher_scripts.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.models import family_of
from launcher_scripts.models.family import Partition
from launcher_scripts.models.learned_parts import (
    DIALECT,
    IA3Site,
    LearnedParts,
    PromptTask,
    ia3_keys,
    ia3_sites,
)
from launcher_scripts.settings import ExportSettings

FAMILIES = ("gpt", "t5")
KEYS = {
    "prompt": "export.model.prompt_checkpoints",
    "ia3": "export.model.ia3_checkpoints",
    "adapter": "export.model.adapter_checkpoints",
}


@dataclass(frozen=True)
class LearnedCheckpoint:
    """`base` with its learned parts; a SourceCheckpoint itself.

    config:          base's hyperparameters with the parts in
    shards:          the rows of the parts, under their own names
    loras:           name of one of base's tensors -> what is merged into it
    ia3:             name of a vector, behind its task's number -> shards, to be folded in
    starts_with_pad: prompts were trained with a decoder that starts with the padding token
    """

    base: SourceCheckpoint
    config: Any
    shards: Shards
    loras: Mapping[str, Sequence[LoRA]]
    folded: Shards
    notes: tuple[str, ...]
    sources: Mapping[str, Sequence[str]]
    starts_with_pad: bool = False

    @property
    def dialects(self) -> tuple[str, ...]:
        return (DIALECT, *self.base.dialects)

    @property
    def knows_token_ids(self) -> bool:
        return self.base.knows_token_ids

    @property
    def token_rule(self) -> TokenRule | None:
        return self.base.token_rule

    def tokenizer_files(self) -> dict[str, bytes]:
        return self.base.tokenizer_files()

    def extra_files(self) -> dict[str, bytes]:
        return self.base.extra_files()

    def describe(self) -> dict[str, Any]:
        """What the manifest records about the source."""
        return {**self.base.describe(), "learned_parts": dict(self.sources)}

    def names(self) -> set[str]:
        return self.base.names() | set(self.shards)

    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        """As SourceCheckpoint.find; a tensor with LoRA is merged when it is read."""
        if name in self.shards:
            return find_whole(self.shards, name, partition, sections)
        found = self.base.find(name, partition, sections)
        for lora in self.loras.get(name, ()):
            if found is not None:
                found = MergedTensor.of(found, lora.whole(partition, sections), name)
        return found

    def fold(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks, scaled by the IA3 vectors that are folded in."""
        if not self.folded:
            return list(tasks)
        family = family_of(self.config).name
        sites: dict[str, list[IA3Site]] = {}
        for site in ia3_sites(family):
            sites.setdefault(f"{site.target}.weight", []).append(site)
            if site.block is not None:
                sites.setdefault(f"{site.target}.bias", []).append(site)
        return [
            dataclasses.replace(
                task,
                scales=tuple(
                    scale
                    for site in sites.get(task.spec.name, ())
                    for scale in self._scales(site, task)
                ),
            )
            for task in tasks
        ]

    def _scales(self, site: IA3Site, task: Task) -> list[Scale]:
        layer = str(task.layer)
        wanted = [key.replace("*", layer) for key in ia3_keys(site, len(self.sources["ia3"]))]
        vectors = [find_whole(self.folded, key, Partition.COLUMN_PARALLEL, 1) for key in wanted]
        return [Scale(vector, site.block) for vector in vectors if vector is not None]

    def with_start_id(self, config: Any) -> Any:
        """The config with the decoder start that the prompts were trained with."""
        if not self.starts_with_pad or config.pad_id is None:
            return config
        return dataclasses.replace(config, start_id=config.pad_id)


@dataclass
class _Collected:
    """What all checkpoints of parts hold together, in order."""

    shards: dict[str, tuple[SourceTensor, ...]] = field(default_factory=dict)
    loras: dict[str, list[LoRA]] = field(default_factory=dict)
    folded: dict[str, tuple[SourceTensor, ...]] = field(default_factory=dict)
    tasks: list[PromptTask] = field(default_factory=list)
    adapters: list[PartFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    starts_with_pad: bool = False


def with_learned_parts(
    base: SourceCheckpoint, settings: ExportSettings, scratch: Path | None = None
) -> LearnedCheckpoint | None:
    """`base` with the parts the settings name; None without any.

    Raises CheckpointError with everything that does not fit the base or each other.
    """
    lists = {
        "prompt": settings.prompt_checkpoints,
        "ia3": settings.ia3_checkpoints,
        "adapter": settings.adapter_checkpoints,
    }
    if not any(lists.values()):
        return None
    problems = Problems("the learned parts")
    family = family_of(base.config).name
    if family not in FAMILIES:
        problems.add("this family takes no learned parts", got=family, choices=FAMILIES)
        problems.raise_if_any(CheckpointError)
    found = _Collected()
    for kind, paths in lists.items():
        for number, path in enumerate(paths):
            try:
                part = _opened(Path(path), kind, family, scratch)
                _COLLECT[kind](part, number, found, base, settings.ia3_in_place)
            except LauncherError as error:
                problems.merge(error)
    parts = _parts(found, base, lists, settings.ia3_in_place, problems)
    config = dataclasses.replace(base.config, parts=parts)
    _check_folded(found, config, family, len(settings.ia3_checkpoints), problems)
    missing = sorted(set(found.loras) - base.names())
    if missing:
        problems.add("LoRA is for tensors that the base does not have", got=missing[:3])
    problems.raise_if_any(CheckpointError)
    return LearnedCheckpoint(
        base,
        config,
        found.shards,
        found.loras,
        found.folded,
        (*base.notes, *found.notes),
        {kind: list(paths) for kind, paths in lists.items()},
        found.starts_with_pad,
    )


def _opened(path: Path, kind: str, family: str, scratch: Path | None) -> PartFile:
    if not path.exists():
        raise CheckpointError(
            problem("the checkpoint does not exist", got=str(path), change=KEYS[kind])
        )
    part = read_parts(path, scratch)
    problems = Problems(str(path))
    others = sorted(part.kinds - {kind})
    if not part.kinds:
        problems.add("it holds no learned parts", change=KEYS[kind])
    if others:
        shown = sorted(part.others)[:3] if "prompt" in others else others
        problems.add(f"it holds what does not belong into {KEYS[kind]}", got=shown)
    if part.family not in (None, family):
        problems.add(
            "its parts are of another family than the base", got=part.family, choices=[family]
        )
    problems.raise_if_any(CheckpointError)
    return part


def _collect_prompts(
    part: PartFile, _number: int, found: _Collected, base: SourceCheckpoint, _in_place: bool
) -> None:
    problems = Problems(str(part.path))
    for task, table in read_tables(part, len(found.tasks)).items():
        if task in {known.name for known in found.tasks}:
            problems.add("two checkpoints have a task of this name", got=task)
        found.tasks.append(PromptTask(task, table.shape[0]))
        found.shards[f"prompt_table.{task}.weight"] = (table,)
    data = part.raw.get("data")
    starts = isinstance(data, Mapping) and data.get("decoder_starts_with_pad")
    if starts and family_of(base.config).name == "t5":
        found.starts_with_pad = True
    problems.raise_if_any(CheckpointError)


def _collect_ia3(
    part: PartFile, number: int, found: _Collected, _base: SourceCheckpoint, in_place: bool
) -> None:
    target = found.folded if in_place else found.shards
    target.update({f"{number}:{name}": shards for name, shards in part.ia3.items()})


def _collect_adapters(
    part: PartFile, _number: int, found: _Collected, _base: SourceCheckpoint, _in_place: bool
) -> None:
    problems = Problems(str(part.path))
    if part.adapters:
        found.adapters.append(part)
        found.shards.update(part.adapters)
    for name, sides in part.loras.items():
        if set(sides) != {"in", "out"}:
            problems.add(f"LoRA of {name} is incomplete", got=sorted(sides), choices=["in", "out"])
            continue
        found.loras.setdefault(name, []).append(LoRA(sides["in"], sides["out"], lora_scale(part)))
    found.notes += part.notes
    problems.raise_if_any(CheckpointError)


_COLLECT: dict[str, Callable[[PartFile, int, _Collected, SourceCheckpoint, bool], None]] = {
    "prompt": _collect_prompts,
    "ia3": _collect_ia3,
    "adapter": _collect_adapters,
}


def lora_scale(part: PartFile) -> float:
    """alpha / rank where the configuration has an alpha (NeMo 2.0), else 1."""
    tuning = (part.raw.get("peft") or {}).get("lora_tuning") or {}
    alpha, rank = tuning.get("alpha"), tuning.get("adapter_dim")
    return 1.0 if alpha is None or not rank else float(alpha) / float(rank)


def _parts(
    found: _Collected,
    base: SourceCheckpoint,
    lists: Mapping[str, Sequence[str]],
    in_place: bool,
    problems: Problems,
) -> LearnedParts:
    if len(found.adapters) > 1:
        problems.add(
            "a model takes one set of adapters",
            got=[part.path.name for part in found.adapters],
            change=KEYS["adapter"],
        )
    values: dict[str, Any] = {}
    if found.tasks:
        values |= {
            "prompt_tasks": tuple(found.tasks),
            "prompt_start_id": base.config.vocab_size,
        }
    if lists["ia3"]:
        values |= {"ia3_adapted": True} if in_place else {"ia3_num_tasks": len(lists["ia3"])}
    for part in found.adapters[:1]:
        values |= _adapter_values(part, problems)
    return LearnedParts(**values)


def _adapter_values(part: PartFile, problems: Problems) -> dict[str, Any]:
    """Size and place of the adapters; what their configuration says that is not supported."""
    peft = part.raw.get("peft")
    tuning = (peft if isinstance(peft, Mapping) else part.raw).get("adapter_tuning") or {}
    kind = tuning.get("type", "parallel_adapter")
    for key, value, choices in (
        ("type", kind, ("linear_adapter", "parallel_adapter")),
        ("norm_type", tuning.get("norm_type"), (None, "mixedfusedlayernorm", "layernorm")),
        ("norm_position", tuning.get("norm_position"), (None, "pre", "post")),
        ("weight_tying", tuning.get("weight_tying"), (None, False)),
    ):
        if value not in choices:
            problems.add(f"adapter_tuning.{key} is not supported", got=value, choices=choices)
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


def _check_folded(
    found: _Collected, config: Any, family: str, count: int, problems: Problems
) -> None:
    """Every vector to be folded in is there, has its size, and is known."""
    if not found.folded:
        return
    expected: dict[str, int] = {}
    decoder = family == "t5" and not config.encoder_only
    for site in ia3_sites(family, decoder):
        layers = (
            config.num_decoder_layers if site.name.startswith("decoder.") else config.num_layers
        )
        for key in ia3_keys(site, count):
            size = int(getattr(config, site.axis))
            expected |= {key.replace("*", str(layer)): size for layer in range(layers)}
    for key in sorted(expected.keys() - found.folded.keys()):
        problems.add(f"{key} is missing")
    for key in sorted(found.folded.keys() - expected.keys()):
        problems.add(f"{key} is a vector this model should not have")
    for key in expected.keys() & found.folded.keys():
        size = sum(shard.shape[0] for shard in found.folded[key])
        if size != expected[key]:
            problems.add(f"{key} has another size", got=size, choices=[expected[key]])
