"""From a source checkpoint to FasterTransformer's shards: check, plan, then write."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from launcher_scripts.checkpoint.convert.data_types import checkpoint_type, range_notes
from launcher_scripts.checkpoint.convert.forecast import Forecast, weight_bytes
from launcher_scripts.checkpoint.convert.journal import identity
from launcher_scripts.checkpoint.convert.manifest import TOOL_VERSION, check_files, read_manifest
from launcher_scripts.checkpoint.convert.output_folder import partial_folder, refuse_existing
from launcher_scripts.checkpoint.convert.progress import Progress
from launcher_scripts.checkpoint.convert.tasks import make_plan, refuse_unfit, write_all
from launcher_scripts.checkpoint.convert.verification import verify_export
from launcher_scripts.checkpoint.fastertransformer.config_ini import check_draft_folder
from launcher_scripts.checkpoint.fastertransformer.folder import FTWriter
from launcher_scripts.checkpoint.formats.archive import Archive
from launcher_scripts.checkpoint.repository import tokenizer_files
from launcher_scripts.checkpoint.repository.served_types import backend_model_type
from launcher_scripts.checkpoint.sources import huggingface_peft, nemo_training
from launcher_scripts.checkpoint.sources.adapters import with_adapters
from launcher_scripts.checkpoint.sources.gguf_checkpoint import GGUFCheckpoint
from launcher_scripts.checkpoint.sources.huggingface import HuggingFaceCheckpoint
from launcher_scripts.checkpoint.sources.megatron import MegatronCheckpoint
from launcher_scripts.checkpoint.sources.megatron_core import MegatronCoreCheckpoint
from launcher_scripts.checkpoint.sources.nemo import NemoCheckpoint
from launcher_scripts.checkpoint.sources.random_checkpoint import RandomCheckpoint
from launcher_scripts.checkpoint.sources.source_checkpoint import Hints, SourceCheckpoint
from launcher_scripts.common.errors import (
    CheckpointError,
    ConfigError,
    LauncherError,
    Problems,
    lookup,
    problem,
)
from launcher_scripts.config.settings import AUTO, CHECKPOINT_KEY, ExportSettings
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig, check_division


class SourceFormat(Protocol):
    """A class of SOURCES: reads checkpoints of one format."""

    def matches(self, archive: Archive, /) -> bool:
        """Whether the archive looks like one of this format."""
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
    "random": RandomCheckpoint,
}
# What the manifest calls the digest of everything that makes an export what it is.
IDENTITY = "identity"
# Compares an exported folder with its source in another way; what the manifest says about it.
Twin = Callable[[Path, ExportSettings], Mapping[str, Any]]


def export(settings: ExportSettings, twin: Twin | None = None) -> Path:
    """Write settings.checkpoint_dir; returns it.

    twin: called with the verified folder where settings.verify asks for it
    Raises CheckpointError or ConfigError. On any error nothing is left, neither under the final
    name nor a partial folder; an interruption leaves the partial folder, and a repeated run
    finishes what is missing.
    """
    target = settings.checkpoint_dir
    refuse_existing(target, settings.overwrite or settings.reuse)
    with _reading(settings.checkpoint_path):
        path, wanted = _located(settings)
        archive = Archive(path, scratch=_existing_parent(target))
        hints = Hints(settings.num_attention_heads, settings.encoder_only, wanted)
        base = open_source(archive, settings.source, hints)
        adapted = with_adapters(base, settings, _existing_parent(target))
        checkpoint: SourceCheckpoint = adapted or base
        files = tokenizer_files.collect(settings.tokenizer, checkpoint.tokenizer_files)
        config = _with_token_ids(settings, checkpoint, files)
        if adapted:
            config = adapted.with_start_id(config)
        if settings.model_type:
            backend_model_type(settings.model_type, config)
        check_serving(settings, config)
        tasks = make_plan(checkpoint, family_of(config).weights(config), f"the checkpoint {path}")
        stored, is_t5 = checkpoint_type(tasks), family_of(config).name == "t5"
        notes = [*checkpoint.notes, *tokenizer_files.missing_files(files)]
        notes += range_notes(settings, stored, is_t5=is_t5)
        for note in notes:
            print(f"note: {note}", flush=True)
        if settings.weight_data_type == AUTO:
            settings = replace(settings, weight_data_type=stored)
        if adapted:
            tasks = adapted.fold(tasks)
    name = _name(settings, checkpoint, config, path)
    if settings.reuse and not settings.overwrite and target.exists():
        _check_same(target, name, files | checkpoint.extra_files())
        if settings.verify:
            verify_export(target, tasks, settings.processes)
        print(f"the earlier export is the same and is kept: {target}", flush=True)
        return target
    total = _check_space(settings, config, target)
    source, free = checkpoint.describe()["format"], _free_space(target)
    print(Forecast.of(source, family_of(config).name, tasks, total, free), flush=True)
    writer = FTWriter(
        target,
        config,
        settings.parallelism.tp_size,
        settings.weight_data_type,
        source=checkpoint.describe() | {IDENTITY: name} | ({"notes": notes} if notes else {}),
        overwrite=settings.overwrite,
        name=name,
    )
    with writer:
        for name, content in (files | checkpoint.extra_files()).items():
            writer.copy(content, name)
        progress = Progress(f"exporting {path.name}", total)
        unfit = write_all(tasks, writer, archive, progress, settings)
        progress.close()
        refuse_unfit(tasks, unfit, f"the weights of {path}")
        writer.seal()
        if settings.verify:
            verify_export(writer.partial, tasks, settings.processes)
            print(f"verified {len(tasks)} tensors against {path}", flush=True)
            if twin is not None:
                writer.annotate("twin", twin(writer.partial, settings))
    return target


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Whatever no reader has foreseen in a checkpoint is an error of that checkpoint."""
    try:
        yield
    except LauncherError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint {path} is damaged: {reason}") from error


def _located(settings: ExportSettings) -> tuple[Path, str]:
    """The checkpoint that is meant, and which one of a training's."""
    path = Path(settings.checkpoint_path)
    if not path.exists():
        raise ConfigError(
            problem(
                "the checkpoint does not exist",
                got=str(path),
                change=CHECKPOINT_KEY,
            )
        )
    return nemo_training.locate(path, settings.training_checkpoint)


def _with_token_ids(
    settings: ExportSettings, checkpoint: SourceCheckpoint, files: Mapping[str, bytes]
) -> Any:
    return tokenizer_files.with_token_ids(
        checkpoint.config,
        settings.tokenizer,
        files,
        known=checkpoint.knows_token_ids,
        rule=checkpoint.token_rule,
    )


def _name(
    settings: ExportSettings, checkpoint: SourceCheckpoint, config: ModelConfig, path: Path
) -> str:
    """What this export is, so that a later one can go on with its files."""
    values = {
        "source": checkpoint.describe(),
        "config": repr(config),
        "tp_size": settings.parallelism.tp_size,
        "weight_data_type": settings.weight_data_type,
        "ia3_in_place": settings.ia3_in_place,
        "allow_nonfinite": settings.allow_nonfinite,
        "tool": TOOL_VERSION,
    }
    parts = (
        *settings.prompt_checkpoints,
        *settings.ia3_checkpoints,
        *settings.adapter_checkpoints,
        *settings.lora_checkpoints,
    )
    return identity(values, [path, *map(Path, parts)])


def _check_same(target: Path, name: str, small: Mapping[str, bytes]) -> None:
    """Raises CheckpointError where the export in `target` is another one, or not whole.

    small: the files beside the weights, by name
    """
    manifest = read_manifest(target)
    problems = Problems(f"the earlier export {target}")
    known = manifest is not None and manifest.source.get(IDENTITY) == name
    if manifest is None or not known or not _holds(target, small):
        problems.add(
            "it is of another checkpoint, or of other settings",
            change="export.model.overwrite=True to replace it",
        )
    else:
        check_files(target, manifest.entries, problems, digests=False)
    problems.raise_if_any(CheckpointError)


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether the folder has these files as they are."""
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
        found = (key for key, source in SOURCES.items() if source.matches(archive))
        name = next(found, "")
        if not name:
            lacking = nemo_training.without_sizes(archive) or _adapter_alone(archive)
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


def _adapter_alone(archive: Archive) -> str:
    """What to say of an adapter in the place of its base; nothing of other checkpoints."""
    if huggingface_peft.CONFIG_NAME not in archive.names():
        return ""
    return "it is an adapter: name it in export.model.adapter_checkpoints, and its base here"


def check_serving(settings: ExportSettings, config: ModelConfig) -> None:
    """Raises ConfigError when the model cannot be divided as asked, or the draft model does not fit
    it, CheckpointError when that is none.
    """
    problems = Problems("the export settings")
    check_division(problems, config, settings.parallelism)
    if settings.draft_model_dir is not None:
        check_draft_folder(problems, Path(settings.draft_model_dir), config, settings.parallelism)
    problems.raise_if_any(ConfigError)


def _check_space(settings: ExportSettings, config: ModelConfig, target: Path) -> int:
    """Bytes of all files to write, which must fit the disk."""
    total = weight_bytes(config, settings.parallelism.tp_size, settings.weight_data_type)
    free = _free_space(target)
    if total > free:
        raise CheckpointError(
            problem(f"{target} needs {total} bytes", got=f"{free} bytes free on that disk")
        )
    return total


def _free_space(target: Path) -> int:
    """Bytes of the disk, and of what an interrupted run left, which is used or removed."""
    partial = partial_folder(target)
    left = sum(file.lstat().st_size for file in partial.iterdir()) if partial.is_dir() else 0
    return shutil.disk_usage(_existing_parent(target)).free + left


def _existing_parent(target: Path) -> Path:
    return next(path for path in target.absolute().parents if path.is_dir())
