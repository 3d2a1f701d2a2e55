"""config.ini: FasterTransformer's own keys and this project's extension.

ini_tables.py says which keys a family has. Section [extension] holds the hyperparameters that
FasterTransformer has no words for, or none that are exact.
docs/checkpoint-format.md lists them all.
"""

from __future__ import annotations

import configparser
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher_scripts.checkpoint.fastertransformer.ini_keys import IniFormat, IniKeys
from launcher_scripts.checkpoint.fastertransformer.ini_tables import FORMATS, task_sections
from launcher_scripts.common.errors import CheckpointError, LauncherError, Problems, problem
from launcher_scripts.common.files import read_plain
from launcher_scripts.common.parallelism import Parallelism
from launcher_scripts.config.settings import CHECKPOINT_KEY, DATA_TYPES, DRAFT_MODEL_KEY
from launcher_scripts.models import family_of
from launcher_scripts.models.adapters import adapters_of
from launcher_scripts.models.draft_heads import check_draft_model
from launcher_scripts.models.family import ModelConfig
from launcher_scripts.models.repository import FILE_NAME, parse_ini

EXTENSION = "extension"
EXTENSION_VERSION = 1
# What the original's guides have users set by hand, since a checkpoint need not say it.
EDITABLE = ("start_id", "end_id", "decoder_start_token_id", "eos_token_id")
MAX_LAYERS = 10_000
_RANK = re.compile(r"\.(\d+)\.bin$")
_EMPTY = ("encoder", "decoder", "structure")


@dataclass(frozen=True)
class ConfigIni:
    """The contents of one config.ini: the model, and how its files are split and typed."""

    config: ModelConfig
    tp_size: int
    weight_data_type: str


def format_config(config: ModelConfig, tp_size: int, weight_data_type: str) -> str:
    """The text of config.ini; the model has its family's name there."""
    family = family_of(config).name
    form = FORMATS[family]
    metadata = {
        "model_name": family,
        "_name_or_path": family,
        "tensor_para_size": str(tp_size),
        "weight_data_type": weight_data_type,
    }
    sections: dict[str, dict[str, Any]] = {
        section: {key.name: key.written(config, metadata) for key in keys}
        for section, keys in form.sections.items()
    }
    sections |= task_sections(adapters_of(config))
    values = {field: getattr(config, field) for field in form.extension}
    sections[EXTENSION] = {"version": EXTENSION_VERSION, **values}
    parser = configparser.RawConfigParser()
    parser.read_dict(
        {
            section: {key: str(value) for key, value in values.items() if value is not None}
            for section, values in sections.items()
        }
    )
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def fixed_content(text: str) -> bytes:
    """Return the values of config.ini that must not change: all but those of EDITABLE, however they
    are written.

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
    form = _format(path, parser)
    problems = Problems(str(path))
    names = {*_EMPTY, *parser.sections()}
    sections = {
        name: IniKeys(path, dict(parser[name]) if parser.has_section(name) else {}, problems)
        for name in names
    }
    try:
        values = form.values(sections, folder)
    except ArithmeticError as error:
        raise CheckpointError(f"{path} says a size that no model has: {error}") from error
    if EXTENSION in sections:
        values |= _extension_values(sections[EXTENSION], form)
    main = sections[form.main]
    size_hint = _size_in_name(folder) or _size_in_files(folder) or tp_size
    declared_size = main.number("tensor_para_size", size_hint)
    weight_data_type = main.text("weight_data_type", "fp32", DATA_TYPES)
    problems.raise_if_any(CheckpointError)
    try:
        return ConfigIni(form.config_type(**values), declared_size, weight_data_type)
    except LauncherError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_draft_folder(
    problems: Problems, folder: Path, model: ModelConfig | None, parallelism: Parallelism
) -> None:
    """Note why the model in `folder` cannot be the draft model of an export.

    model: None where nothing is known of it yet.  Raises CheckpointError for a broken config.ini.
    """
    draft = read_config(folder)
    check_draft_model(problems, draft.config, draft.tp_size, model, parallelism, DRAFT_MODEL_KEY)


def random_config(path: Path) -> ModelConfig:
    """The model that a config.ini describes, for weights that are made up.

    Raises CheckpointError for another file, and for more layers than any model has.
    """
    if path.name != FILE_NAME:
        raise CheckpointError(
            problem(
                f"random weights are made from a {FILE_NAME}",
                got=str(path),
                change=CHECKPOINT_KEY,
            )
        )
    config = read_config(path.parent, tp_size=1).config
    layers = max(config.num_layers, getattr(config, "num_decoder_layers", 0))
    if layers > MAX_LAYERS:
        raise CheckpointError(
            problem(
                f"{path} says more layers than any model has",
                got=layers,
                choices=[f"at most {MAX_LAYERS}"],
            )
        )
    return config


def _format(path: Path, parser: configparser.RawConfigParser) -> IniFormat:
    for form in FORMATS.values():
        section, key = form.mark
        if parser.has_section(section) and (key is None or key in parser[section]):
            return form
    sections = [f"[{form.mark[0]}] {form.mark[1] or ''}".strip() for form in FORMATS.values()]
    raise CheckpointError(
        problem(f"{path} is of no known family", got=parser.sections(), choices=sections)
    )


def _extension_values(keys: IniKeys, form: IniFormat) -> dict[str, Any]:
    """The fields in [extension]; an unknown key means a newer format."""
    version = keys.number("version", EXTENSION_VERSION)
    if version != EXTENSION_VERSION:
        keys.problems.add(
            f"{keys.path}: unknown extension version", got=version, choices=[EXTENSION_VERSION]
        )
    names = keys.values.keys() - {"version"}
    for name in sorted(names.difference(form.extension)):
        keys.problems.add(f"{keys.path}: unknown extension key", got=name, choices=form.extension)
    return {name: keys.typed(name, form.types[name]) for name in names & set(form.extension)}


def _size_in_name(folder: Path) -> int | None:
    match = re.fullmatch(r"(\d+)-gpu", folder.resolve().name)
    return int(match.group(1)) if match else None


def _size_in_files(folder: Path) -> int | None:
    """Number of ranks that have their own files, which end in `.<rank>.bin`."""
    ranks = [int(match[1]) for path in folder.iterdir() if (match := _RANK.search(path.name))]
    return max(ranks) + 1 if ranks else None
