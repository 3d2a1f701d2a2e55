"""From a source checkpoint to FasterTransformer's shards: check, plan, then write."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from launcher_scripts.checkpoint.fastertransformer.config_ini import (
    check_draft_folder,
)
from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter
from launcher_scripts.checkpoint.fastertransformer.manifest import (
    TOOL_VERSION,
    FileEntry,
    Manifest,
    check_files,
    identity,
    partial_folder,
    read_manifest,
    reject_existing,
    size_of,
    source_digest,
)
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.formats.gguf_file import split_files
from launcher_scripts.checkpoint.layout.source_checkpoint import (
    Hints,
    SourceCheckpoint,
)
from launcher_scripts.checkpoint.layout.tasks import (
    MIN_BYTES,
    Task,
    checkpoint_type,
    plan_tasks,
    range_notes,
    reject_unfit,
    write_all,
)
from launcher_scripts.checkpoint.layout.writing import Progress, in_background
from launcher_scripts.checkpoint.model_repository import backend_model_type
from launcher_scripts.checkpoint.sources import nemo_files
from launcher_scripts.checkpoint.sources.adapters import AdaptedCheckpoint, with_adapters
from launcher_scripts.checkpoint.sources.fastertransformer import (
    FasterTransformerSource,
    RandomCheckpoint,
)
from launcher_scripts.checkpoint.sources.gguf_checkpoint import GGUFCheckpoint
from launcher_scripts.checkpoint.sources.huggingface import HuggingFaceCheckpoint
from launcher_scripts.checkpoint.sources.locations import hub_advice, not_a_checkpoint, snapshot_of
from launcher_scripts.checkpoint.sources.megatron import MegatronCheckpoint
from launcher_scripts.checkpoint.sources.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.checkpoint.sources.nemo import NemoCheckpoint
from launcher_scripts.checkpoint.tokenizers import tokenizer_files
from launcher_scripts.checkpoint.verification import Forecast, verify_export, weight_bytes
from launcher_scripts.common.errors import (
    CheckpointError,
    ConfigError,
    LauncherError,
    Problems,
    lookup,
    problem,
)
from launcher_scripts.common.files import SOURCE_DIGESTS
from launcher_scripts.config.settings import AUTO, CHECKPOINT_KEY, ExportSettings
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import LORA_FIELDS, is_lora_file
from launcher_scripts.models.family import ModelConfig, check_division


class SourceFormat(Protocol):
    """A class of SOURCES: reads checkpoints of one format."""

    def matches(self, archive: Archive, /) -> bool:
        """Return whether the archive looks like one of this format."""
        ...

    def open(self, archive: Archive, hints: Hints, /) -> SourceCheckpoint:
        """Raises CheckpointError for what is damaged, incomplete or not supported."""
        ...


# The formats that can be exported, by name.
SOURCES: dict[str, SourceFormat] = {
    "nemo": NemoCheckpoint,
    "megatron": MegatronCheckpoint,
    "megatron_core": MegatronCoreCheckpoint,
    "huggingface": HuggingFaceCheckpoint,
    "gguf": GGUFCheckpoint,
    "fastertransformer": FasterTransformerSource,
    "random": RandomCheckpoint,
}
# What the manifest calls the digest of everything that makes an export what it is, and of
# everything except the LoRA adapters beside the weights.
IDENTITY, BASE_IDENTITY = "identity", "base_identity"
# Of checkpoints whose digest is not asked for: it takes a further look at all bytes.
_DIGESTED_BYTES = 8 << 30
# Compares an exported folder with its source in another way; what the manifest says about it.
Compare = Callable[[Path, ExportSettings], Mapping[str, Any]]


@dataclass(frozen=True)
class OpenedExport:
    """A checkpoint that is read, with its adapters and its tokenizer, and what it becomes.

    base:       without adapters
    adapted:    with them; None if there are none
    files:      the tokenizer's, by their exported names
    config:     the hyperparameters, with the special ids
    tasks:      one per stored tensor, adapters merged
    stored:     the type of most of its values
    """

    path: Path
    archive: Archive
    base: SourceCheckpoint
    adapted: AdaptedCheckpoint | None
    files: dict[str, bytes]
    config: Any
    tasks: list[Task]
    stored: str
    notes: list[str]

    @property
    def checkpoint(self) -> SourceCheckpoint:
        return self.adapted or self.base


def open_export(settings: ExportSettings) -> OpenedExport:
    """Read and check a checkpoint. Raises CheckpointError or ConfigError with all problems."""
    with _reading(settings.checkpoint_path):
        path, hints = _located(settings)
        scratch = _existing_parent(settings.checkpoint_dir)
        archive = Archive(path, scratch=scratch)
        base = open_source(archive, settings.source, hints)
        adapted = with_adapters(base, settings, scratch)
        checkpoint: SourceCheckpoint = adapted or base
        files = tokenizer_files.collect_tokenizer(settings.tokenizer, checkpoint.tokenizer_files)
        config = _with_token_ids(settings, checkpoint, files)
        if adapted:
            config = adapted.with_start_id(config)
        if settings.model_type:
            backend_model_type(settings.model_type, config)
        check_serving(settings, config)
        tasks = plan_tasks(checkpoint, family_of(config).weights(config), f"the checkpoint {path}")
        stored = checkpoint_type(tasks)
        notes = _notes(settings, checkpoint, files, stored)
        if adapted:
            tasks = adapted.fold(tasks)
    return OpenedExport(path, archive, base, adapted, files, config, tasks, stored, notes)


def export(settings: ExportSettings, reference: Compare | None = None) -> Path:
    """Write settings.checkpoint_dir; returns it.

    reference: called with the verified folder where settings.verify asks for it
    Raises CheckpointError or ConfigError. On any error nothing is left, neither under the final
    name nor a partial folder; an interruption leaves the partial folder, and a repeated run
    finishes what is missing.
    """
    target = settings.checkpoint_dir
    reject_existing(target, settings.overwrite or settings.reuse)
    opened = open_export(settings)
    path, config, tasks, checkpoint = opened.path, opened.config, opened.tasks, opened.checkpoint
    if settings.weight_data_type == AUTO:
        settings = replace(settings, weight_data_type=opened.stored)
    files = opened.files | checkpoint.extra_files()
    name = export_identity(settings, checkpoint.describe(), config, path)
    base_name = export_identity(*_without_lora(settings, opened.base, checkpoint, config), path)
    weights: dict[str, FileEntry] = {}
    if settings.reuse and not settings.overwrite and target.exists():
        weights = _base_weights(target, name, base_name)
        if not weights:
            verify = partial(verify_export, target, tasks, settings.processes)
            return reused(settings, name, files, path, verify)
        print(f"only LoRA adapters differ: the weights of {target} are kept", flush=True)
    total = weight_bytes(config, settings.parallelism.tp_size, settings.weight_data_type)
    check_space(target, total, retained=sum(entry.bytes for entry in weights.values()))
    print_forecast(opened, total, target)
    metadata: dict[str, Any] = {IDENTITY: name, BASE_IDENTITY: base_name}
    metadata |= {"notes": opened.notes} if opened.notes else {}
    writer = FTWriter(
        target,
        config,
        settings.parallelism.tp_size,
        settings.weight_data_type,
        source=checkpoint.describe() | metadata,
        overwrite=settings.overwrite or bool(weights),
        name=name,
        earlier=weights,
    )
    with source_digests(settings, path) as digests, writer:
        for file_name, content in files.items():
            writer.copy(content, file_name)
        progress = Progress(f"exporting {path.name}", total)
        unfit = write_all(tasks, writer, opened.archive, progress, settings)
        progress.close()
        reject_unfit(tasks, unfit, f"the weights of {path}")
        writer.source |= digests()
        writer.seal()
        if settings.verify:
            verify_export(writer.partial, tasks, settings.processes)
            print(f"verified {len(tasks)} tensors against {path}", flush=True)
            if reference is not None:
                writer.annotate("twin", reference(writer.partial, settings))
    return target


def print_forecast(opened: OpenedExport, total: int, target: Path) -> None:
    """Print what is going to be read and written."""
    family = family_of(opened.config).name
    free = _free_space(target)
    print(Forecast.of(opened.base.format, family, opened.tasks, total, free), flush=True)


def _notes(
    settings: ExportSettings, checkpoint: SourceCheckpoint, files: Mapping[str, bytes], stored: str
) -> list[str]:
    """Returns what a user should know about the export, which is also printed."""
    is_t5 = family_of(checkpoint.config).name == "t5"
    notes = [*checkpoint.notes, *tokenizer_files.missing_files(files)]
    notes += tokenizer_files.tokens_beyond(files, checkpoint.config.vocab_size)
    notes += range_notes(settings, stored, is_t5=is_t5)
    for note in notes:
        print(f"note: {note}", flush=True)
    return notes


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Whatever no reader has foreseen in a checkpoint is an error of that checkpoint."""
    try:
        yield
    except LauncherError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint {path} is damaged: {reason}") from error


def _located(settings: ExportSettings) -> tuple[Path, Hints]:
    """The checkpoint that is meant, and what the settings say about it."""
    path = Path(settings.checkpoint_path)
    if not path.exists():
        raise ConfigError(
            problem(
                f"the checkpoint does not exist{hub_advice(settings.checkpoint_path)}",
                got=str(path),
                change=CHECKPOINT_KEY,
            )
        )
    path, selected = nemo_files.locate(snapshot_of(path), settings.training_checkpoint)
    return path, Hints(
        settings.num_attention_heads,
        settings.encoder_only,
        selected,
        settings.allow_custom_code_config,
        settings.prediction_layer,
    )


def _with_token_ids(
    settings: ExportSettings, checkpoint: SourceCheckpoint, files: Mapping[str, bytes]
) -> Any:
    return tokenizer_files.with_token_ids(
        checkpoint.config,
        settings.tokenizer,
        files,
        has_ids=checkpoint.knows_token_ids,
        rule=checkpoint.token_rule,
    )


def export_identity(
    settings: ExportSettings, source: Mapping[str, Any], config: ModelConfig, path: Path
) -> str:
    """Returns what this export is, so that a later one can go on with its files."""
    values = {
        "source": source,
        "config": repr(config),
        "tp_size": settings.parallelism.tp_size,
        "weight_data_type": settings.weight_data_type,
        "ia3_in_place": settings.ia3_in_place,
        "allow_nonfinite": settings.allow_nonfinite,
        "tool": TOOL_VERSION,
    }
    return identity(values, _sources(settings, path))


def _sources(settings: ExportSettings, path: Path) -> list[Path]:
    """The checkpoint in `path` and those that are added to it."""
    parts = (
        *settings.prompt_checkpoints,
        *settings.ia3_checkpoints,
        *settings.adapter_checkpoints,
        *settings.lora_checkpoints,
    )
    return [*split_files(path), *map(Path, parts)]


@contextmanager
def source_digests(settings: ExportSettings, path: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Compute a digest of every checkpoint that is read, beside what the block does.

    The block gets what returns the entry of the manifest; {} without one.
    """
    sources, requested = _sources(settings, path), settings.digest_source
    size = sum(map(size_of, sources))
    if requested is None:
        requested = settings.sign is not None or size < _DIGESTED_BYTES

    def digests() -> dict[str, Any]:
        return {SOURCE_DIGESTS: {str(x): source_digest(x) for x in sources}} if requested else {}

    if not requested or settings.processes == 1 or size < MIN_BYTES:
        yield digests
        return
    with in_background(digests) as result:
        yield result


def reused(
    settings: ExportSettings,
    name: str,
    files: Mapping[str, bytes],
    path: Path,
    verify: Callable[[], None],
) -> Path:
    """Return the folder of an earlier export, which must be the same.

    files:  those beside the weights, by name
    verify: called where settings.verify asks for it
    """
    target = settings.checkpoint_dir
    manifest = check_same(target, name, files)
    if manifest is not None and SOURCE_DIGESTS not in manifest.source:
        with source_digests(settings, path) as digests:
            source = {**manifest.source, **digests()}
        replace(manifest, source=source).write(target)
    if settings.verify:
        verify()
    print(f"the earlier export is the same and is kept: {target}", flush=True)
    return target


def _without_lora(
    settings: ExportSettings, base: SourceCheckpoint, checkpoint: SourceCheckpoint, config: Any
) -> tuple[ExportSettings, Mapping[str, Any], ModelConfig]:
    """Returns the settings, the description and the config of an export without its LoRA list."""
    adapters = checkpoint.describe().get("adapters", {})
    merged = {kind: paths for kind, paths in adapters.items() if paths and kind != "lora"}
    if settings.lora_checkpoints:
        none: dict[str, Any] = {**dict.fromkeys(LORA_FIELDS, ()), "lora_rank": 0}
        config = replace(config, parts=replace(config.parts, **none))
    return replace(settings, lora_checkpoints=()), base.describe() | merged, config


def _base_weights(target: Path, name: str, base_name: str) -> dict[str, FileEntry]:
    """Returns the weights of an earlier export that differs in its LoRA adapters alone.

    Empty if it is the same export, another one, or not complete.
    """
    manifest = read_manifest(target)
    if manifest is None or manifest.source.get(IDENTITY) == name:
        return {}
    if manifest.source.get(BASE_IDENTITY) != base_name:
        return {}
    entries = {
        entry.name: entry
        for entry in manifest.files
        if entry.dtype is not None and not is_lora_file(entry.name)
    }
    problems = Problems(f"the earlier export {target}")
    check_files(target, entries, problems, digests=False)
    problems.raise_if_any(CheckpointError)
    return entries


def check_same(target: Path, name: str, small: Mapping[str, bytes]) -> Manifest | None:
    """Returns the manifest of the export in `target`. Raises CheckpointError for an export of
    another checkpoint or with other settings, or an incomplete one.

    small: the files beside the weights, by name
    """
    manifest = read_manifest(target)
    problems = Problems(f"the earlier export {target}")
    supported = manifest is not None and manifest.source.get(IDENTITY) == name
    if manifest is None or not supported or not _holds(target, small):
        problems.add(
            "it is of another checkpoint, or of other settings",
            change="export.model.overwrite=True to replace it",
        )
    else:
        check_files(target, manifest.entries, problems, digests=False)
    problems.raise_if_any(CheckpointError)
    return manifest


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Return whether the folder has these files as they are."""
    paths = {folder / name: content for name, content in files.items()}
    return all(path.is_file() and path.read_bytes() == paths[path] for path in paths)


def open_source(
    archive: Archive, name: str = "auto", hints: Hints | None = None
) -> SourceCheckpoint:
    """The checkpoint, read by the source called `name`; by default by the one that knows it.

    A hint that contradicts the checkpoint is a CheckpointError.
    """
    hints = hints or Hints()
    if name == "auto":
        matching = (key for key, source in SOURCES.items() if source.matches(archive))
        name = next(matching, "")
        if not name:
            lacking = _lacking(archive)
            text = f"{archive.path} is in no known format{': ' if lacking else ''}{lacking}"
            raise CheckpointError(problem(text, choices=sorted(SOURCES), change=CHECKPOINT_KEY))
        print(f"found a checkpoint of {name}", flush=True)
    checkpoint = lookup(SOURCES, name, "export.model.source").open(archive, hints)
    heads = checkpoint.config.num_heads
    if hints.num_heads not in (None, heads):
        raise CheckpointError(
            problem(
                "the checkpoint has another number of attention heads",
                got=hints.num_heads,
                choices=[heads],
                change="export.model.num_attention_heads",
            )
        )
    return checkpoint


def _lacking(archive: Archive) -> str:
    """Describe what is there in place of a checkpoint, and what to do; "" if there is no more to
    say."""
    is_folder = archive.container == "folder"
    sizes = nemo_files.without_sizes(archive) if is_folder else ""
    return sizes or not_a_checkpoint(archive.path)


def check_serving(settings: ExportSettings, config: ModelConfig) -> None:
    """Raises ConfigError when the model cannot be divided as asked, or the draft model does not fit
    it, CheckpointError when that is none.
    """
    problems = Problems("the export settings")
    check_division(problems, config, settings.parallelism)
    if settings.draft_model_dir is not None:
        check_draft_folder(problems, Path(settings.draft_model_dir), config, settings.parallelism)
    problems.raise_if_any(ConfigError)


def check_space(target: Path, size: int, retained: int = 0) -> None:
    """Raise CheckpointError if so many bytes, of which some are kept, do not fit the disk."""
    needed, free = size - retained, _free_space(target)
    if needed > free:
        raise CheckpointError(
            problem(f"{target} needs {needed} bytes", got=f"{free} bytes free on that disk")
        )


def _free_space(target: Path) -> int:
    """Bytes of the disk, and of what an interrupted run left, which is used or removed."""
    partial = partial_folder(target)
    left = sum(file.lstat().st_size for file in partial.iterdir()) if partial.is_dir() else 0
    return shutil.disk_usage(_existing_parent(target)).free + left


def _existing_parent(target: Path) -> Path:
    return next(path for path in target.absolute().parents if path.is_dir())
