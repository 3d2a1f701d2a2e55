"""model_config.yaml of a NeMo checkpoint: where it lies, and the sizes it says.

The login side looks at it, so that a size that cannot work is found before a job waits for it;
the converter finds and reads it by the same rules. Neither numpy nor torch is needed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path, PurePosixPath
from typing import Any

from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.files import (
    MAX_YAML_BYTES,
    mapping,
    open_plain,
    open_tar,
    parse_yaml,
    read_plain,
    tar_members,
)
from launcher_scripts.common.parallelism import divisors

CONFIG_NAME = "model_config.yaml"
# In place of the sizes of a model: a prompt's or an adapter's.
_PARTS = ("language_model_path", "peft")
PART_ADVICE = (
    "a prompt or an adapter, not a model: name it in export.model.prompt_checkpoints, "
    "ia3_checkpoints, adapter_checkpoints or lora_checkpoints, and its model here"
)
_DEPTH = 3  # of folders in a checkpoint that are looked into


@dataclass(frozen=True)
class NemoSizes:
    """Sizes that decide how a model can be divided; None if the configuration lacks them."""

    num_layers: int | None
    num_heads: int | None
    ffn_size: int | None

    def tp_sizes(self) -> list[int] | None:
        """The tensor-parallel sizes that divide the heads and the MLP."""
        sizes = [size for size in (self.num_heads, self.ffn_size) if size]
        return divisors(gcd(*sizes)) if self.num_heads else None


def find_checkpoint(path: Path) -> Path:
    """`path`, or the one .nemo file in it where it is a folder of checkpoints.

    Raises CheckpointError when several files could be meant.
    """
    try:
        if not path.is_dir() or (path / CONFIG_NAME).exists():
            return path
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    archives = sorted(path.glob("*.nemo"))
    if len(archives) > 1:
        names = ", ".join(file.name for file in archives)
        raise CheckpointError(f"{path} holds several checkpoints, name one of them: {names}")
    return archives[0] if archives else path


def is_config(name: str) -> bool:
    """Return whether a file of a checkpoint, in any of its folders, is its model_config.yaml."""
    return PurePosixPath(name).name == CONFIG_NAME


def parse_config(text: bytes, message: str) -> dict[str, Any]:
    """The hyperparameters in a model_config.yaml. message: the file, for errors."""
    try:
        return mapping(parse_yaml(text))
    except ValueError as error:
        raise CheckpointError(f"{message} is damaged: {error}") from error


def section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of the file; an empty one where it has none."""
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def read_sizes(path: Path) -> NemoSizes | None:
    """The sizes of a .nemo file or an unpacked folder; None when `path` is neither.

    Raises CheckpointError when the file is broken, or is a part of a model.
    """
    result = read_config(path)
    if result is None:
        return None
    _, raw = result
    # Both stacks of a T5 are divided alike.
    config = raw["encoder"] if isinstance(raw.get("encoder"), dict) else raw
    sizes = NemoSizes(
        _size(config, "num_layers"),
        _size(config, "num_attention_heads"),
        _size(config, "ffn_hidden_size"),
    )
    if sizes.num_layers is sizes.num_heads is None and any(key in raw for key in _PARTS):
        raise CheckpointError(f"{path} is {PART_ADVICE}")
    return sizes


def read_config(path: Path) -> tuple[str, dict[str, Any]] | None:
    """The folder of model_config.yaml in a .nemo file or an unpacked one ("" or ending in `/`),
    and what it says; None when `path` is neither.

    Raises CheckpointError when the file is broken.
    """
    try:
        config = _read_folder(path) if path.is_dir() else _read_file(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as a .nemo file: {error}") from error
    if config is None:
        return None
    name, text = config
    return name.removesuffix(CONFIG_NAME), parse_config(text, f"{name} of {path}")


def is_packed(path: Path) -> bool:
    """True if a path is a file that holds a whole checkpoint: a .nemo file, whatever its name, or
    a GGUF file.
    """
    if not path.is_file():
        return False
    if path.suffix in (".nemo", ".gguf"):
        return True
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    return is_gguf or (_is_tar(path) and _has_config(path))


def _is_tar(path: Path) -> bool:
    """True for a tar archive, packed by gzip or not, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(512)
    return start[257:262] == b"ustar" or start[:2] == b"\x1f\x8b"


def _has_config(path: Path) -> bool:
    try:
        return _read_file(path) is not None
    except (CheckpointError, OSError, ValueError):
        return False


def folders(path: Path) -> Iterator[str]:
    """The folders of a checkpoint, itself as ".", relative to it."""
    for folder, below, _ in os.walk(path):
        relative = os.path.relpath(folder, path)
        yield relative
        if len(Path(relative).parts) >= _DEPTH:
            below.clear()


def _read_folder(path: Path) -> tuple[str, bytes] | None:
    """Name and content; None where there is none, or more than one, which the converter refuses."""
    names = (str(PurePosixPath(folder, CONFIG_NAME)) for folder in folders(path))
    here = (path / CONFIG_NAME).exists()
    names_present = [CONFIG_NAME] if here else [name for name in names if (path / name).is_file()]
    return (
        (names_present[0], read_plain(path / names_present[0])) if len(names_present) == 1 else None
    )


def _read_file(path: Path) -> tuple[str, bytes] | None:
    if path.suffix != ".nemo" and path.is_file() and not _is_tar(path):
        return None
    with open_plain(path) as file, open_tar(file, "r:*") as archive:
        for member in tar_members(archive):
            if not is_config(member.name):
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is None or member.size > MAX_YAML_BYTES:
                raise CheckpointError(f"{CONFIG_NAME} of {path} is not a plain, small file")
            return str(PurePosixPath(member.name)), stream.read()
    raise CheckpointError(f"{path} has no {CONFIG_NAME}: it is not a NeMo checkpoint")


def _size(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
