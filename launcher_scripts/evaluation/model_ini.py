"""What evaluation has to know of a served model: its config.ini, where it lies in a folder."""

from __future__ import annotations

import configparser
from pathlib import Path

from launcher_scripts.errors import ConfigError, problem

FILE_NAME = "config.ini"


def read_model_ini(folder: Path) -> configparser.RawConfigParser:
    """The sections of `folder`/config.ini, without comments; none where there is no such file.

    Raises ConfigError for one that cannot be read.
    """
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    path = folder / FILE_NAME
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(
            problem(f"cannot read {path}: {error}", change="evaluate.tokenizer_dir")
        ) from error
    return parser
