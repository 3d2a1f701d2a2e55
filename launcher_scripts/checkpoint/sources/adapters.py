"""A source checkpoint together with the adapters that were trained on top of it.

To the export it looks like any other source: prompt tables, IA3 vectors and adapters are further
tensors, for the rows that models/adapters.py adds to the weight table. LoRA and what else can be
merged changes the stored form of the weights (merging.py), and so does IA3 that is folded in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.distributed import METADATA
from launcher_scripts.checkpoint.formats.nemo_config import CONFIG_NAME as NEMO_CONFIG
from launcher_scripts.checkpoint.formats.source_tensor import SourceTensor
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    FullTensors,
    Hints,
    Shards,
    SourceCheckpoint,
    TensorShards,
    find_full,
)
from launcher_scripts.checkpoint.layout.tasks import Scale, Task, source_of
from launcher_scripts.checkpoint.sources import huggingface_peft, megatron_core
from launcher_scripts.checkpoint.sources.adapter_collect import (
    Collected,
    LoRAStack,
    nemo_lora,
    opened,
    stacked_lora,
)
from launcher_scripts.checkpoint.sources.fastertransformer import FasterTransformerSource
from launcher_scripts.checkpoint.sources.merging import LearnedAdapter
from launcher_scripts.checkpoint.sources.nemo_files import config_files
from launcher_scripts.checkpoint.tokenizers.tokenizer_files import TokenRule
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.config.settings import ExportSettings
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import (
    DIALECT,
    IA3Site,
    ia3_keys,
    ia3_sites,
)
from launcher_scripts.models.family import Partition

FAMILIES = ("gpt", "t5")


@dataclass(frozen=True)
class AdaptedCheckpoint(SourceCheckpoint):
    """`base` with its adapters.

    config:          base's hyperparameters with the parts in
    shards:          the rows of the parts, under their own names
    adapters:        what is merged into the stored form
    folded:          name of a vector, behind its task's number -> shards, to be folded in
    sources:         kind of part -> its checkpoints, in order
    starts_with_pad: prompts were trained with a decoder that starts with the padding token
    """

    base: SourceCheckpoint
    config: Any
    dialects: tuple[str, ...]
    shards: Shards
    folded: Shards
    notes: tuple[str, ...]
    sources: Mapping[str, Sequence[str]]
    starts_with_pad: bool = False
    adapters: Sequence[LearnedAdapter] = ()

    @property
    def knows_token_ids(self) -> bool:
        return self.base.knows_token_ids

    @property
    def token_rule(self) -> TokenRule | None:
        return self.base.token_rule

    def stored_name(self, name: str) -> str:
        return self.base.stored_name(name)

    def tokenizer_files(self) -> dict[str, bytes]:
        return self.base.tokenizer_files()

    def config_json(self) -> Mapping[str, Any] | None:
        return self.base.config_json()

    @property
    def config_dialects(self) -> tuple[str, ...]:
        return self.base.config_dialects

    def extra_files(self) -> dict[str, bytes]:
        return self.base.extra_files()

    def describe(self) -> dict[str, Any]:
        """Return the description of the source for the manifest."""
        return {**self.base.describe(), "adapters": dict(self.sources)}

    def names(self) -> set[str]:
        return self.base.names() | set(self.shards)

    def find(self, name: str, partition: Partition, sections: int = 1) -> SourceTensor | None:
        if name in self.shards:
            return find_full(self.shards, name, partition, sections)
        return self.base.find(name, partition, sections)

    def fold(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks, with the adapters merged, and scaled by the IA3 vectors that are folded in.

        Raises CheckpointError with all of an adapter that does not fit the base.
        """
        folded = list(tasks)
        for adapter in self.adapters:
            folded = adapter.merged(folded)
        return self._scaled(folded) if self.folded else folded

    def _scaled(self, tasks: Iterable[Task]) -> list[Task]:
        family = family_of(self.config).name
        sites: dict[str, list[IA3Site]] = {}
        for site in ia3_sites(family):
            sites.setdefault(f"{site.target}.weight", []).append(site)
            if site.block is not None:
                sites.setdefault(f"{site.target}.bias", []).append(site)
        return [
            dataclasses.replace(
                task,
                changes=(
                    *task.changes,
                    *(
                        scale
                        for site in sites.get(task.spec.name, ())
                        for scale in self._scales(site, task)
                    ),
                ),
            )
            for task in tasks
        ]

    def _scales(self, site: IA3Site, task: Task) -> list[Scale]:
        layer = str(task.layer)
        patterns = [key.replace("*", layer) for key in ia3_keys(site, len(self.sources["ia3"]))]
        vectors = [find_full(self.folded, key, Partition.COLUMN_PARALLEL, 1) for key in patterns]
        return [Scale(vector, site.block) for vector in vectors if vector is not None]

    def with_start_id(self, config: Any) -> Any:
        """The config with the decoder start that the prompts were trained with."""
        if not self.starts_with_pad or config.pad_id is None:
            return config
        return dataclasses.replace(config, start_id=config.pad_id)


def with_adapters(
    base: SourceCheckpoint, settings: ExportSettings, scratch: Path | None = None
) -> AdaptedCheckpoint | None:
    """`base` with the parts the settings name; None without any.

    Raises CheckpointError with everything that does not fit the base or each other.
    """
    lists = {
        "prompt": settings.prompt_checkpoints,
        "ia3": settings.ia3_checkpoints,
        "adapter": settings.adapter_checkpoints,
    }
    if not any(lists.values()) and not base.adapters and not settings.lora_checkpoints:
        return None
    problems = Problems("the adapters")
    family = family_of(base.config).name
    if family not in FAMILIES:
        problems.add("this family takes no adapters", got=family, choices=FAMILIES)
        problems.raise_if_any(CheckpointError)
    collected = Collected(base, settings.ia3_in_place, adapters=list(base.adapters))
    for kind, paths in lists.items():
        for number, path in enumerate(map(Path, paths)):
            with problems.collecting():
                if kind == "adapter" and (adapter := _read_adapter(path, base)):
                    collected.adapters.append(adapter)
                else:
                    collected.add(opened(path, kind, family, scratch), kind, number)
    loras = _read_loras(settings.lora_checkpoints, base, problems, scratch)
    base = collected.base = _with_tables(base, collected.adapters, problems)
    problems.raise_if_any(CheckpointError)
    collected.shards.update(loras.shards)
    count = len(settings.ia3_checkpoints)
    parts = collected.parts(count, problems, loras.fields)
    config = dataclasses.replace(base.config, parts=parts)
    collected.check_folded(count, problems)
    problems.raise_if_any(CheckpointError)
    return AdaptedCheckpoint(
        base,
        config,
        (DIALECT, *base.dialects),
        collected.shards,
        collected.folded,
        (
            *base.notes,
            *collected.notes,
            *(note for adapter in collected.adapters for note in adapter.notes),
        ),
        {kind: list(paths) for kind, paths in lists.items()}
        | ({"lora": list(settings.lora_checkpoints)} if settings.lora_checkpoints else {}),
        collected.starts_with_pad,
        collected.adapters,
    )


def _with_tables(
    base: SourceCheckpoint, adapters: Sequence[LearnedAdapter], problems: Problems
) -> SourceCheckpoint:
    """The base with the adapters' tables of the vocabulary in the place of its own."""
    tables: dict[str, SourceTensor] = {}
    for adapter in adapters:
        for row in adapter.tables.keys() & tables.keys():
            problems.add(f"two adapters bring {row} of their own", got=str(adapter.path))
        tables |= adapter.tables
    sizes = {table.shape[0] for table in tables.values() if table.shape}
    if len(sizes) > 1:
        problems.add("the adapters' tables of the vocabulary have different rows", got=sizes)
    if len(sizes) != 1 or problems.messages:
        return base
    tied = getattr(base.config, "tied_embeddings", False)
    unties = tied and not all(adapter.ties for adapter in adapters if adapter.tables)
    changes = {"vocab_size": sizes.pop()} | ({"tied_embeddings": False} if unties else {})
    config = dataclasses.replace(base.config, **changes)
    tensors = {}
    for spec in family_of(config).weights(config):
        source = source_of(spec, base.dialects)
        if spec.partition is not Partition.VOCAB_PARALLEL or len(spec.shape) != 2 or source is None:
            continue
        (key, *_), first = source.keys, _first_table(base)
        if spec.name in tables and (source.layout != "as_is" or len(source.keys) > 1):
            problems.add(f"the base keeps {spec.name} in another form than the adapter has it")
        elif spec.name in tables:
            tensors[key] = tables[spec.name]
        elif unties and first is not None and key not in base.names():
            tensors[key] = first
    return _replaced(base, config, tensors)


def _first_table(base: SourceCheckpoint) -> SourceTensor | None:
    """The table that a base ties its others to."""
    for spec in family_of(base.config).weights(base.config):
        source = source_of(spec, base.dialects)
        if spec.partition is Partition.VOCAB_PARALLEL and len(spec.shape) == 2 and source:
            return base.find(source.keys[0], spec.partition)
    return None


def _replaced(
    base: SourceCheckpoint, config: Any, tensors: Mapping[str, SourceTensor]
) -> SourceCheckpoint:
    """The base with other hyperparameters, and whole tensors in the place of its own."""
    values: dict[str, Any] = {"config": config}
    if isinstance(base, TensorShards):
        values["shards"] = {**base.shards, **{key: (value,) for key, value in tensors.items()}}
    elif isinstance(base, FullTensors):
        values["tensors"] = {**base.tensors, **tensors}
    return dataclasses.replace(base, **values)  # type: ignore[type-var]


def _read_loras(
    paths: Sequence[str], base: SourceCheckpoint, problems: Problems, scratch: Path | None
) -> LoRAStack:
    """The adapters that requests choose, named by their files or folders."""
    adapters: dict[str, LearnedAdapter] = {}
    for path in map(Path, paths):
        name = path.name.removesuffix(".nemo")
        if name in adapters:
            problems.add("two adapters have one name", got=str(path), change="that of its folder")
            continue
        with problems.collecting():
            adapters[name] = _read_separate(path, base, problems, scratch)
    if adapters:
        with problems.collecting():
            return stacked_lora(adapters, base)
    return LoRAStack({}, {})


def _read_separate(
    path: Path, base: SourceCheckpoint, problems: Problems, scratch: Path | None
) -> LearnedAdapter:
    """LoRA that stays beside the weights."""
    family = family_of(base.config).name
    adapter = _read_adapter(path, base)
    adapter = adapter or nemo_lora(opened(path, "adapter", family, scratch), base)
    if adapter.tables:
        message = f"{path} brings tables of the vocabulary: it can only be merged"
        problems.add(message, change="export.model.adapter_checkpoints")
    return adapter


def read_lora(path: Path, folder: Path) -> LoRAStack:
    """Open one adapter for the model that is exported in `folder`.

    Raises CheckpointError with everything that does not fit.
    """
    if not path.exists():
        raise CheckpointError(problem("the adapter is not there", got=str(path)))
    problems = Problems(f"the adapter {path}")
    base = FasterTransformerSource.open(Archive(folder), Hints())
    with problems.collecting():
        stack = stacked_lora({"added": _read_separate(path, base, problems, None)}, base)
    problems.raise_if_any(CheckpointError)
    return stack


def _read_adapter(path: Path, base: SourceCheckpoint) -> LearnedAdapter | None:
    """An adapter of another maker than NeMo 1; None for what is none."""
    readers = (
        (huggingface_peft.matches, huggingface_peft.read_peft),
        (megatron_core.holds_adapter, megatron_core.read_core_adapter),
    )
    read = next((read for matches, read in readers if matches(path)), None)
    if read is None:
        if path.is_dir() and not config_files(Archive(path)):
            files = (
                f"{huggingface_peft.CONFIG_NAME} (Hugging Face PEFT)",
                f"{METADATA} and .metadata (NeMo 2, Megatron Bridge)",
                f"{NEMO_CONFIG} (NeMo 1)",
            )
            raise CheckpointError(problem(f"{path} holds no adapter that is known", choices=files))
        return None
    try:
        return read(path, base)
    except LauncherError as error:
        raise CheckpointError(str(error)) from error  # one message, which names the adapter
