"""FasterTransformer's checkpoint folder: `<N>-gpu/` with config.ini and headerless .bin files.

Every file is the little-endian, row-major dump of one tensor or one rank's part of it; names and
shapes are the weight table's. FTCheckpoint reads such a folder, FTWriter makes one.
"""

from __future__ import annotations

import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher_scripts.checkpoint.fastertransformer import config_ini
from launcher_scripts.checkpoint.fastertransformer.manifest import (
    ALGORITHM,
    DIGESTS,
    FORMAT,
    SMALL,
    ExportJournal,
    FileEntry,
    Manifest,
    check_files,
    check_size,
    content_digest,
    memory_digest,
    partial_folder,
    read_manifest,
    reject_existing,
    replace_folder,
    writing,
)
from launcher_scripts.checkpoint.formats.archive import Crc32
from launcher_scripts.checkpoint.formats.source_tensor import BFLOAT16, copied, dtype_name
from launcher_scripts.common.errors import CheckpointError, Problems, problem
from launcher_scripts.models import family_of
from launcher_scripts.models.family import ModelConfig, WeightSpec
from launcher_scripts.models.repository import FILE_NAME as INI_NAME

# At most, by one call: for 2 MiB, Linux takes memory in one block. A virtual machine that gives
# free blocks of that size back to its host must get it from there, which takes ten times as long.
WRITE_BYTES = 1 << 18
Writer = TypeVar("Writer", bound="FolderWriter")
DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype("<f4"),
    "fp16": np.dtype("<f2"),
    "bf16": BFLOAT16,
}


@dataclass(frozen=True)
class WeightFile:
    """One .bin file: which tensor, which layer (None outside of the layers), which rank."""

    spec: WeightSpec
    layer: int | None
    tp_rank: int

    @property
    def name(self) -> str:
        return self.spec.file_name(self.layer, self.tp_rank)


def shard_files(config: ModelConfig, tp_size: int) -> Iterator[WeightFile]:
    """Every .bin file of a checkpoint cut for `tp_size` ranks."""
    for spec in family_of(config).weights(config):
        for layer in spec.layer_numbers(config):
            for tp_rank in spec.tp_ranks(tp_size):
                yield WeightFile(spec, layer, tp_rank)


@dataclass(frozen=True)
class FTCheckpoint:
    """An opened checkpoint: every file is there and has the size its tensor needs.

    weight_data_type: fp32, fp16 or bf16, of all files
    manifest:         None for a folder the original converter wrote
    """

    folder: Path
    config: ModelConfig
    tp_size: int
    weight_data_type: str
    manifest: Manifest | None = None

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> FTCheckpoint:
        """Open `folder`, refusing one with a missing, short, long or altered file by name.

        verify: compare digests with the manifest; of config.ini, config_ini.EDITABLE may be
        edited. Sizes are always checked, and are all that can be where the original converter left
        no manifest.
        Raises CheckpointError with all problems found.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(problem("the checkpoint is not a folder", got=str(folder)))
        ini = config_ini.read_config(folder)
        checkpoint = cls(
            folder, ini.config, ini.tp_size, ini.weight_data_type, read_manifest(folder)
        )
        problems = Problems(f"the checkpoint {folder}")
        checkpoint._check(problems, verify)
        problems.raise_if_any(CheckpointError)
        return checkpoint

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.weight_data_type]

    def read(self, spec: WeightSpec, layer: int | None = None, tp_rank: int = 0) -> NDArray[Any]:
        """One file as a read-only memory map of shape spec.shape_on(config, tp_size).

        bfloat16 has the dtype dtypes.BFLOAT16; its bits are `.view("<u2")`.

        layer: global layer number, None for a tensor outside of the layers
        """
        path = self.folder / spec.file_name(layer, tp_rank)
        shape = spec.shape_on(self.config.of_layer(layer), self.tp_size)
        try:
            return np.memmap(path, self.dtype, "r", shape=shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error

    def read_verified(
        self, spec: WeightSpec, layer: int | None = None, tp_rank: int = 0
    ) -> NDArray[Any]:
        """One file as `read` gives it, copied into memory and then compared with the manifest.

        Raises CheckpointError where there is no manifest or the bytes that were read are others.
        """
        name = spec.file_name(layer, tp_rank)
        entry = None if self.manifest is None else self.manifest.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no manifest with the digest of {name}")
        values = copied(self.read(spec, layer, tp_rank))
        algorithm, right = entry.comparable
        digest = memory_digest(values.reshape(-1).view(np.uint8).data, algorithm)
        if digest != right:
            raise CheckpointError(problem(f"{name} is altered", got=digest, choices=[right]))
        return values

    def _check_counts(self, problems: Problems) -> None:
        """Raise at once where config.ini says there are more files than there can be."""
        layers = {s.layers for s in family_of(self.config).weights(self.config) if s.per_layer}
        counts = {key: getattr(self.config, key) for key in layers} | {"tp_size": self.tp_size}
        present = sum(1 for _ in self.folder.iterdir())
        for key, count in counts.items():
            if count > present:
                problems.add(f"{key} is more than there are files", got=count, choices=[present])
        if self.tp_size not in self.config.tp_sizes():
            problems.add(
                "tensor_para_size does not divide the model",
                got=self.tp_size,
                choices=self.config.tp_sizes(),
            )
        problems.raise_if_any(CheckpointError)

    def _check(self, problems: Problems, verify: bool) -> None:
        self._check_counts(problems)
        sizes = {
            file.name: math.prod(file.spec.shape_on(self.config.of_layer(file.layer), self.tp_size))
            * self.dtype.itemsize
            for file in shard_files(self.config, self.tp_size)
            if file.spec.required or (self.folder / file.name).exists()
        }
        entries: Mapping[str, FileEntry] = {}
        if self.manifest is not None:
            entries = self.manifest.entries
            digested = {name: entries[name] for name in entries if name != INI_NAME}
            check_files(self.folder, digested, problems, digests=verify)
            if verify and INI_NAME in entries:
                self._check_config(entries[INI_NAME], problems)
        for name, size in sizes.items():
            if name not in entries:
                if self.manifest is not None:
                    problems.add(f"{name} is not in the manifest")
                check_size(self.folder / name, size, problems)
            elif entries[name].bytes != size:
                problems.add(
                    f"{name} does not fit config.ini",
                    got=f"{entries[name].bytes} bytes",
                    choices=[f"{size} bytes"],
                )

    def _check_config(self, entry: FileEntry, problems: Problems) -> None:
        text = (self.folder / INI_NAME).read_text(encoding="utf-8")
        algorithm, right = entry.comparable
        digest = content_digest(text.encode(), algorithm)
        digested = content_digest(config_ini.fixed_content(text), algorithm)
        if digest != right and digested != entry.fixed:
            editable = ", ".join(config_ini.EDITABLE)
            problems.add(f"{entry.name} is altered, and not only its {editable}", got=digest)


class FolderWriter(ABC):
    """Makes a checkpoint folder: everything goes to `<name>.partial`, renamed when complete.

    Use as a context manager; leaving it by an exception removes what was written. With a `name`
    (see journal.identity) an interruption leaves the finished files in place instead, and the next
    writer of that name goes on.

    earlier: weights of the folder that is replaced, by name, which stay as they are
    """

    format = FORMAT
    model_type: str
    tp_size: int
    weight_data_type: str

    def __init__(
        self,
        folder: Path,
        *,
        source: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        name: str = "",
        earlier: Mapping[str, FileEntry] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.source = dict(source or {})
        self.overwrite = overwrite
        self.partial = partial_folder(self.folder)
        self.name = name
        self._earlier = dict(earlier or {})
        self._journal: ExportJournal | None = None
        self._sealed = False
        self._entries: dict[str, FileEntry] = {}
        self._created: list[Path] = []

    def __enter__(self: Writer) -> Writer:
        reject_existing(self.folder, self.overwrite)
        with writing(self.partial):
            if self.partial.exists() and not self.name:
                shutil.rmtree(self.partial)
            self._created = [path for path in self.folder.parents if not path.exists()]
            self.partial.mkdir(parents=True, exist_ok=True)
            if self.name:
                self._journal = ExportJournal(self.partial, self.name)
                self._entries = self._journal.restart()
            for entry in self._earlier.values():
                self._keep(entry)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        keep = interrupted and self.name != "" and not self._sealed
        try:
            if kind is None:
                self._commit()
        finally:
            if self._journal is not None:
                self._journal.close(remove=not keep)
            if not keep:
                self._remove()

    def _keep(self, entry: FileEntry) -> None:
        """Take over a weight of the folder that is replaced, without a copy if the disk can."""
        if entry.name in self._entries:
            return
        source, target = self.folder / entry.name, self.partial / entry.name
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
        self.add(entry)

    def holds_file(self, name: str) -> bool:
        """True if an interrupted run has already written this file."""
        return name in self._entries

    def copy(self, content: bytes, name: str, fixed: bytes | None = None) -> None:
        """Write a file that is not a weight, such as the tokenizer's.

        fixed: what must stay of it, if it may be edited
        """
        path = self.partial / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh_file(path) as out:
                write_fully(out.fileno(), memoryview(content))
        retained = None if fixed is None else content_digest(fixed)
        digest = content_digest(content)
        self.add(FileEntry(name, len(content), digest, algorithm=SMALL, fixed=retained))

    def add(self, entry: FileEntry) -> None:
        """Count a file that is written as part of the checkpoint."""
        self._entries[entry.name] = entry
        if self._journal is not None:
            self._journal.add(entry)

    @abstractmethod
    def expected_files(self) -> set[str]:
        """Names of the weights that a complete folder has."""

    @abstractmethod
    def write_config(self) -> None:
        """Write the last file before the manifest."""

    def seal(self) -> None:
        """Write the configuration and the manifest: the partial folder is a checkpoint from here
        on."""
        missing = sorted(self.expected_files() - self._entries.keys())
        if missing:
            raise CheckpointError(problem("not every weight was written", got=missing))
        self.write_config()
        self._write_manifest()
        self._sealed = True

    def annotate(self, key: str, value: Any) -> None:
        """Add to what the manifest of the sealed folder says about the source."""
        self.source[key] = value
        self._write_manifest()

    def _write_manifest(self) -> None:
        entries = tuple(self._entries.values())
        sizes = (self.model_type, self.tp_size, self.weight_data_type)
        manifest = Manifest(*sizes, entries, self.source, format=self.format)
        with writing(self.partial):
            manifest.write(self.partial)

    def _commit(self) -> None:
        if not self._sealed:
            self.seal()
        if self._journal is not None:
            self._journal.close(remove=True)
            self._journal = None
        replace_folder(self.partial, self.folder)

    def _remove(self) -> None:
        """Remove the rest of the partial folder, and the folders made for it."""
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in self._created:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


class FTWriter(FolderWriter):
    """Writes FasterTransformer's files. `write_file` may be called by several processes at once."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        tp_size: int,
        weight_data_type: str,
        **options: Any,
    ) -> None:
        if tp_size not in config.tp_sizes():
            raise CheckpointError(
                problem(
                    "tensor_model_parallel_size must divide the attention heads and the MLP",
                    got=tp_size,
                    choices=config.tp_sizes(),
                    change="export.model.tensor_model_parallel_size",
                )
            )
        super().__init__(folder, **options)
        self.config = config
        self.model_type = family_of(config).name
        self.tp_size = tp_size
        self.weight_data_type = weight_data_type
        self.dtype = DTYPES[weight_data_type]
        self._dtype_name = dtype_name(self.dtype)

    def holds(self, file: WeightFile) -> bool:
        """Return whether an interrupted run has already written this file."""
        return self.holds_file(file.name)

    def write(self, file: WeightFile, chunks: Iterable[NDArray[Any]]) -> None:
        """Write one weight from its consecutive pieces, each contiguous and of the right dtype."""
        self.add(self.write_file(file, chunks))

    def write_file(self, file: WeightFile, chunks: Iterable[NDArray[Any]]) -> FileEntry:
        """`write`, except that the entry must still be added, perhaps in another process."""
        digest, crc, size, name = DIGESTS[ALGORITHM](), Crc32(), 0, file.name
        path = self.partial / name
        with writing(path), fresh_file(path) as out:
            for chunk in chunks:
                data = chunk.data.cast("B")
                write_fully(out.fileno(), data)
                digest.update(data)
                crc.update(data)
                size += len(data)
        shape = file.spec.shape_on(self.config.of_layer(file.layer), self.tp_size)
        expected = math.prod(shape) * self.dtype.itemsize
        if size != expected:
            raise CheckpointError(problem(f"{name} has another size", got=size, choices=[expected]))
        entry = (digest.hexdigest(), shape, self._dtype_name, ALGORITHM, crc.hexdigest())
        return FileEntry(name, size, *entry)

    def expected_files(self) -> set[str]:
        files = shard_files(self.config, self.tp_size)
        return {file.name for file in files if file.spec.required}

    def write_config(self) -> None:
        """Write config.ini."""
        text = config_ini.format_config(self.config, self.tp_size, self.weight_data_type)
        self.copy(text.encode(), INI_NAME, config_ini.fixed_content(text))


def fresh_file(path: Path) -> IO[bytes]:
    """A new file at `path`, whatever was there: a link's target stays as it is."""
    path.unlink(missing_ok=True)
    return path.open("xb", buffering=0)


def write_fully(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data[:WRITE_BYTES]) :]
