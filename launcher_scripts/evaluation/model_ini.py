"""What evaluation has to know of a served model: its config.ini, where it lies in a folder."""

from __future__ import annotations

import configparser
from pathlib import Path

from launcher_scripts.common.errors import ConfigError, problem
from launcher_scripts.common.untrusted import read_plain
from launcher_scripts.models.ini_text import FILE_NAME, parse_ini


def read_model_ini(folder: Path) -> configparser.RawConfigParser:
    """The sections of `folder`/config.ini; none where there is no such file.

    Raises ConfigError for one that cannot be read.
    """
    path = folder / FILE_NAME
    try:
        return parse_ini(read_plain(path).decode() if path.exists() else "")
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(
            problem(f"cannot read {path}: {error}", change="evaluate.tokenizer_dir")
        ) from error
