"""config.ini: FasterTransformer's own keys and this project's extension.

Each family has its sections and their keys in a file of its own. Section [extension] holds the
hyperparameters that FasterTransformer has no words for. docs/checkpoint-format.md lists them all.
"""

from __future__ import annotations

import configparser
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer import (
    config_ini_bart,
    config_ini_gpt,
    config_ini_t5,
)
from launcher_scripts.checkpoint.fastertransformer.ini_keys import (
    EXTENSION,
    IniKeys,
    Sections,
    extension_section,
    extension_values,
)
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.common.untrusted import read_plain
from launcher_scripts.models import FAMILIES, family_of
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.ini_text import FILE_NAME, parse_ini

# What the original's guides have users set by hand, since a checkpoint need not say it.
EDITABLE = ("start_id", "end_id", "decoder_start_token_id", "eos_token_id")
WEIGHT_DATA_TYPES = ("fp32", "fp16", "bf16")
_RANK = re.compile(r"\.(\d+)\.bin$")
_EMPTY = ("encoder", "decoder", "structure")


@dataclass(frozen=True)
class IniFormat:
    """How one family is written.

    main:      the section with tensor_para_size and weight_data_type
    mark:      section and, where that is not enough, key that only this family has
    sections:  config, tp_size, weight_data_type, name -> the sections but [extension]
    values:    sections, folder -> the fields of the config they express
    extension: the fields they do not
    """

    main: str
    mark: tuple[str, str | None]
    sections: Callable[[Any, int, str, str], Sections]
    values: Callable[[Mapping[str, IniKeys], Path], dict[str, Any]]
    extension: tuple[str, ...]


FORMATS = {
    "gpt": IniFormat(
        "gpt",
        ("gpt", None),
        config_ini_gpt.sections,
        config_ini_gpt.values,
        config_ini_gpt.EXTENSION_FIELDS,
    ),
    "t5": IniFormat(
        "encoder",
        ("structure", "t5_with_bias"),
        config_ini_t5.sections,
        config_ini_t5.values,
        config_ini_t5.EXTENSION_FIELDS,
    ),
    "bart": IniFormat(
        "encoder",
        ("structure", "bart_with_bias"),
        config_ini_bart.bart_sections,
        config_ini_bart.bart_values,
        config_ini_bart.BART_EXTENSION_FIELDS,
    ),
    "agm": IniFormat(
        "decoder",
        ("structure", "agm_with_bias"),
        config_ini_bart.agm_sections,
        config_ini_bart.agm_values,
        config_ini_bart.AGM_EXTENSION_FIELDS,
    ),
}


@dataclass(frozen=True)
class ConfigIni:
    """What one config.ini says: the model, and how its files are cut and typed."""

    config: ModelConfig
    tp_size: int
    weight_data_type: str


def format_config(
    config: ModelConfig, tp_size: int, weight_data_type: str, name: str | None = None
) -> str:
    """The text of config.ini. name: the model's, by default its family's."""
    family = family_of(config).name
    form = FORMATS[family]
    parser = configparser.RawConfigParser()
    parser.read_dict(form.sections(config, tp_size, weight_data_type, name or family))
    parser[EXTENSION] = extension_section(config, form.extension)
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def fixed_content(text: str) -> bytes:
    """What must stay of config.ini: all values but those of EDITABLE, however they are written.

    Raises configparser.Error.
    """
    parser = parse_ini(text)
    sections = {
        name: {key: value for key, value in section.items() if key not in EDITABLE}
        for name, section in parser.items()
    }
    return json.dumps(sections, sort_keys=True).encode()


def read_config(folder: Path, tp_size: int | None = None) -> ConfigIni:
    """Read `folder`/config.ini, this project's or the original's.

    tp_size: where neither the file nor the folder says it

    Keys the original leaves out take its runtime's defaults; what its file does not say at all
    is read from the names in the folder. Raises CheckpointError with every problem found.
    """
    path = folder / FILE_NAME
    try:
        parser = parse_ini(read_plain(path).decode())
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    family = _family(path, parser)
    form = FORMATS[family]
    problems = Problems(str(path))
    names = {*_EMPTY, *parser.sections()}
    sections = {
        name: IniKeys(path, dict(parser[name]) if parser.has_section(name) else {}, problems)
        for name in names
    }
    config_type = FAMILIES[family].config_type
    values = form.values(sections, folder)
    if EXTENSION in sections:
        values |= extension_values(sections[EXTENSION], config_type, form.extension)
    main = sections[form.main]
    known = _size_in_name(folder) or _size_in_files(folder) or tp_size
    found_size = main.number("tensor_para_size", known)
    weight_data_type = main.text("weight_data_type", "fp32", WEIGHT_DATA_TYPES)
    problems.raise_if_any(CheckpointError)
    try:
        return ConfigIni(config_type(**values), found_size, weight_data_type)
    except LauncherError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _family(path: Path, parser: configparser.RawConfigParser) -> str:
    for family, form in FORMATS.items():
        section, key = form.mark
        if parser.has_section(section) and (key is None or key in parser[section]):
            return family
    marks = [f"[{form.mark[0]}] {form.mark[1] or ''}".strip() for form in FORMATS.values()]
    raise CheckpointError(
        problem(f"{path} is of no known family", got=parser.sections(), choices=marks)
    )


def _size_in_name(folder: Path) -> int | None:
    match = re.fullmatch(r"(\d+)-gpu", folder.resolve().name)
    return int(match.group(1)) if match else None


def _size_in_files(folder: Path) -> int | None:
    """How many ranks have files of their own, which end in `.<rank>.bin`."""
    ranks = [int(match[1]) for path in folder.iterdir() if (match := _RANK.search(path.name))]
    return max(ranks) + 1 if ranks else None
