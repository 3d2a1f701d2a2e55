"""A look at a NeMo checkpoint's hyperparameters, cheap enough for the login side.

Only model_config.yaml is read, or the config.ini that random weights are made from. The converter
reads the checkpoint itself, completely and with its own checks; here a size that cannot work is
found before a job waits for it.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from launcher_scripts.common.errors import CheckpointError
from launcher_scripts.common.parallelism import divisors
from launcher_scripts.common.untrusted import (
    MOST_YAML_BYTES,
    open_plain,
    open_tar,
    parse_yaml,
    read_plain,
    tar_members,
)
from launcher_scripts.models.ini_text import parse_ini

CONFIG_NAME = "model_config.yaml"


@dataclass(frozen=True)
class NemoSizes:
    """What decides how a model can be divided; None where the configuration does not say."""

    num_layers: int | None
    num_heads: int | None
    ffn_size: int | None

    def tp_sizes(self) -> list[int] | None:
        """The tensor-parallel sizes that divide the heads and the MLP."""
        known = [size for size in (self.num_heads, self.ffn_size) if size]
        return divisors(gcd(*known)) if self.num_heads else None


def find_checkpoint(path: Path) -> Path:
    """`path`, or the one .nemo file in it where it is a folder of checkpoints.

    Raises CheckpointError when several files could be meant.
    """
    try:
        if not path.is_dir() or (path / CONFIG_NAME).exists():
            return path
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    found = sorted(path.glob("*.nemo"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path} holds several checkpoints, name one of them: {names}")
    return found[0] if found else path


def read_sizes(path: Path) -> NemoSizes | None:
    """The sizes of a .nemo file or an unpacked folder; None when `path` is neither.

    Raises CheckpointError when the file is broken.
    """
    config = read_config(path)
    if config is None:
        return None
    if isinstance(config.get("encoder"), dict):
        # Both stacks of a T5 are divided alike.
        config = config["encoder"]
    return NemoSizes(
        _size(config, "num_layers"),
        _size(config, "num_attention_heads"),
        _size(config, "ffn_hidden_size"),
    )


def read_config(path: Path) -> dict[str, Any] | None:
    """model_config.yaml of a .nemo file or an unpacked folder; None when `path` is neither.

    Raises CheckpointError when the file is broken.
    """
    try:
        text = _read_config(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as a .nemo file: {error}") from error
    if text is None:
        return None
    try:
        config = parse_yaml(text)
    except ValueError as error:
        raise CheckpointError(f"{CONFIG_NAME} of {path} is no YAML: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG_NAME} of {path} holds no mapping")
    return config


def read_ini_sizes(path: Path) -> NemoSizes:
    """The sizes that a config.ini says. Raises CheckpointError where it cannot be read."""
    try:
        parser = parse_ini(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    names = [name for name in ("gpt", "encoder", "decoder") if parser.has_section(name)]
    section = dict(parser[names[0]]) if names else {}
    sizes = (("num_layer", "num_layers"), ("head_num", "num_heads"), ("inter_size", "d_ff"))
    found = (next((section[key] for key in keys if key in section), "") for keys in sizes)
    return NemoSizes(*(int(text) if text.isdecimal() and int(text) else None for text in found))


def _read_config(path: Path) -> bytes | None:
    if path.suffix != ".nemo" and path.is_file():
        return None
    if path.is_dir():
        config = path / CONFIG_NAME
        return read_plain(config) if config.exists() else None
    with open_plain(path) as file, open_tar(file, "r:*") as archive:
        for member in tar_members(archive):
            if member.name.removeprefix("./") != CONFIG_NAME:
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is None or member.size > MOST_YAML_BYTES:
                raise CheckpointError(f"{CONFIG_NAME} of {path} is no plain, small file")
            return stream.read()
    raise CheckpointError(f"{path} has no {CONFIG_NAME}: it is no NeMo checkpoint")


def _size(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
