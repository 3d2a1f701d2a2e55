"""The folder evaluate.tokenizer_dir: a tokenizer, and config.ini where it is the checkpoint's."""

from __future__ import annotations

import configparser
from pathlib import Path

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.files import read_plain
from launcher_scripts.common.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from launcher_scripts.models.repository import FILE_NAME, parse_ini

KEY = "evaluate.tokenizer_dir"


def read_model_ini(folder: Path) -> configparser.RawConfigParser:
    """The sections of `folder`/config.ini; none where there is no such file.

    Raises ConfigError for one that cannot be read.
    """
    path = folder / FILE_NAME
    try:
        return parse_ini(read_plain(path).decode() if path.exists() else "")
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(problem(f"cannot read {path}: {error}", change=KEY)) from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer. Raises ConfigError where it has none, or a damaged one."""
    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        raise ConfigError(problem(str(error), change=KEY)) from error


def read_vocab_size(folder: Path) -> int:
    """Return the vocabulary size of the model in `folder`: config.ini's, else the tokenizer's."""
    config = read_model_ini(folder)
    for section in config.values():
        if "vocab_size" in section:
            return int(section["vocab_size"])
    try:
        return load_tokenizer(folder).vocab_size
    except TokenizerError as error:
        raise ConfigError(
            problem(
                f"{folder} says no vocabulary size, neither by a config.ini nor by a tokenizer: "
                f"{error}",
                change=KEY,
            )
        ) from error
