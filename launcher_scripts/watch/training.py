"""The checkpoints that a training has completed.

Trainings mark a complete checkpoint in different ways; each layout below knows one. None of them
opens a file of weights, so nothing keeps the training from deleting what it wrote.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher_scripts.checkpoint.formats.distributed import METADATA
from launcher_scripts.checkpoint.layout.source_checkpoint import RANK_FOLDER
from launcher_scripts.checkpoint.sources.locations import TRACKER_NAME
from launcher_scripts.checkpoint.sources.nemo_files import CHECKPOINTS
from launcher_scripts.common.errors import CheckpointError, problem
from launcher_scripts.common.files import parse_json, read_plain

_ITERATION = re.compile(r"iter_(?P<step>\d+)")
_TRAINER = re.compile(r"checkpoint-(?P<step>\d+)")
_STEP = re.compile(r"step=(?P<step>\d+)")
_UNFINISHED = "-unfinished"
_LAST = re.compile(r"-last(-v\d+)?$")
_INDEX = "model.safetensors.index.json"
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that the training has marked as complete.

    name:      of its file or folder, without the ending
    path:      of the file or folder that the export reads
    step:      step or iteration of the training; without one in the name the time of the file
    signature: digest of the names, sizes and times of its files, which changes while it is written
    """

    name: str
    path: Path
    step: int
    signature: str


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints of Megatron-LM, Megatron Bridge, NeMo or transformers'
    Trainer in a training's folder, in the order of their steps.

    Raises CheckpointError if the folder does not exist or cannot be read. A file that the training
    deletes meanwhile leaves its checkpoint out.
    """
    if not folder.is_dir():
        message = "the training's folder does not exist"
        raise CheckpointError(problem(message, got=str(folder), change="watch.training_dir"))
    saved = {}
    for layout in _LAYOUTS:
        for path, step, files in layout(folder):
            signature = _signature(files)
            if signature is not None:
                # A name that is no UTF-8 could not be printed; its path keeps the bytes.
                raw = os.fsencode(path.stem if path.is_file() else path.name)
                name = raw.decode(errors="backslashreplace")
                saved[name] = SavedCheckpoint(name, path, step, signature)
    return sorted(_without_copies(saved), key=lambda checkpoint: (checkpoint.step, checkpoint.name))


Files = list[Path]
Layout = Callable[[Path], Iterator[tuple[Path, int, Files]]]


def _megatron(folder: Path) -> Iterator[tuple[Path, int, Files]]:
    """Iterations up to the one in the tracker file, which is written after the checkpoint."""
    try:
        latest = int(read_plain(folder / TRACKER_NAME))
    except (OSError, ValueError):  # not there yet, or `release`
        return
    for path in _entries(folder):
        match = _ITERATION.fullmatch(path.name)
        if match and int(match["step"]) <= latest and path.is_dir():
            yield path, int(match["step"]), _files_below(path)


def _trainer(folder: Path) -> Iterator[tuple[Path, int, Files]]:
    """Folders with every file of the index and the trainer's state, which is written after it."""
    for path in _entries(folder):
        match = _TRAINER.fullmatch(path.name)
        if not match or not (path / "trainer_state.json").is_file():
            continue
        if (path / "config.json").is_file() and _has_all_shards(path):
            yield path, int(match["step"]), _files_below(path)


def _nemo(folder: Path) -> Iterator[tuple[Path, int, Files]]:
    """.nemo files, and Lightning's files and folders that have no marker beside them."""
    for below in (folder, folder / CHECKPOINTS):
        names = {path.name for path in _entries(below)}
        for path in _entries(below):
            stem = path.name.removesuffix(".ckpt")
            if {f"{path.name}{_UNFINISHED}", f"{stem}{_UNFINISHED}"} & names:
                continue
            if path.is_file() and path.suffix in (".nemo", ".ckpt"):
                yield path, _step(path), [path]
            elif (path / METADATA).is_file() or (path / "weights" / METADATA).is_file():
                yield path, _step(path), _files_below(path)
            elif re.fullmatch(RANK_FOLDER, f"{path.name}/"):
                yield from _ranks(below, path, names)


def _ranks(folder: Path, rank: Path, names: set[str]) -> Iterator[tuple[Path, int, Files]]:
    """Files of the first rank, each with those of the same name of all ranks."""
    ranks = [path for path in _entries(folder) if re.fullmatch(RANK_FOLDER, f"{path.name}/")]
    if rank != ranks[0]:
        return
    for path in _entries(rank):
        files = [other / path.name for other in ranks]
        complete = all(file.is_file() for file in files)
        if path.suffix == ".ckpt" and complete and f"{path.stem}{_UNFINISHED}" not in names:
            yield path, _step(path), files


_LAYOUTS: tuple[Layout, ...] = (_megatron, _trainer, _nemo)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _files_below(folder: Path) -> Files:
    """Files of a checkpoint; [] if the training deletes its folders meanwhile."""
    try:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    except (OSError, RecursionError):
        return []


def _step(path: Path) -> int:
    match = _STEP.search(path.name)
    try:
        return int(match["step"]) if match else int(path.stat().st_mtime)
    except OSError:
        return 0


def _has_all_shards(folder: Path) -> bool:
    """True if the weights are one file, or if every file of the index exists."""
    index = folder / _INDEX
    if not index.is_file():
        return any((folder / name).is_file() for name in _SINGLE_FILES)
    try:
        shards = set(parse_json(read_plain(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all((folder / str(name)).is_file() for name in shards)


def _signature(files: Files) -> str | None:
    """Digest of the files' names, sizes and times, or None if one has gone or there is none."""
    digest = hashlib.sha256()
    for file in files:
        try:
            status = file.stat()
        except OSError:
            return None
        digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0"))
    return digest.hexdigest() if files else None


def _without_copies(saved: dict[str, SavedCheckpoint]) -> Iterator[SavedCheckpoint]:
    """Leave out NeMo's copy `-last` of a step that is saved under its own name, too."""
    steps = {checkpoint.step for name, checkpoint in saved.items() if not _LAST.search(name)}
    for name, checkpoint in saved.items():
        if not _LAST.search(name) or checkpoint.step not in steps:
            yield checkpoint
